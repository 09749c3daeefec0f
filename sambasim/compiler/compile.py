"""Model, example batch, loss, optimizer and options in; one PEF out, and the notices about it."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sambasim import TESTED_TORCH, __version__
from sambasim.compiler.build import Builder, Built, Captures
from sambasim.compiler.capture import explain
from sambasim.compiler.capture.arguments import in_first_step
from sambasim.compiler.capture.asked_values import Asked
from sambasim.compiler.capture.explain import explained, raised
from sambasim.compiler.capture.recording import source_files
from sambasim.compiler.capture.state import NotSound, Observer, observed_beside
from sambasim.compiler.capture.step import EvaluationStep, Example, Loss, Losses, TrainingStep, both_steps
from sambasim.compiler.capture.tensors import (
    STORED,
    as_on_device,
    check_memory,
    check_model,
    dtype_name,
    entries_of,
    has_gaps,
    held_by,
    inputs_in,
    sparse_embeddings,
    stored_in,
)
from sambasim.compiler.capture.trace import CapturedGraph, capture
from sambasim.compiler.capture.trial import buffers_of_plain_tensors, modes_kept
from sambasim.compiler.passes import pipeline, run_pipeline
from sambasim.compiler.sharding.plan import general
from sambasim.compiler.update import Update
from sambasim.errors import CaptureError, DataError, ModelError
from sambasim.ir.dataflow import gathers
from sambasim.ir.mesh import TENSOR, copy_mesh
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import BUILD_FIELDS, CompileOptions
from sambasim.options.grammar import TARGET
from sambasim.options.schedules import arguments_of
from sambasim.pef import write
from sambasim.pef.digests import SOURCES, digests_of_model, record
from sambasim.pef.document import FORMAT, VERSION, WRITER, Compiled, PefDocument, PefGraph
from sambasim.pef.files import record_compiled
from sambasim.units import first_of, format_bytes

_GRU_EXACT_MULTIPLE = 32
"""Hidden sizes of a GRU that are multiples of this give the bits of eager PyTorch: see docs/concepts.md."""


def _notices_of(built: Built, program: Program, model: nn.Module, options: CompileOptions) -> Iterator[str]:
    """`program`: what became of `built`, the graphs of `model`."""
    held = held_by(model)
    yield from built.notices
    received: Counter[str] = Counter()
    for gather in gathers(program.leading, TENSOR, copy_mesh(program.mesh).size(TENSOR)):
        reader = f"{gather.operator} of {general(gather.module)}" if gather.module else gather.operator
        received[reader] += gather.received_bytes
    if received:
        each = ", ".join(f"{reader} ({format_bytes(size_bytes)})" for reader, size_bytes in received.most_common())
        one_pass = "pass" if program.schedule is None else "micro-batch"
        yield f"gathered along tp, {format_bytes(received.total())} a {one_pass}, to compute whole: {each}"
    if others := sorted(entries_of(model).keys() - {name for tensor in held for name in tensor.names}):
        yield (
            f"in state_dict(), and no parameter or buffer: {first_of(others)}; neither the PEF nor a file of --save "
            "holds it"
        )
    if strided := _strided(model):
        yield (
            f"stored contiguously in the PEF: {first_of(strided)}; results equal PyTorch's on contiguous tensors, and "
            "with the strides of the model PyTorch may differ in the last bits"
        )
    if sparse := list(sparse_embeddings(model)):
        yield (
            f"embeddings with sparse=True have dense gradients here: {first_of(sparse)}; an optimizer with momentum, "
            "weight decay or adaptive rates then also updates rows that no sample of a batch reads, and results may "
            "differ from PyTorch's in the last bits"
        )
    if options.arch == "sn20":
        yield "--arch sn20 is priced as sn30: no figures of an SN20 are public"
    if torch.__version__.split("+")[0] != TESTED_TORCH:
        yield f"torch {torch.__version__} is not the tested release, {TESTED_TORCH}"
    if program.training is None:
        return
    if not program.per_sample_loss and program.batch_size > 1 and program.single is None:
        yield (
            "the evaluation graph cannot be captured at batch 1: the last samples, where they do not fill a batch "
            f"of {program.batch_size}, are left out of evaluation"
        )
    symbols, members = program.symbols, (member for group in program.groups for member in group.members)
    trained = {path for member in members for path in symbols[member.parameter].torch_names}
    needing = {tensor.name for tensor in held if tensor.is_parameter and tensor.tensor.requires_grad}
    if unused := sorted(needing - trained):
        yield f"parameters without a gradient, which training leaves as they are: {first_of(unused)}"
    outputs, loss = program.evaluation.outputs[program.loss_outputs :], options.loss.name if options.loss else None
    if loss in ("mse", "l1", "smooth_l1", "huber") and outputs and TARGET in symbols:
        shape, wanted = (list(symbols[name].whole.shape) for name in (outputs[0].symbol, TARGET))
        if shape != wanted:  # PyTorch only warns: the loss is then over all pairs, and mostly a mistake
            yield (
                f"the output of the model has shape {shape} and the target {wanted}: {loss} broadcasts them, "
                "over pairs of samples that do not belong together; give both one shape"
            )


def _strided(model: nn.Module) -> list[str]:
    return [held.name for held in held_by(model) if has_gaps(held.tensor)]


def capture_model(
    model: nn.Module,
    example: Example,
    options: CompileOptions,
    on_phase: Callable[[str], None] = lambda phase: None,
    *,
    loss: Loss | None = None,
    losses: Losses | None = None,
    quick: bool = False,
) -> Built:
    """The graphs of `model` for the batch of `example`, without optimizer and data parallelism. `loss` or `losses`
    replaces that of `options`. A model in evaluation mode is captured after `model.train()`; it is left as it was.
    `quick`: the training step alone, without observing a step before. Raises ModelError and CaptureError."""
    dtype = STORED[options.dtype]
    inputs = inputs_in(dtype, example.inputs)
    for name, tensor in inputs.items():
        if tensor.is_complex():
            what = f"the input {name} is {dtype_name(tensor)}, which a PEF cannot hold"
            raise DataError(what, remedy="give torch.view_as_real(x), and the model torch.view_as_complex(x)")
    with raised("model", model), modes_kept(model), buffers_of_plain_tensors(model):
        several = options.data_parallel or options.chips > 1
        check_model(model, training=not options.inference, replicas=several)
        with (
            rare_collections(),
            stored_in(dtype, model),
            as_on_device(model, ordered=options.tensor_parallel == "weight"),
        ):
            steps = both_steps(model, example, options, loss, losses)
            first = next(iter(inputs.values()))
            of_run = in_first_step(steps[0], options.arguments, first, checks=not options.inference)
            tensors = (*inputs.values(), *of_run.values())
            if quick:
                on_phase("capture the training step")
                captures = _training_alone(steps[0], tensors)
            else:
                named = None if options.inference or options.loss is None else options.loss.name
                says = named if loss is None else "function"
                captures = _capture(*steps, tensors, options, on_phase, says)
            on_phase("translate to the graph")
            return Builder(model, inputs, captures, of_run).built(options.name, first.shape[0])


def assemble(
    built: Built,
    model: nn.Module,
    options: CompileOptions,
    on_phase: Callable[[str], None] = lambda phase: None,
    updates: Sequence[Update] | None = None,
    metadata: Mapping[str, str] | None = None,
    path: Path | None = None,
    groups: Sequence[ParameterGroup] = (),
) -> Compiled:
    """Run the passes that `options` ask for on what was captured, and write `OUTPUT/NAME/NAME.pef`, with `metadata`.
    `updates` replaces their optimizer; `groups`: see `pipeline`. At a `path` that is given it is not recorded as
    compiled by this account."""
    notices: list[str] = []
    program = run_pipeline(built.program, pipeline(options, updates, model, notices.append, groups=groups), on_phase)
    on_phase("write the PEF")
    facts = {**(metadata or {}), **digests_of_model(built.program, built.weights, program.updates)}
    facts[SOURCES] = record(program, source_files(model), options.model.target or "")
    facts |= {"sambasim": __version__, "torch": torch.__version__, "model_repr": repr(model)}
    sizes = sorted({module.hidden_size for module in model.modules() if isinstance(module, nn.GRU)})
    if inexact := ", ".join(str(size) for size in sizes if size % _GRU_EXACT_MULTIPLE):
        why = f"GRU of hidden size {inexact}: gradients may differ from eager in the last bits"
        facts["exempt_from_exactness"] = why
    if strided := _strided(model):
        facts["stored_contiguously"] = ", ".join(strided)  # `inspect` shows all names
    how = options.model_dump(mode="json", include=set(BUILD_FIELDS) - {"output_folder", "check"})
    how = {"model": options.model.model_dump(mode="json"), **how}
    arguments = arguments_of(program.names_of(SymbolKind.ARGUMENT), options.arguments)
    defaults = options.model_copy(update={"arguments": arguments}).training_defaults()
    graphs, data = {program.name: PefGraph(program, facts)}, options.data.model_dump(mode="json")
    document = PefDocument(FORMAT, VERSION, WRITER, "", data, how, defaults, graphs)
    first = {average: built.weights[name] for name, average in program.buffer_averages.items()}
    first = {name: tensor.to(getattr(torch, program.symbols[name].type.dtype)) for name, tensor in first.items()}
    written = write(path or options.pef_path, document, {**built.weights, **first})
    notices += _notices_of(built, program, model, options)
    if path is None:
        notices += record_compiled(written.digest)
    return Compiled(path or options.pef_path, program, written.digest, tuple(notices))


def _capture(
    step: TrainingStep,
    evaluation: EvaluationStep,
    tensors: tuple[Tensor, ...],
    options: CompileOptions,
    on_phase: Callable[[str], None],
    loss: str | None,
) -> Captures:
    steps: list[TrainingStep | EvaluationStep] = [evaluation] if options.inference else [step, evaluation]
    if not (options.inference or step.model.training):
        step.model.train()
    narrow, per_sample = options.dtype != "fp32", evaluation.loss is not step.loss

    def captures(observed: Mapping[nn.Module, Asked], told: tuple[str, ...] = ()) -> Captures:
        training = single = None
        if not options.inference:
            on_phase("capture the training step")
            training = _captured(step, tensors, narrow, observed[step])
        logged = step.logged
        on_phase("capture the evaluation graph")
        evaluation.eval()
        captured = _captured(evaluation, tensors, narrow, observed[evaluation])
        evaluated = evaluation.logged
        if not (options.inference or (per_sample and not evaluated)) and tensors[0].shape[0] > 1:
            on_phase("capture the evaluation graph at batch 1")
            with suppress(CaptureError, ModelError):  # not every sound model runs on one sample; a notice says so
                ones = tuple(tensor[:1].clone() if tensor.ndim else tensor for tensor in tensors)
                asked = Observer([evaluation], ones).call(evaluation) if observed[evaluation].answers else None
                single = capture(evaluation, ones, asked, narrow=narrow)
        notices = (*told, *explain.notices({explain.EVALUATED: captured.kept_buffers}))
        return Captures(training, captured, single, per_sample, step.counts, logged, evaluated, notices)

    observer = Observer(steps, tensors, loss)
    if (beside := observed_beside(observer)) is None:
        on_phase("observe a step")
        return captures(*observer.run())
    made = outside = None
    with suppress(CaptureError, ModelError):  # an observed step says it better
        made = captures({unobserved: Asked() for unobserved in steps})
        with closing(beside):
            outside = beside.end()
    if made is None or outside is None:
        raise NotSound("the model has to be observed first")
    return replace(made, notices=(*explain.notices(outside), *made.notices))


@contextmanager
def rare_collections() -> Iterator[None]:
    """Garbage collections are rare and skip what exists: a trace makes a million objects that live until its end."""
    before, rare = gc.get_threshold(), (50_000, 20, 100)
    if before == rare:  # within another; to count what is frozen would take as long as a collection
        yield
        return
    gc.set_threshold(*rare)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _training_alone(step: TrainingStep, tensors: Sequence[Tensor]) -> Captures:
    """Raises CaptureError, which an observed step says better."""
    captured = capture(step.train(), tensors)
    index = str(captured.losses[0])
    loss = next(node.meta["val"] for node, role in captured.outputs if (role.kind, role.name) == ("output", index))
    if loss.numel() != 1 or not any(role.kind == "tangent" for role in captured.inputs.values()):
        raise CaptureError("the training step returns no loss")
    return Captures(captured, replace(captured, outputs=()))


def _captured(step: nn.Module, tensors: Sequence[Tensor], narrow: bool, asked: Asked) -> CapturedGraph:
    try:
        return capture(step, tensors, asked, narrow=narrow)
    except CaptureError as error:
        call = asked.recording
        if not call.ops:  # it was not observed
            raise
        changed = {label.removeprefix("buffer model.") for op in call.ops for label in op.writes}
        check_memory(held_by(step.get_submodule("model")), changed)
        raise explained(error, step, call) from error
