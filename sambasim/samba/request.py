"""`session.compile`: from what an app passes to a compile request, and from that to a PEF file."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.results import tensors_in
from sambasim.compiler.capture.step import Example
from sambasim.compiler.capture.tensors import trained_by
from sambasim.compiler.update import Update
from sambasim.errors import DataError, ModelError, OptionError, say
from sambasim.ir.program import Program
from sambasim.ir.ranks import with_cut_batch
from sambasim.ir.types import SymbolKind
from sambasim.options.base import build
from sambasim.options.compile import CompileOptions
from sambasim.options.training import TrainingOptions
from sambasim.pef.document import Compiled
from sambasim.pef.files import compile_several
from sambasim.samba.fingerprint import Request, fingerprint
from sambasim.samba.flags import DTYPES, TENSOR_PARALLEL
from sambasim.samba.inputs import Inputs, check_on_host, example_of
from sambasim.samba.notices import say_once
from sambasim.samba.optim import SGD, Adam, AdamW
from sambasim.samba.process import STARTED_IN, app_command, app_error, current, type_error
from sambasim.samba.tensor import SambaTensor, host_values

Optimizer: TypeAlias = SGD | Adam | AdamW

FINGERPRINT, FINGERPRINT_OF_FORWARD, LOSS_INDICES = "step_sha256", "forward_sha256", "loss_indices"
"""Keys in the metadata of a PEF."""


def request(
    model: nn.Module,
    inputs: Inputs,
    optimizers: Sequence[Optimizer],
    given: Mapping[str, object],
    *,
    inference: bool,
    loss_indices: Sequence[int] | int | None = None,
    chips: int | None = None,
    example: Example | None = None,
) -> Request:
    """The request for `model`, with errors for what does not fit together.

    given: fields of `[compile]` and `[parallel]`; None is the default
    chips: those that share the batch; by default what `given` says
    example: how the model is called with `inputs`; by default by position, or by name if they are a mapping"""
    if not isinstance(model, nn.Module):
        raise type_error(ModelError, "the model must be an nn.Module", model, "give the model, and then its inputs")
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, SambaTensor):
                host_values(value, f"{path}.{name}".lstrip("."))
    example = example_of(model, inputs) if example is None else example
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    named = {name: _as_computed(tensor, dtypes) for name, tensor in example.inputs.items()}
    updates = () if inference else tuple(_updates(model, optimizers))
    if not (inference or updates):
        why = "none of its parameters requires a gradient, so nothing trains: as with --inference, the PEF has the "
        say_once(f"the optimizer of {type(model).__name__}", f"{why}forward alone, in evaluation mode")
        inference, given = True, {**given, "stochastic_rounding": None}
    parts: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    parts |= {"inference": inference, "optimizer": optimizers[0].options()[0] if updates else None}
    parts["training"] = TrainingOptions(batch_size=_batch_size(inputs, named))
    indices = (loss_indices,) if isinstance(loss_indices, int) else tuple(loss_indices or ())
    options = build(CompileOptions, parts)
    if (chips := chips or options.chips) > 1:
        named = {name: tensor[: tensor.shape[0] // chips].contiguous() for name, tensor in named.items()}
    return Request(model, example._replace(inputs=named), updates, options, indices)


def fingerprint_of(asked: Request) -> dict[str, str]:
    """The fingerprint of `asked` by its key in the metadata; empty for a model that has none."""
    digest = fingerprint(asked)
    return {} if digest is None else {FINGERPRINT if asked.updates else FINGERPRINT_OF_FORWARD: digest}


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside nn.DataParallel, with a notice; any other module as it is."""
    while isinstance(model, nn.DataParallel):
        say_once("nn.DataParallel", "the model inside it is used; --data-parallel makes replicas")
        model = model.module
    return model


def as_mapping(name: str, value: object) -> Mapping[Any, Any]:
    """A dictionary, or the values of a Namespace; empty for None. Raises OptionError for any other value of `name`."""
    if value is None:
        return {}
    if isinstance(value, Namespace):
        return vars(value)
    if not isinstance(value, Mapping):
        remedy = f"{name}=vars(args), for the args of parse_app_args"
        raise type_error(OptionError, f"{name} must be a dictionary or a Namespace", value, remedy)
    return value


def as_sequence(optimizers: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """One optimizer, several or none, as a list. Raises OptionError for one that is not of `samba.optim`."""
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for optimizer in listed:
        if not isinstance(optimizer, Optimizer):
            what = f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot be compiled"
            raise OptionError(what, remedy="use samba.optim.SGD, samba.optim.Adam or samba.optim.AdamW")
    return listed


def build_fields(config: Mapping[str, object], name: str) -> dict[str, object]:
    """The fields of `[compile]` and `[parallel]` in an app's arguments; `name` is the default name of the PEF."""
    folder, split, n_chips = (config.get(key) for key in ("output_folder", "tensor_parallel", "n_chips"))
    is_split = split in TENSOR_PARALLEL
    if not is_split and isinstance(n_chips, int) and n_chips > 1:
        say_once("--n-chips", "nothing is split over chips without --tensor-parallel batch, or weight")
    fields = {key: config.get(key) for key in ("data_parallel", "arch", "gradient_groups", "num_tiles", "dtype")} | {
        "pef_name": config.get("pef_name") or name,
        "output_folder": None if folder is None else Path(str(folder)),
        "world_size": config.get("world_size") if config.get("data_parallel") else None,
        "opt_level": next((level for level in ("o0", "o1") if config.get(level)), None),
        "stochastic_rounding": config.get("enable_stoc_rounding"),
        "tensor_parallel": split if is_split else None,
        "n_chips": n_chips if is_split else None,
    }
    # An app may have a flag --dtype of its own; -1 is the default of --num-tiles.
    ignored = {"dtype": fields["dtype"] not in DTYPES, "num_tiles": fields["num_tiles"] == -1}
    return {key: None if ignored.get(key) else value for key, value in fields.items()}


def _as_computed(tensor: Tensor, parameters: set[torch.dtype]) -> Tensor:
    """An input in the type in which PyTorch computes: int16 labels as int64; bfloat16 and float32 inputs in the type of
    all `parameters`."""
    if tensor.dtype is torch.int16:
        return tensor.long()
    if tensor.dtype in (torch.bfloat16, torch.float32) and len(parameters) == 1:
        (wanted,) = parameters
        if tensor.dtype is torch.float32 and wanted is torch.bfloat16:
            say_once("the type of float32 inputs", "they are rounded to bfloat16, the type of the parameters")
        return tensor.to(wanted)
    return tensor


def _batch_size(inputs: Inputs, named: Mapping[str, Tensor]) -> int:
    if not named:
        raise DataError("the model has no inputs", remedy="pass inputs= a list of SambaTensors")
    for name, tensor in zip(named, tensors_in(inputs), strict=True):
        check_on_host(name, tensor)
        axis = getattr(tensor, "batch_dim", None)
        if axis not in (None, 0):
            what = f"the batch of {name} is along axis {axis}, but a replica's batch must come first"
            raise DataError(what, remedy=f"transpose {name} in the model, and give it with batch_dim=0")
        if tensor.ndim == 0:
            raise DataError(f"{name} is a single number, without a batch", remedy="give it one value for each sample")
    size, *others = {tensor.shape[0] for tensor in named.values()}
    if others:
        listed = ", ".join(f"{name} {tensor.shape[0]}" for name, tensor in named.items())
        raise DataError(f"inputs have batches of different sizes: {listed}", remedy="give all inputs one batch size")
    return size


def _updates(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterable[Update]:
    if not optimizers:
        remedy = "pass samba.optim.SGD(model.parameters(), …) as the third argument; or, to predict, --inference, "
        remedy += "and inference=True in config_dict"
        raise app_error(OptionError, "training needs an optimizer", remedy)
    trained = trained_by(optimizers, model)
    for optimizer in optimizers:
        for group, options in zip(optimizer.param_groups, optimizer.options(), strict=True):
            if names := frozenset(trained[id(p)] for p in group["params"] if id(p) in trained):
                yield Update(options.name, options.hyperparameters(), names, has_all_states=True)


def compile_request(asked: Mapping[str, Request], metadata: Mapping[str, object]) -> str:
    """Compiles a model, whose name here is "", or each graph as a PEF of its own, and joins them. Returns the absolute
    path of the PEF. See `Session.compile`."""
    if "" in asked:
        return _print_compiled(asked, {"": _compiled(asked[""], metadata)})

    def in_folder(graph: Request, folder: Path) -> Compiled:
        options = graph.options.model_copy(update={"output_folder": folder})
        return _compiled(replace(graph, options=options), metadata)

    path = next(iter(asked.values())).options.pef_path
    works = {name: partial(in_folder, graph) for name, graph in asked.items()}
    return _print_compiled(asked, compile_several(path, works))


def _compiled(asked: Request, metadata: Mapping[str, object]) -> Compiled:
    # It takes seconds to import, and a run does not need it.
    from sambasim.commands.compile import compile_proved
    from sambasim.commands.proof.eager import LiveModel
    from sambasim.compiler.compile import assemble, capture_model

    context = current()
    kept = {str(getattr(key, "key", key)): str(value) for key, value in metadata.items()}
    if context.flag("parsed_batch_size") is not None:  # the default of -b on a run
        kept.setdefault("parsed_batch_size", str(context.flag("parsed_batch_size")))
    quiet = str(context.flag("log_level")).lower() in ("warning", "warn", "error", "critical", "fatal")

    def compiled(on_phase: Callable[[str], None], path: Path | None) -> Compiled:
        built = capture_model(asked.model, asked.example, asked.options, on_phase, losses=asked.losses)
        with_cut_batch(built.program, asked.options.chips)  # raises for outputs that it cannot join
        facts = kept | fingerprint_of(asked) | fingerprint_of(replace(asked, updates=()))
        if asked.loss_indices:
            facts[LOSS_INDICES] = ",".join(map(str, asked.loss_indices))
        return assemble(built, asked.model, asked.options, on_phase, asked.updates or None, facts, path)

    subject = LiveModel(asked.model, asked.example, losses=asked.losses)
    show = (lambda phase: None) if quiet else (lambda phase: say(f"{phase} …", sys.stderr))
    return compile_proved(subject, asked.options, show, work=compiled)


def _print_compiled(asked: Mapping[str, Request], done: Mapping[str, Compiled]) -> str:
    """Prints of each graph the sections, how it was checked, and notices; then the file, and what runs it if a command
    line compiled it. Returns the path of the file."""
    said = current().said
    for name, one in done.items():
        program, graph = one.program, one.program.leading
        path = os.path.abspath(one.path)
        kinds = ", ".join(f"{count} {kind}" for kind, count in graph.section_counts.items())
        of_graph = f"{program.name}, graph {name}" if name else program.name
        say(f"{of_graph}: {len(graph.sections)} sections ({kinds}), {len(graph.nodes)} operators")
        if one.checked is not None:
            say(f"checked: {one.checked}")
        for notice in (*one.notices, *_of_the_loss(program)):
            of_model = f"{type(asked[name].model).__name__}: {notice}"
            if of_model not in said:  # an app may compile more than once
                say(f"notice: {notice}")
            said.add(of_model)
    say(f"PEF file {path} created\nCompilation succeeded")
    app = app_command()
    if app is not None:
        relative = os.path.relpath(path, STARTED_IN)
        typed = path if relative.startswith(os.pardir) else relative
        words = current().flag("parser").words_of_run() | {"pef": ["--pef", typed]}
        if program.training is None:
            words["inference"] = ["--inference"]
        if program.chooses_replicas:
            app = ["mpirun", "-np", str(max(program.world_size, 2)), *app]
            words["data_parallel"] = ["--data-parallel", *["--reduce-on-rdu"] * program.data_parallel]
        say(f"next: {shlex.join([*app, 'run', *chain.from_iterable(words.values())])}")
    return path


def _of_the_loss(program: Program) -> Iterator[str]:
    """A notice if the backward does not start from a loss that is the first output."""
    if program.loss is None or program.training is None:
        return
    loss, names = program.symbols[program.loss].type, [output.symbol for output in program.training.outputs]
    place = [name for name in names if program.symbols[name].kind is SymbolKind.OUTPUT].index(program.loss)
    if len(loss.shape) > 1:
        what = "the model returns no loss: set sn_grad on the output that a backward starts from"
        yield f"{what}; without it, it is {program.loss}, {loss}"
    elif place > 0:
        yield f"the loss is output {place + 1} of the model"
