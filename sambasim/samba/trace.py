"""`trace_graph`: load a PEF for the model that it was compiled from, and make sure that it still is that model."""

import re
import shlex
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.compiler.fit import check_tensors
from sambasim.errors import OptionError, PefError
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.program import ROUNDING_SEED, Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import PefDocument, locate, map_weights, read
from sambasim.pef.account import is_compiled_here
from sambasim.pef.weights import bytes_of
from sambasim.runtime.capacity import check_device, default_threads, keep_freed_memory
from sambasim.runtime.determinism import make_repeatable
from sambasim.runtime.stepwise import StepwiseReplica
from sambasim.samba import context
from sambasim.samba.checks import arguments
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.difference import first_difference, first_use
from sambasim.samba.loaded import outputs_of
from sambasim.samba.machine import Machine
from sambasim.samba.modules import add_old_methods
from sambasim.samba.request import (
    DTYPES,
    FINGERPRINT,
    FINGERPRINT_OF_FORWARD,
    LOSS_INDICES,
    Inputs,
    Optimizer,
    Request,
    as_mapping,
    as_sequence,
    build_fields_of,
    fingerprint_of,
    repeatable,
    request,
    unwrapped,
)
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor


def trace_graph(*arguments: Any, **keywords: Any) -> tuple[SambaTensor, ...]:
    """`trace_graph(model, inputs, optim, …)`: see `_trace_graph`. The oldest apps give `args` first, for its `pef`."""
    if arguments and isinstance(arguments[0], Namespace):
        keywords.setdefault("pef", getattr(arguments[0], "pef", None) or "")
        arguments = arguments[1:]
    return _trace_graph(*arguments, **keywords)


@checks_keywords_beside("trace_graph", ())
def _trace_graph(
    model: nn.Module,
    inputs: Inputs,
    optim: Optimizer | Sequence[Optimizer] | None = None,
    init_output_grads: bool = True,
    loss_indices: Sequence[int] | int | None = None,
    pef: str = "",
    mapping: str = "section",
    data_parallel_mode: str = "normal",
    transfer_device: bool = True,
    distlearn_config: object = None,
    dev_mode: bool = False,
    config_dict: Mapping[str, object] | Namespace | None = None,
    squeeze_bs_dim: bool = False,
) -> tuple[SambaTensor, ...]:
    """Read `pef`, trace `model` again, and load it into the session. Returns the outputs, still without data, which are
    `model.output_tensors` too.

    inputs: one batch, as it was given to `session.compile`
    optim: the optimizers that were compiled; None to predict, with an inference PEF or a training PEF
    loss_indices: the outputs from which the backward starts, as they were given to `session.compile`
    pef: a path or a name; by default that of `config_dict`, or of the command line
    transfer_device: whether the weights of the model, and the state of its optimizers, go to the device now

    The other arguments have no effect. The backward starts as `start.py` says.
    Raises PefError if the PEF was compiled from another graph, with the first difference; OptionError if it was
    compiled with another --dtype than the command line has; LaunchError for more replicas on a node than it has RDUs.
    """
    typed = context.current().arguments
    pef = pef or str(as_mapping("config_dict", config_dict).get("pef") or getattr(typed, "pef", None) or "")
    if not pef:
        raise OptionError(
            "trace_graph was given no PEF",
            where=app_line(),
            remedy="samba.utils.trace_graph(model, inputs, optim, pef=args.pef)",
        )
    wrapper, model = model, unwrapped(model)
    inputs = repeatable(inputs)
    path = locate(pef, compiling=_compile_command())
    document = read(path)
    check_device(document)
    _check_dtype(document)
    communicator = context.communicator()
    communicator.barrier()  # so that all ranks refuse at the same time
    place_replicas(
        inventory_of(document.compile_options), communicator.node_of, command=shlex.join(context.typed_command())
    )
    make_repeatable(getattr(typed, "threads", None) or default_threads(communicator, 1))
    optimizers = as_sequence(optim)
    if document.program.training is not None and _predicts(typed, path.name, optimizers):
        document = replace(document, program=forward_of(document.program))
    fields = {**build_fields_of(document.compile_options), "output_folder": Path("out")}
    predicts = document.program.training is None
    if predicts:
        fields |= {"data_parallel": None, "world_size": None, "stochastic_rounding": None}
    losses = _losses(document, loss_indices)
    asked = request(model, inputs, optimizers, fields, inference=predicts, loss_indices=losses)
    check_tensors(model, training=bool(asked.updates))
    weights = dict(map_weights(path))
    if not _is_known(document, asked):
        _capture_and_compare(document, asked, weights)
    arguments.note_changed(typed, document.metadata, document.program.batch_size)
    keep_freed_memory()
    seed = communicator.broadcast_object(torch.initial_seed())
    replica = StepwiseReplica(_seeded(document.program, seed), communicator)
    for name in _constants(document.program):
        replica.write(name, weights[name])
    for index, update in enumerate(asked.updates):
        replica.change(index, update.hyperparameters)
    machine = Machine(document, model, optimizers, replica)
    outputs = tuple(outputs_of(document.program))
    session.load(machine, inputs, outputs, loss_is_chosen=bool(asked.loss_indices))
    if transfer_device:
        session.to_device(model)
    for one in (model, wrapper):
        one.output_tensors = outputs  # type: ignore[assignment]  # torch says that attributes are tensors and modules
        add_old_methods(one)
    return outputs


_INDICES = re.compile(r"-?\d{1,9}(,-?\d{1,9})*")


def _predicts(typed: Namespace | None, name: str, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a training PEF is to predict: --inference was typed, or, where nothing was, there is no optimizer.

    Raises OptionError where there is neither.
    """
    if getattr(typed, "inference", False):
        return True
    if optimizers or typed is None:
        return not optimizers
    raise OptionError(
        f"{name} trains, and trace_graph was given no optimizer",
        where=app_line(),
        remedy="give it the optimizers that session.compile had; or, to predict with this PEF, type --inference",
    )


def _losses(document: PefDocument, given: Sequence[int] | int | None) -> Sequence[int] | int | None:
    """`loss_indices` as they were at the compile. Raises OptionError if the app gives others now."""
    compiled = document.metadata.get(LOSS_INDICES)
    if compiled is not None and not _INDICES.fullmatch(compiled):  # a stranger's PEF may hold anything
        compiled = None
    if given is None:
        return None if compiled is None else [int(index) for index in compiled.split(",")]
    now = ",".join(map(str, [given] if isinstance(given, int) else given))
    if compiled is not None and compiled != now:
        raise OptionError(
            f"loss_indices is {given}, and was [{compiled}] when the PEF was compiled",
            where=app_line(),
            remedy="give session.compile and trace_graph the same loss_indices",
        )
    return given


def forward_of(program: Program) -> Program:
    """The evaluation graph of a training program, as an inference program has it."""
    graph = program.evaluation
    read = {*graph.inputs, *(output.symbol for output in graph.outputs)}
    kept = {SymbolKind.INPUT, SymbolKind.PARAMETER, SymbolKind.BUFFER}
    symbols = {name: one for name, one in program.symbols.items() if one.kind in kept or name in read}
    for name, symbol in symbols.items():
        if symbol.kind is SymbolKind.BUFFER and not symbol.torch_names:  # of which only training makes a buffer
            symbols[name] = replace(symbol, kind=SymbolKind.CONSTANT)
    return replace(
        program,
        symbols=symbols,
        training=None,
        single=None,
        loss=None,
        optimizers=(),
        groups=(),
        runtime_arguments=(),
        data_parallel=None,
    )


def _check_dtype(document: PefDocument) -> None:
    """Raises OptionError for a --dtype on the command line that is not that of the PEF."""
    typed = getattr(context.current().arguments, "dtype", None)
    compiled = document.compile_options.get("dtype", "fp32")
    if typed in DTYPES and typed != compiled:
        raise OptionError(
            f"--dtype is {typed}, and the PEF {document.program.name} was compiled with --dtype {compiled}",
            remedy=f"leave out --dtype, or compile again with --dtype {typed}",
        )


def _seeded(program: Program, seed: int) -> Program:
    """`program` with `seed` for what its optimizer steps draw when they round."""
    arguments = (
        replace(argument, default=seed) if argument.name == ROUNDING_SEED else argument
        for argument in program.runtime_arguments
    )
    return replace(program, runtime_arguments=tuple(arguments))


def _is_known(document: PefDocument, asked: Request) -> bool:
    """Whether the model does what it did when it was compiled, as far as that can be told without a capture."""
    name = FINGERPRINT if asked.updates else FINGERPRINT_OF_FORWARD
    compiled = document.metadata.get(name)
    if not context.communicator().broadcast_object(is_compiled_here(document.digest)):
        return False  # whoever made it may have copied the fingerprint of another PEF
    return compiled is not None and fingerprint_of(asked).get(name) == compiled


def _capture_and_compare(document: PefDocument, asked: Request, weights: Mapping[str, Tensor]) -> None:
    """Compile the model as the PEF was. Raises PefError if another program comes of it, or another constant."""
    # They take seconds to import, and importing samba must not.
    from sambasim.compiler.compile import Stopwatch, capture_model, pipeline
    from sambasim.compiler.passes import run_pipeline

    built = capture_model(
        asked.model,
        asked.inputs,
        asked.options,
        by_keyword=asked.by_keyword,
        watch=Stopwatch(lambda phase: None),
        any_loss=True,
        loss_indices=asked.loss_indices,
    )
    traced = run_pipeline(built.program, pipeline(asked.options, asked.updates or None), lambda title: None)
    _compare(document, traced)
    for name in _constants(document.program):
        if bytes_of(weights[name]) != bytes_of(built.weights[name]):
            raise PefError(
                f"the constant {name}{first_use(document.program, name)} is not what it was when the PEF "
                f"{document.program.name} was compiled",
                where=app_line(),
                remedy="compile the app again",
            )


def _constants(program: Program) -> list[str]:
    """What the model holds beside its state: masks, tables, plain attributes."""
    return [name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.CONSTANT]


def _compare(document: PefDocument, traced: Program) -> None:
    difference = first_difference(document.program, traced)
    if difference is None:
        return
    name, typed = document.program.name, context.current().arguments
    cause = arguments.likely_cause(typed, document.metadata)
    before, now = _parameters(document.program), _parameters(traced)
    if before.isdisjoint(now) and before and _without_class(before) == _without_class(now):
        raise PefError(
            f"the PEF {name} was compiled from a model of the class {_class(before)}, and this one is a {_class(now)}",
            where=app_line(),
            remedy="compile the app again, or call the class as it was",
        )
    if (before or now) and before.isdisjoint(now):
        raise PefError(
            f"the PEF {name} is of another model: {difference}",
            where=app_line(),
            remedy=f"give --pef the PEF of this model, or compile one: {_compile_command()}",
        )
    as_compiled = arguments.as_compiled(typed, document.metadata)
    again = "compile the app again, and run it with the same model, batch size and optimizers"
    raise PefError(
        f"the PEF {name} was compiled from another graph: {difference}{cause}",
        where=app_line(),
        remedy=f"{as_compiled}, or {again}" if as_compiled else again,
    )


def _without_class(parameters: Collection[str]) -> set[str]:
    return {parameter.partition("__")[2] for parameter in parameters}


def _class(parameters: Collection[str]) -> str:
    """In lower case, as the names of symbols begin with it."""
    return next(iter(parameters)).partition("__")[0]


def _parameters(program: Program) -> set[str]:
    return {name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.PARAMETER}


def _compile_command() -> str:
    """What compiles this app: what was typed, up to its command."""
    words, command = context.typed_command(), context.current().command
    if command not in words:
        return "samba.session.compile(model, inputs, optim, …)"
    return f"{shlex.join(words[: words.index(command)])} compile …"
