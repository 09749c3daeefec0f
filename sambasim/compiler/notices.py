"""What `compile` says about a program: its notices, and what is exempt from exactness."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from sambasim.compiler.build import Built
from sambasim.compiler.capture.step import TARGET
from sambasim.compiler.capture.tensors import entries_of, held_by, sparse_embeddings
from sambasim.compiler.capture.trace import TESTED_TORCH
from sambasim.compiler.sharding.plan import general
from sambasim.ir.dataflow import gathers
from sambasim.ir.mesh import TENSOR
from sambasim.ir.program import Program
from sambasim.units import format_bytes

_CHECKPOINTING = "torch.utils.checkpoint in the model saves no memory here, and --recompute full does"

_GRU_EXACT_MULTIPLE = 32
"""Hidden sizes of a GRU that are multiples of this give the bits of eager PyTorch: see docs/concepts.md."""


_BROADCAST = ("mse", "l1", "smooth_l1", "huber")
"""Losses that take an output and a target of different shapes."""


def notice_of_shapes(program: Program, loss: str | None) -> Iterator[str]:
    """A notice where the first output and the target of a loss differ in shape. PyTorch only warns: the loss is then
    over all pairs, and mostly a mistake."""
    outputs = [output.symbol for output in program.evaluation.outputs[1:]]
    if program.training is None or loss not in _BROADCAST or not outputs or TARGET not in program.symbols:
        return
    given, wanted = (program.symbols[name].whole.shape for name in (outputs[0], TARGET))
    if given != wanted:
        yield (
            f"the output of the model has shape {list(given)} and the target {list(wanted)}: {loss} broadcasts them, "
            "over pairs of samples that do not belong together; give both one shape"
        )


def notices_of(built: Built, program: Program, model: nn.Module) -> list[str]:
    """`program`: what became of `built`, the graphs of `model`."""
    notices = [*_gathered(program), *built.notices]
    if built.checkpointed:
        notices.append(_CHECKPOINTING)
    if built.cast_twice:
        notices.append(
            f"read several times under torch.autocast: {', '.join(built.cast_twice)}; PyTorch adds up their gradients "
            "in the narrow type, so results may differ from PyTorch's in the last bits of that type"
        )
    held = held_by(model)
    if others := sorted(entries_of(model).keys() - {name for one in held for name in one.names}):
        notices.append(
            f"in state_dict(), and no parameter or buffer: {', '.join(others)}; neither the PEF nor a file of --save "
            "holds it"
        )
    if strided := [one.name for one in held if not one.tensor.is_contiguous()]:
        notices.append(
            f"stored contiguously in the PEF: {', '.join(strided)}; results equal PyTorch's on contiguous tensors, and "
            "with the strides of the model PyTorch may differ in the last bits"
        )
    if sparse := ", ".join(sparse_embeddings(model)):
        notices.append(
            f"embeddings with sparse=True have dense gradients here: {sparse}; an optimizer with momentum, weight "
            "decay or adaptive rates then also updates rows that no sample of a batch reads, and results may differ "
            "from PyTorch's in the last bits"
        )
    if torch.__version__.split("+")[0] not in TESTED_TORCH:
        notices.append(f"torch {torch.__version__} is not among the tested releases: {', '.join(TESTED_TORCH)}")
    if program.training is None:
        return notices
    if not program.per_sample_loss and program.batch_size > 1 and program.single is None:
        notices.append(
            "the evaluation graph cannot be captured at batch 1: the last samples, where they do not fill a batch "
            f"of {program.batch_size}, are left out of evaluation"
        )
    members = (member for group in program.groups for member in group.members)
    trained = {path for member in members for path in program.symbols[member.parameter].torch_names}
    if unused := sorted(
        one.name for one in held if one.is_parameter and one.tensor.requires_grad and one.name not in trained
    ):
        notices.append(f"parameters without a gradient, which training leaves as they are: {', '.join(unused)}")
    return notices


def _gathered(program: Program) -> Iterator[str]:
    """What the ranks along tp gather because an operator cannot work on parts."""
    graph = program.leading
    ranks = next((axis.size for axis in program.mesh if axis.name == TENSOR), 1)
    received: Counter[str] = Counter()
    for gather in gathers(graph, TENSOR, ranks):
        reader = f"{gather.operator} of {general(gather.module)}" if gather.module else gather.operator
        received[reader] += gather.received_bytes
    if received:
        each = ", ".join(f"{reader} ({format_bytes(size_bytes)})" for reader, size_bytes in received.most_common())
        one_pass = "pass" if program.schedule is None else "micro-batch"
        yield f"gathered along tp, {format_bytes(received.total())} a {one_pass}, to compute whole: {each}"


def exemptions(model: nn.Module) -> dict[str, str]:
    """Metadata of the PEF: what is exempt from exactness."""
    sizes = {module.hidden_size for module in model.modules() if isinstance(module, nn.GRU)}
    inexact = sorted(size for size in sizes if size % _GRU_EXACT_MULTIPLE)
    if not inexact:
        return {}
    of_sizes = f"GRU of hidden size {', '.join(map(str, inexact))}"
    return {"exempt_from_exactness": f"{of_sizes}: gradients may differ from eager in the last bits"}
