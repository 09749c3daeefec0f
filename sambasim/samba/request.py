"""`session.compile`: from what an app passes to a compile request, and from that to a PEF file."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.capture.tensors import held_by
from sambasim.compiler.update import Update
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.ir.views import with_cut_batch
from sambasim.options.base import build
from sambasim.options.compile import BUILD_FIELDS, CompileOptions
from sambasim.options.training import TrainingOptions
from sambasim.samba import process
from sambasim.samba.findings import app_error
from sambasim.samba.fingerprint import fingerprint
from sambasim.samba.flags import DTYPES, TENSOR_PARALLEL
from sambasim.samba.inputs import Inputs, check_on_host, flat, name_inputs
from sambasim.samba.losses import losses_of
from sambasim.samba.notices import say_once
from sambasim.samba.optim import SGD, Adam, AdamW
from sambasim.samba.tensor import SambaTensor, host_values

if TYPE_CHECKING:
    from sambasim.commands.compile import Proved
    from sambasim.compiler.build import Built
    from sambasim.compiler.compile import Stopwatch

Optimizer: TypeAlias = SGD | Adam | AdamW

FINGERPRINT, FINGERPRINT_OF_FORWARD = "step_sha256", "forward_sha256"
"""Keys of fingerprints of the model in the metadata of a PEF."""

LOSS_INDICES = "loss_indices"
"""The key of `loss_indices=` there."""

_ALL_TILES = -1  # the default of --num-tiles


@dataclass(frozen=True, slots=True)
class Request:
    """A model with one batch of plain tensors by name, and how it is compiled."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    by_keyword: bool
    updates: tuple[Update, ...]
    options: CompileOptions
    loss_indices: tuple[int, ...] = ()


def request(
    model: nn.Module,
    inputs: Inputs,
    optimizers: Sequence[Optimizer],
    given: Mapping[str, object],
    *,
    inference: bool,
    loss_indices: Sequence[int] | int | None = None,
    chips: int | None = None,
) -> Request:
    """The request for `model`.

    given: fields of `[compile]` and `[parallel]`; None is the default
    chips: those that share the batch; by default what `given` says

    Raises OptionError for options that do not fit together, DataError for inputs that have no common batch, ModelError
    for a trained parameter that no optimizer has, and WeightsError for a SambaTensor in the model that has no data.
    """
    if not isinstance(model, nn.Module):
        what = f"the model must be an nn.Module, not {type(model).__name__}"
        raise app_error(ModelError, what, "give the model, and then its inputs")
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, SambaTensor):
                host_values(value, f"{path}.{name}".lstrip("."))
    named, by_keyword = name_inputs(model, inputs)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    named = {name: _as_computed(tensor, kinds) for name, tensor in named.items()}
    updates = () if inference else tuple(_updates(model, optimizers))
    first = optimizers[0].options()[0] if updates else None
    parts: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    parts |= {
        "inference": inference,
        "optimizer": first,
        "training": TrainingOptions(batch_size=_batch_size(inputs, named)),
    }
    indices = (loss_indices,) if isinstance(loss_indices, int) else tuple(loss_indices or ())
    options = build(CompileOptions, parts)
    if (chips := chips or options.chips) > 1:
        named = {name: tensor[: tensor.shape[0] // chips].contiguous() for name, tensor in named.items()}
    return Request(model, named, by_keyword, updates, options, indices)


def fingerprint_of(asked: Request) -> dict[str, str]:
    """The fingerprint of `asked` by its key in the metadata; empty for a model that has none."""
    digest = fingerprint(
        asked.model,
        asked.inputs,
        asked.updates,
        by_keyword=asked.by_keyword,
        dtype=asked.options.dtype,
        loss_indices=asked.loss_indices,
    )
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
        what = f"{name} must be a dictionary or a Namespace, and is {type(value).__name__}"
        raise app_error(OptionError, what, f"{name}=vars(args), for the args of parse_app_args")
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
    dtype, folder = config.get("dtype"), config.get("output_folder")
    split = config.get("tensor_parallel")
    split = split if split in TENSOR_PARALLEL else None
    n_chips = config.get("n_chips")
    if split is None and isinstance(n_chips, int) and n_chips > 1:
        say_once("--n-chips", "nothing is split over chips without --tensor-parallel batch, or weight")
    return {
        "pef_name": config.get("pef_name") or name,
        "output_folder": None if folder is None else Path(str(folder)),
        "data_parallel": config.get("data_parallel"),
        "world_size": config.get("world_size") if config.get("data_parallel") else None,
        "opt_level": "o0" if config.get("o0") else "o1" if config.get("o1") else None,
        "arch": config.get("arch"),
        "num_tiles": None if config.get("num_tiles") == _ALL_TILES else config.get("num_tiles"),
        "dtype": dtype if dtype in DTYPES else None,  # an app may have a flag of its own by that name
        "stochastic_rounding": config.get("enable_stoc_rounding"),
        "gradient_groups": config.get("gradient_groups"),
        "tensor_parallel": split,
        "n_chips": None if split is None else n_chips,
    }


def build_fields_of(compile_options: Mapping[str, object]) -> dict[str, object]:
    """The fields of `[compile]` and `[parallel]` in the options of a PEF."""
    names = BUILD_FIELDS - {"output_folder", "inference"}
    return {name: value for name, value in compile_options.items() if name in names}


def _as_computed(tensor: Tensor, parameters: set[torch.dtype]) -> Tensor:
    """An input in the type in which PyTorch computes: int16 labels as int64; bfloat16 and float32 inputs in the type of
    all `parameters`."""
    if tensor.dtype is torch.int16:
        return tensor.long()
    if tensor.dtype in (torch.bfloat16, torch.float32) and len(parameters) == 1:
        wanted = next(iter(parameters))
        if tensor.dtype is torch.float32 and wanted is torch.bfloat16:
            say_once("the type of float32 inputs", "they are rounded to bfloat16, the type of the parameters")
        return tensor.to(wanted)
    return tensor


def _batch_size(inputs: Inputs, named: Mapping[str, Tensor]) -> int:
    """The size of the first axis of all inputs."""
    if not named:
        raise DataError("the model has no inputs", remedy="pass inputs= a list of SambaTensors")
    for name, tensor in zip(named, flat(inputs), strict=True):
        check_on_host(name, tensor)
        axis = tensor.batch_dim if isinstance(tensor, SambaTensor) else None
        if axis not in (None, 0):
            what = f"the batch of {name} is along axis {axis}, but a replica's batch must come first"
            raise DataError(what, remedy=f"transpose {name} in the model, and give it with batch_dim=0")
        if tensor.ndim == 0:
            what = f"{name} is a single number, without a batch"
            raise DataError(what, remedy=f"give {name} one value for each sample")
    sizes = {name: tensor.shape[0] for name, tensor in named.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(f"inputs have batches of different sizes: {listed}", remedy="give all inputs one batch size")
    return next(iter(sizes.values()))


def _updates(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterable[Update]:
    """An update for each parameter group with trained parameters."""
    if not optimizers:
        remedy = "pass samba.optim.SGD(model.parameters(), …) as the third argument; or, to predict, --inference, "
        remedy += "and inference=True in config_dict"
        raise app_error(OptionError, "training needs an optimizer", remedy)
    paths = {id(held.tensor): held.name for held in held_by(model) if held.is_parameter}
    updated: set[str] = set()
    for optimizer in optimizers:
        for group, options in zip(optimizer.param_groups, optimizer.options(), strict=True):
            names = frozenset(paths[id(p)] for p in group["params"] if id(p) in paths and p.requires_grad)
            others = sum(id(p) not in paths for p in group["params"])
            if others:
                what = f"{type(optimizer).__name__} updates {others} parameters that the model does not have"
                raise ModelError(what, remedy="make the optimizer after the model is complete, from model.parameters()")
            twice = sorted(updated & names)
            if twice:
                what = f"two optimizers, or groups, update {twice[0]}"
                raise ModelError(what, remedy="give each parameter to one of them")
            updated |= names
            if names:
                yield Update(options.name, options.hyperparameters(), names)
    missing = [held.name for held in held_by(model) if held.tensor.requires_grad and held.name not in updated]
    if missing:
        what = f"no optimizer updates {', '.join(missing[:3])}{' …' * (len(missing) > 3)}"
        raise ModelError(what, remedy="give them to an optimizer, or freeze them: parameter.requires_grad_(False)")


def compile_request(asked: Request, metadata: Mapping[str, object]) -> str:
    """Compiles a model. Returns the absolute path of the PEF. See `Session.compile`."""
    # It takes seconds to import, and a run does not need it.
    from sambasim.commands.compile import compile_proved
    from sambasim.commands.proof.eager import LiveModel
    from sambasim.compiler.compile import Compiled, Stopwatch, assemble

    context = process.current()
    kept = {str(getattr(key, "key", key)): str(value) for key, value in metadata.items()}
    parsed = context.flag("parsed_batch_size")
    if parsed is not None:  # the default of -b on a run
        kept.setdefault("parsed_batch_size", str(parsed))
    quiet = str(context.flag("log_level")).lower() in ("warning", "warn", "error", "critical", "fatal")

    def compiled(on_phase: Callable[[str], None], path: Path | None) -> Compiled:
        watch = Stopwatch(on_phase)
        built = captured(asked, watch)
        with_cut_batch(built.program, asked.options.chips)  # raises for outputs that it cannot join
        facts = kept | fingerprint_of(asked) | fingerprint_of(replace(asked, updates=()))
        if asked.loss_indices:
            facts[LOSS_INDICES] = ",".join(map(str, asked.loss_indices))
        return assemble(built, asked.model, asked.options, watch, asked.updates or None, facts, path)

    losses = losses_of(asked.model, asked.loss_indices)
    subject = LiveModel(asked.model, asked.inputs, asked.by_keyword, losses=losses)
    done = compile_proved(
        subject,
        asked.options,
        lambda phase: None if quiet else print(f"{phase} …", file=sys.stderr, flush=True),
        work=compiled,
    )
    _print_compiled(done)
    return str(done.compiled.path.absolute())


def captured(asked: Request, watch: "Stopwatch") -> "Built":
    from sambasim.compiler.compile import capture_model

    example = Example(asked.inputs, asked.by_keyword)
    losses = losses_of(asked.model, asked.loss_indices)
    return capture_model(asked.model, example, asked.options, watch, losses=losses)


def _print_compiled(done: "Proved") -> None:
    """The sections, how it was checked, notices, the file, and what runs it if a command line compiled it."""
    compiled, checked = done.compiled, done.checked
    path, program = os.path.abspath(compiled.path), compiled.program
    graph = program.leading
    kinds = ", ".join(f"{count} {kind}" for kind, count in graph.section_counts.items())
    print(f"{program.name}: {len(graph.sections)} sections ({kinds}), {len(graph.nodes)} operators")
    if checked is not None:
        print(f"checked: {checked}")
    for notice in (*compiled.notices, *_of_the_loss(program)):
        print(f"notice: {notice}")
    print(f"PEF file {path} created\nCompilation succeeded")
    app = process.app_command()
    if app is not None:
        replicas = max(program.world_size, 2) if program.data_parallel else 1
        command = [*app, "run", *(["--inference"] if program.training is None else []), "--pef", _as_typed(path)]
        if replicas > 1:
            command = ["mpirun", "-np", str(replicas), *command, "--data-parallel", "--reduce-on-rdu"]
        print(f"next: {shlex.join(command)}")
    sys.stdout.flush()


def _of_the_loss(program: Program) -> Iterator[str]:
    """A notice if the backward does not start from a loss that is the first output."""
    if program.loss is None or program.training is None:
        return
    loss = program.symbols[program.loss].type
    outputs = [
        output.symbol for output in program.training.outputs if program.symbols[output.symbol].kind is SymbolKind.OUTPUT
    ]
    if len(loss.shape) > 1:
        what = "the model returns no loss: set sn_grad on the output that a backward starts from"
        yield f"{what}; without it, it is output {outputs.index(program.loss) + 1}, {loss}"
    elif outputs.index(program.loss) > 0:
        yield f"the loss is output {outputs.index(program.loss) + 1} of the model"


def _as_typed(path: str) -> str:
    """`path` relative to the folder in which the app was started, if it is inside."""
    relative = os.path.relpath(path, process.STARTED_IN)
    return path if relative.startswith(os.pardir) else relative
