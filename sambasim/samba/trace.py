"""`trace_graph`: load a PEF for the model that it was compiled from; an error says how another model differs."""

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sambasim.compiler.capture.tensors import check_model
from sambasim.errors import OptionError, PefError
from sambasim.hardware.placement import inventory_of, place_replicas
from sambasim.ir.dataflow import is_clipped
from sambasim.ir.mesh import replica_mesh
from sambasim.ir.program import LOSS_SCALE, ROUNDING_SEED, Program
from sambasim.ir.ranks import as_one_rank
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import BUILD_FIELDS
from sambasim.pef import PefDocument, locate, map_weights, read
from sambasim.pef.archive import bytes_of
from sambasim.pef.files import is_compiled_here
from sambasim.runtime.machine.agreement import check_job
from sambasim.runtime.machine.process import check_device, default_threads, keep_freed_memory, make_repeatable
from sambasim.runtime.run.stepwise import StepwiseReplica
from sambasim.samba import ending, process, request
from sambasim.samba.checks import replicas
from sambasim.samba.device import Machine
from sambasim.samba.fingerprint import Request
from sambasim.samba.flags import DTYPES, TENSOR_PARALLEL
from sambasim.samba.inputs import Inputs, repeatable
from sambasim.samba.loaded import Loaded, outputs_of
from sambasim.samba.models import add_old_methods
from sambasim.samba.notices import checks_keywords, nearest
from sambasim.samba.process import app_error
from sambasim.samba.request import LOSS_INDICES, Optimizer
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor

if TYPE_CHECKING:
    from sambasim.samba.graph import FwdGraph  # importing it has calls remembered


def trace_graph(*arguments: Any, **keywords: Any) -> tuple[SambaTensor, ...]:
    """`trace_graph(model, inputs, optim, …)`: see `_trace_graph`. Old apps pass `args` first, for its `pef`."""
    if arguments and isinstance(arguments[0], Namespace):
        keywords.setdefault("pef", getattr(arguments[0], "pef", None) or "")
        arguments = arguments[1:]
    return _trace_graph(*arguments, **keywords)


@checks_keywords("trace_graph")
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

    Raises PefError with the first difference if the PEF was compiled from another graph; OptionError if it was compiled
    with another --dtype than the command line has; LaunchError for more replicas on a node than it has RDUs."""
    wrapper, model, inputs = model, request.unwrapped(model), repeatable(inputs)
    path, document = _opened("samba.utils.trace_graph(model, inputs, optim, pef=…)", pef, config_dict)
    if document.has_several:
        what = f"{path.name} is a PEF of the graphs {', '.join(document.graphs)}"
        remedy = "samba.session.add_graph(FwdGraph(inputs, outputs, name)) for each, and then "
        raise app_error(OptionError, what, f"{remedy}samba.session.init_multigraph_runtime(pef)")
    optimizers = request.as_sequence(optim)
    if document.program.training is not None and _predicts(path.name, optimizers):
        document = document.only(program=forward_of(document.program))
    predicts, chips = document.program.training is None, document.program.chips
    fields, losses = _fields(document), _losses(document, loss_indices)
    asked = request.request(model, inputs, optimizers, fields, inference=predicts, loss_indices=losses, chips=chips)
    if is_clipped(document.program):
        updates = (replace(u, hyperparameters={"max_grad_norm": math.inf, **u.hyperparameters}) for u in asked.updates)
        asked = replace(asked, updates=tuple(updates))
    machine = _machine(document, asked, dict(map_weights(path)), optimizers)
    outputs = tuple(outputs_of(machine.program))
    session.load({"": Loaded(machine, asked, inputs, outputs)})
    if transfer_device:
        session.to_device(model)
    for one in (model, wrapper):
        vars(one)["output_tensors"] = outputs
        add_old_methods(one)
    return outputs


def trace_graphs(
    graphs: Mapping[str, "FwdGraph"], pef: str, config_dict: Mapping[str, object] | Namespace | None
) -> None:
    """Loads the `graphs` of `pef`, by name, for their models: see `Session.init_multigraph_runtime`."""
    path, document = _opened("samba.session.init_multigraph_runtime(pef)", pef, config_dict)
    if not document.has_several:
        remedy = "samba.utils.trace_graph(model, inputs, optim, pef=…) loads it"
        raise app_error(OptionError, f"{path.name} is a PEF of one graph", remedy)
    stored = map_weights(path)
    loaded: dict[str, Loaded] = {}
    for name, graph in graphs.items():
        if name not in document.graphs:
            raise app_error(OptionError, f"{path.name} has no graph {name}", nearest(name, [*document.graphs]))
        own = document.only(name)
        asked = graph.request(_fields(own), own.program.chips)
        weights = {symbol: stored[key] for symbol, key in document.stored_as(name).items()}
        of_model = (one.machine.replica for one in loaded.values() if one.machine.model is graph.model)
        machine = _machine(own, asked, weights, (), next(of_model, None))
        every = tuple(outputs_of(machine.program))
        outputs = [every[position] for position in graph.positions]
        names = [str(output.sn_name) for output in outputs]
        one = loaded[name] = Loaded(machine, asked, graph.example.inputs, outputs)
        one.regions, one.whole = graph.regions(names), graph.whole
        one.binder.order = graph.order or one.binder.order
        one.aliases |= graph.aliases(names)
    session.load(loaded)
    session.to_device()


session._trace_graphs = trace_graphs


def _opened(call: str, pef: str, config_dict: Mapping[str, object] | Namespace | None) -> tuple[Path, PefDocument]:
    """The PEF that a `call` of the app names, by default that of `config_dict`, or of the command line. Collective."""
    context = process.current()
    pef = pef or str(request.as_mapping("config_dict", config_dict).get("pef") or context.flag("pef") or "")
    if not pef:
        raise app_error(OptionError, f"{call.partition('(')[0].rpartition('.')[2]} needs a PEF", call)
    path = locate(pef, compiling=process.compile_command())
    document = read(path)
    for name in document.graphs:
        _check_pef(document.only(name))
    communicator = ending.communicator()
    check_job(communicator, context.flag("threads"), {"PEF": document.digest[:12]})
    ranks, command = document.program.ranks_of_replica, shlex.join(process.typed_command())
    place_replicas(inventory_of(document.compile_options), communicator.node_of, ranks, command=command)
    make_repeatable(context.flag("threads") or default_threads(communicator, ranks))
    return path, document


def _machine(
    document: PefDocument,
    asked: Request,
    weights: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    weights_of: StepwiseReplica | None = None,
) -> Machine:
    """The device with the PEF, with constants, the hyperparameters of the app's optimizers, and the seed of rank 0 for
    rounding. Raises PefError if it was compiled from another model than that of `asked`. Collective. `weights_of`:
    another replica with the weights of this model."""
    model, program = asked.model, document.program
    check_model(model, training=bool(asked.updates), replicas=program.data_parallel)
    # The fingerprint of a PEF that was compiled elsewhere may be copied from another one.
    communicator = ending.communicator()
    of_this_machine = communicator.broadcast_object(is_compiled_here(document.digest))
    known = request.fingerprint_of(asked).items() if of_this_machine else ()
    if not any(document.metadata.get(name) == digest for name, digest in known):
        capture_and_compare(document, asked, weights)
    replicas.note_changed(document.metadata, program.replica_batch_size)
    keep_freed_memory()
    seed = communicator.broadcast_object(torch.initial_seed())
    declared = (replace(one, default=seed) if one.name == ROUNDING_SEED else one for one in program.runtime_arguments)
    replica = StepwiseReplica(replace(program, runtime_arguments=tuple(declared)), communicator, weights_of)
    for name in program.names_of(SymbolKind.CONSTANT):  # masks, tables, plain attributes
        replica.write(name, weights[name])
    for index, update in enumerate(asked.updates):
        replica.change(index, update.hyperparameters)
    return Machine(document, as_one_rank(program), model, optimizers, replica)


def _check_pef(document: PefDocument) -> None:
    """Raises OptionError for a pipeline, for float16 and master weights, which need a loss scale and steps that may be
    skipped, and for other chips or another dtype than the command line asks for."""
    program, compiled, context = document.program, document.compile_options, process.current()
    check_device(document)
    if program.schedule is not None:
        what = f"the PEF {program.name} is a pipeline ({replica_mesh(program.mesh)}), and apps run without"
        remedy = f"mpirun -np {program.ranks_of_replica} sambasim run --pef …"
        raise OptionError(what, remedy=f"compile it without --pipeline-stages; or {remedy}")
    is_mixed = any(group.state_dtype for group in program.groups)
    if is_mixed or any(argument.name == LOSS_SCALE for argument in program.runtime_arguments):
        what = f"the PEF {program.name} has float32 master weights or a loss scale, and apps train without"
        raise OptionError(what, remedy="compile the app again, with --dtype fp32 or bf16")
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


def _predicts(name: str, optimizers: Sequence[Optimizer]) -> bool:
    """A training PEF predicts with --inference, or in a process without a command line, without optimizers. Raises
    OptionError for a command line with neither."""
    context = process.current()
    if context.flag("inference") or optimizers or context.arguments is None:
        return bool(context.flag("inference")) or not optimizers
    remedy = "give it the optimizers of session.compile; or, to predict with this PEF, type --inference"
    raise app_error(OptionError, f"{name} trains, and trace_graph needs its optimizers", remedy)


def _fields(document: PefDocument) -> dict[str, object]:
    """The options with which the PEF was compiled."""
    unknown = {"inference"}  # that of the program counts
    if document.program.training is None:
        unknown |= {"data_parallel", "world_size", "stochastic_rounding"}
        unknown |= {"tensor_parallel", "n_chips"} if document.program.chips > 1 else set()
    options = document.compile_options.items()
    return {name: value for name, value in options if name in BUILD_FIELDS - unknown} | {"output_folder": Path("out")}


def _losses(document: PefDocument, given: Sequence[int] | int | None) -> Sequence[int] | int | None:
    """`loss_indices` of the compile. Raises OptionError if the app gives others now."""
    compiled = document.metadata.get(LOSS_INDICES)
    if compiled is not None and not re.fullmatch(r"-?\d{1,9}(,-?\d{1,9})*", compiled):  # of a foreign PEF: any text
        compiled = None
    if given is None:
        return None if compiled is None else [int(index) for index in compiled.split(",")]
    now = ",".join(map(str, [given] if isinstance(given, int) else given))
    if compiled is not None and compiled != now:
        what = f"loss_indices is {given}, and was [{compiled}] when the PEF was compiled"
        raise app_error(OptionError, what, "give session.compile and trace_graph the same loss_indices")
    return given


def forward_of(program: Program) -> Program:
    """The evaluation graph of a training program, as an inference program has it; one replica of it is enough."""
    graph = program.evaluation
    read = {*graph.inputs, *(output.symbol for output in graph.outputs)}
    kept = {SymbolKind.INPUT, SymbolKind.PARAMETER, SymbolKind.BUFFER}
    symbols = {name: one for name, one in program.symbols.items() if one.kind in kept or name in read}
    for name, symbol in symbols.items():
        if symbol.kind is SymbolKind.BUFFER and not symbol.torch_names:  # a buffer in training only
            symbols[name] = replace(symbol, kind=SymbolKind.CONSTANT)
    forward = replace(program, symbols=symbols, training=None, single=None, loss=None, reduce_buffer=None, zero=0)
    mesh = tuple(replace(axis, size=axis.chips) if axis.at_run_time else axis for axis in program.mesh)
    return replace(forward, mesh=mesh, optimizers=(), groups=(), runtime_arguments=())


def capture_and_compare(document: PefDocument, asked: Request, weights: Mapping[str, Tensor]) -> None:
    """Compiles the model as the PEF was. Raises PefError if the program, or a constant, is another."""
    # They take seconds to import, and samba should import fast.
    from sambasim.commands.difference import described, differences
    from sambasim.compiler.compile import capture_model
    from sambasim.compiler.passes import pipeline, run_pipeline
    from sambasim.compiler.sharding.tensor_parallel import TensorParallel

    program, name = document.program, document.program.name
    built = capture_model(asked.model, asked.example, asked.options, losses=asked.losses)
    plan = pipeline(asked.options, asked.updates or None)
    passes = [replace(one, compiled=program) if isinstance(one, TensorParallel) else one for one in plan]
    traced = run_pipeline(built.program, passes, lambda title: None)
    difference = next(differences(program, traced), None)
    cause, remedy = replicas.likely_cause({"inference": str(program.training is None), **document.metadata})
    if difference is not None:
        before, now = (set(one.names_of(SymbolKind.PARAMETER)) for one in (program, traced))
        if (before or now) and before.isdisjoint(now):
            remedy = f"give --pef the PEF of this model, or compile one: {process.compile_command()}"
            raise app_error(PefError, f"the PEF {name} is of another model: {difference}", remedy)
        what = f"the PEF {name} was compiled from another graph: {difference}{cause}"
        raise app_error(PefError, what, remedy or "compile again, and run it with the same model, batch and optimizers")
    for constant in program.names_of(SymbolKind.CONSTANT):
        if bytes_of(weights[constant]) != bytes_of(built.weights[constant]):
            readers = (node for graph in program.graphs for node in graph.nodes if constant in node.reads)
            first = next((f", which is read by {described(node)}," for node in readers), "")
            what = f"the constant {constant}{first} has changed since the PEF {name} was compiled{cause}"
            drawn = "compile the app again; if it draws the numbers, torch.manual_seed(0) before it makes them"
            raise app_error(PefError, what, remedy or drawn)
