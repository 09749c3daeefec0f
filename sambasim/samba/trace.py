"""`trace_graph`: load a PEF for the model that it was compiled from, and check that the model has not changed."""

import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sambasim.compiler.tensors import check_tensors
from sambasim.errors import OptionError
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.program import ROUNDING_SEED, Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import PefDocument, locate, map_weights, read
from sambasim.pef.lookup import is_compiled_here
from sambasim.runtime.capacity import check_device, default_threads, keep_freed_memory
from sambasim.runtime.determinism import make_repeatable
from sambasim.runtime.stepwise import StepwiseReplica
from sambasim.samba import context
from sambasim.samba.checks import arguments
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.difference import capture_and_compare, compile_command, constants
from sambasim.samba.inputs import Inputs, repeatable
from sambasim.samba.loaded import outputs_of
from sambasim.samba.machine import Machine
from sambasim.samba.modules import add_old_methods
from sambasim.samba.request import (
    DTYPES,
    FINGERPRINT,
    FINGERPRINT_OF_FORWARD,
    LOSS_INDICES,
    Optimizer,
    Request,
    as_mapping,
    as_sequence,
    build_fields_of,
    fingerprint_of,
    request,
    unwrapped,
)
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor

_INDICES = re.compile(r"-?\d{1,9}(,-?\d{1,9})*")


def trace_graph(*arguments: Any, **keywords: Any) -> tuple[SambaTensor, ...]:
    """`trace_graph(model, inputs, optim, …)`: see `_trace_graph`. Old apps pass `args` first, for its `pef`."""
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
    """Loads `pef` into the session for `model`. Returns the outputs, without data; they are `model.output_tensors` too.

    inputs: one batch, as for `session.compile`
    optim: the optimizers that were compiled; None to predict with an inference PEF or a training PEF
    loss_indices: the outputs from which the backward starts, as for `session.compile`
    pef: a path or a name; by default that of `config_dict`, or of the command line
    transfer_device: whether to copy weights and optimizer state to the device now

    The other arguments have no effect. `start.py` says where the backward starts.
    Raises PefError with the first difference if the PEF was compiled from another graph; OptionError if it was compiled
    with another --dtype than the command line has; LaunchError for more replicas on a node than it has RDUs.
    """
    typed = context.current().arguments
    pef = pef or str(as_mapping("config_dict", config_dict).get("pef") or getattr(typed, "pef", None) or "")
    if not pef:
        raise OptionError(
            "trace_graph needs a PEF",
            where=app_line(),
            remedy="samba.utils.trace_graph(model, inputs, optim, pef=args.pef)",
        )
    wrapper, model = model, unwrapped(model)
    inputs = repeatable(inputs)
    path = locate(pef, compiling=compile_command())
    document = read(path)
    check_device(document)
    _check_dtype(document)
    communicator = context.communicator()
    communicator.barrier()  # so that all ranks raise the errors below together
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
        capture_and_compare(document, asked, weights)
    arguments.note_changed(typed, document.metadata, document.program.batch_size)
    keep_freed_memory()
    seed = communicator.broadcast_object(torch.initial_seed())
    replica = StepwiseReplica(_seeded(document.program, seed), communicator)
    for name in constants(document.program):
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


def _predicts(typed: Namespace | None, name: str, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a training PEF predicts: with --inference, or in a process without a command line, without optimizers.

    Raises OptionError for a command line with neither.
    """
    if getattr(typed, "inference", False):
        return True
    if optimizers or typed is None:
        return not optimizers
    raise OptionError(
        f"{name} trains, and trace_graph needs its optimizers",
        where=app_line(),
        remedy="give it the optimizers of session.compile; or, to predict with this PEF, type --inference",
    )


def _losses(document: PefDocument, given: Sequence[int] | int | None) -> Sequence[int] | int | None:
    """`loss_indices` of the compile. Raises OptionError if the app gives others now."""
    compiled = document.metadata.get(LOSS_INDICES)
    if compiled is not None and not _INDICES.fullmatch(compiled):  # metadata of a foreign PEF may be any text
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
        if symbol.kind is SymbolKind.BUFFER and not symbol.torch_names:  # a buffer in training only
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
    """`program` with `seed` for stochastic rounding."""
    arguments = (
        replace(argument, default=seed) if argument.name == ROUNDING_SEED else argument
        for argument in program.runtime_arguments
    )
    return replace(program, runtime_arguments=tuple(arguments))


def _is_known(document: PefDocument, asked: Request) -> bool:
    """Whether the fingerprint of the model is that of the compile."""
    name = FINGERPRINT if asked.updates else FINGERPRINT_OF_FORWARD
    compiled = document.metadata.get(name)
    if not context.communicator().broadcast_object(is_compiled_here(document.digest)):
        return False  # its fingerprint may be copied from another PEF
    return compiled is not None and fingerprint_of(asked).get(name) == compiled
