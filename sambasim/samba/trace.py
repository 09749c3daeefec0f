"""`trace_graph`: load a PEF for the model that it was compiled from."""

import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.tensors import check_model
from sambasim.errors import OptionError
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.mesh import replica_mesh
from sambasim.ir.program import LOSS_SCALE, ROUNDING_SEED, Program
from sambasim.ir.types import SymbolKind
from sambasim.ir.views import as_one_rank
from sambasim.pef import PefDocument, locate, map_weights, read
from sambasim.runtime.machine.pytorch import make_repeatable
from sambasim.runtime.machine.resources import check_device, default_threads, keep_freed_memory
from sambasim.runtime.run.stepwise import StepwiseReplica
from sambasim.samba import joining, process
from sambasim.samba.checks import arguments
from sambasim.samba.device import Machine
from sambasim.samba.difference import capture_and_compare, constants, is_known
from sambasim.samba.findings import app_error
from sambasim.samba.flags import DTYPES, TENSOR_PARALLEL
from sambasim.samba.inputs import Inputs, repeatable
from sambasim.samba.keywords import checks_keywords_of
from sambasim.samba.loaded import outputs_of
from sambasim.samba.models import add_old_methods
from sambasim.samba.request import (
    LOSS_INDICES,
    Optimizer,
    Request,
    as_mapping,
    as_sequence,
    build_fields_of,
    request,
    unwrapped,
)
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor


def _check_pef(document: PefDocument) -> None:
    """Raises OptionError for a pipeline, for float16 and master weights, which need a loss scale and steps that may be
    skipped, and for other chips or another dtype than the command line asks for."""
    program, compiled, context = document.program, document.compile_options, process.current()
    check_device(document)
    if program.schedule is not None:
        ranks = program.ranks_of_replica
        raise OptionError(
            f"the PEF {program.name} is a pipeline ({replica_mesh(program.mesh)}), and apps run without",
            remedy=f"compile it without --pipeline-stages; or mpirun -np {ranks} sambasim run --pef …",
        )
    is_mixed = any(group.state_dtype for group in program.groups)
    if is_mixed or any(argument.name == LOSS_SCALE for argument in program.runtime_arguments):
        raise OptionError(
            f"the PEF {program.name} has float32 master weights or a loss scale, and apps train without",
            remedy="compile the app again, with --dtype fp32 or bf16",
        )
    split, chips = context.flag("tensor_parallel"), context.flag("n_chips") or 1
    has = f"--tensor-parallel {compiled.get('tensor_parallel') or 'none'} --n-chips {compiled.get('n_chips', 1)}"
    asked = f"--tensor-parallel {split} --n-chips {chips}"
    if split in TENSOR_PARALLEL and asked != has:
        what = f"the command line has {asked}, and the PEF {program.name} was compiled with {has}"
        raise OptionError(what, remedy="leave the two flags out: a run has those of the PEF; or compile again")
    dtype, compiled_dtype = context.flag("dtype"), compiled.get("dtype", "fp32")
    if dtype in DTYPES and dtype != compiled_dtype:
        what = f"--dtype is {dtype}, and the PEF {program.name} was compiled with --dtype {compiled_dtype}"
        raise OptionError(what, remedy=f"leave out --dtype, or compile again with --dtype {dtype}")


_INDICES = re.compile(r"-?\d{1,9}(,-?\d{1,9})*")


def trace_graph(*arguments: Any, **keywords: Any) -> tuple[SambaTensor, ...]:
    """`trace_graph(model, inputs, optim, …)`: see `_trace_graph`. Old apps pass `args` first, for its `pef`."""
    if arguments and isinstance(arguments[0], Namespace):
        keywords.setdefault("pef", getattr(arguments[0], "pef", None) or "")
        arguments = arguments[1:]
    return _trace_graph(*arguments, **keywords)


@checks_keywords_of("trace_graph", ())
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

    inputs, loss_indices: as for `session.compile`
    optim: the optimizers that were compiled; None to predict, also with a training PEF
    pef: a path or a name; by default that of `config_dict`, or of the command line
    transfer_device: whether to copy weights and optimizer state to the device now

    The other arguments have no effect.
    Raises PefError with the first difference if the PEF was compiled from another graph; OptionError if it was compiled
    with another --dtype than the command line has; LaunchError for more replicas on a node than it has RDUs.
    """
    context = process.current()
    pef = pef or str(as_mapping("config_dict", config_dict).get("pef") or context.flag("pef") or "")
    if not pef:
        what = "trace_graph needs a PEF"
        raise app_error(OptionError, what, "samba.utils.trace_graph(model, inputs, optim, pef=args.pef)")
    wrapper, model, inputs = model, unwrapped(model), repeatable(inputs)
    path = locate(pef, compiling=process.compile_command())
    document = read(path)
    _check_pef(document)
    communicator = joining.communicator()
    communicator.barrier()  # so that all ranks raise the errors below together
    ranks = document.program.ranks_of_replica
    place_replicas(
        inventory_of(document.compile_options), communicator.node_of, ranks, command=shlex.join(process.typed_command())
    )
    make_repeatable(context.flag("threads") or default_threads(communicator, ranks))
    optimizers = as_sequence(optim)
    if document.program.training is not None and _predicts(path.name, optimizers):
        document = replace(document, program=forward_of(document.program))
    asked = _request_of(document, model, inputs, optimizers, loss_indices)
    check_model(model, training=bool(asked.updates), replicas=document.program.data_parallel)
    weights = dict(map_weights(path))
    if not is_known(document, asked):
        capture_and_compare(document, asked, weights)
    arguments.note_changed(document.metadata, document.program.replica_batch_size)
    keep_freed_memory()
    replica = _replica(document.program, asked, weights)
    machine = Machine(document, as_one_rank(document.program), model, optimizers, replica)
    outputs = tuple(outputs_of(machine.program))
    session.load(machine, inputs, outputs, loss_is_chosen=bool(asked.loss_indices))
    if transfer_device:
        session.to_device(model)
    for one in (model, wrapper):
        one.output_tensors = outputs  # type: ignore[assignment]  # torch says that attributes are tensors and modules
        add_old_methods(one)
    return outputs


def _request_of(
    document: PefDocument,
    model: nn.Module,
    inputs: Inputs,
    optimizers: Sequence[Optimizer],
    loss_indices: Sequence[int] | int | None,
) -> Request:
    """What would be compiled now, with the options of the PEF."""
    fields = {**build_fields_of(document.compile_options), "output_folder": Path("out")}
    predicts, chips = document.program.training is None, document.program.chips
    if predicts:
        fields |= {"data_parallel": None, "world_size": None, "stochastic_rounding": None}
    if predicts and chips > 1:
        fields |= {"tensor_parallel": None, "n_chips": None}
    losses = _losses(document, loss_indices)
    return request(model, inputs, optimizers, fields, inference=predicts, loss_indices=losses, chips=chips)


def _replica(program: Program, asked: Request, weights: Mapping[str, Tensor]) -> StepwiseReplica:
    """The device, with constants, the hyperparameters of the app's optimizers, and the seed of rank 0 for rounding."""
    communicator = joining.communicator()
    seed = communicator.broadcast_object(torch.initial_seed())
    seeded = tuple(
        replace(argument, default=seed) if argument.name == ROUNDING_SEED else argument
        for argument in program.runtime_arguments
    )
    replica = StepwiseReplica(replace(program, runtime_arguments=seeded), communicator)
    for name in constants(program):
        replica.write(name, weights[name])
    for index, update in enumerate(asked.updates):
        replica.change(index, update.hyperparameters)
    return replica


def _predicts(name: str, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a training PEF predicts: with --inference, or in a process without a command line, without optimizers.

    Raises OptionError for a command line with neither.
    """
    if process.current().flag("inference"):
        return True
    if optimizers or process.current().arguments is None:
        return not optimizers
    what = f"{name} trains, and trace_graph needs its optimizers"
    remedy = "give it the optimizers of session.compile; or, to predict with this PEF, type --inference"
    raise app_error(OptionError, what, remedy)


def _losses(document: PefDocument, given: Sequence[int] | int | None) -> Sequence[int] | int | None:
    """`loss_indices` of the compile. Raises OptionError if the app gives others now."""
    compiled = document.metadata.get(LOSS_INDICES)
    if compiled is not None and not _INDICES.fullmatch(compiled):  # metadata of a foreign PEF may be any text
        compiled = None
    if given is None:
        return None if compiled is None else [int(index) for index in compiled.split(",")]
    now = ",".join(map(str, [given] if isinstance(given, int) else given))
    if compiled is not None and compiled != now:
        what = f"loss_indices is {given}, and was [{compiled}] when the PEF was compiled"
        raise app_error(OptionError, what, "give session.compile and trace_graph the same loss_indices")
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
        reduce_buffer=None,
        zero=0,
    )
