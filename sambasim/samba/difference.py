"""Whether a model is still the one that its PEF was compiled from; if not, an error says how it has changed."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count, zip_longest

from torch import Tensor

from sambasim.errors import PefError
from sambasim.ir.difference import node_difference, output_difference, section_difference, symbol_differences
from sambasim.ir.graph import Node
from sambasim.ir.printer import format_argument
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.pef import PefDocument
from sambasim.pef.files import is_compiled_here
from sambasim.pef.weights import bytes_of
from sambasim.runtime.engine.instructions import find_operator
from sambasim.samba import joining, process
from sambasim.samba.checks import arguments
from sambasim.samba.findings import app_error
from sambasim.samba.request import Request, captured, fingerprint_of


def is_known(document: PefDocument, asked: Request) -> bool:
    """Whether the fingerprint of the model is that of the compile."""
    if not joining.communicator().broadcast_object(is_compiled_here(document.digest)):
        return False  # its fingerprint may be copied from another PEF
    return any(document.metadata.get(name) == own for name, own in fingerprint_of(asked).items())


_OF_DATA_PARALLEL = (SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)


def capture_and_compare(document: PefDocument, asked: Request, weights: Mapping[str, Tensor]) -> None:
    """Compiles the model as the PEF was. Raises PefError if the program, or a constant, is another."""
    # They take seconds to import, and samba should import fast.
    from sambasim.compiler.compile import Stopwatch
    from sambasim.compiler.passes import pipeline, run_pipeline
    from sambasim.compiler.sharding.tensor_parallel import TensorParallel

    built = captured(asked, Stopwatch(lambda phase: None))
    passes = [
        replace(one, compiled=document.program) if isinstance(one, TensorParallel) else one
        for one in pipeline(asked.options, asked.updates or None)
    ]
    traced = run_pipeline(built.program, passes, lambda title: None)
    difference = first_difference(document.program, traced)
    if difference is not None:
        raise _another_graph(document, traced, difference)
    for name in constants(document.program):
        if bytes_of(weights[name]) != bytes_of(built.weights[name]):
            constant = f"the constant {name}{_first_use(document.program, name)}"
            what = f"{constant} has changed since the PEF {document.program.name} was compiled"
            raise app_error(PefError, what, "compile the app again")


def constants(program: Program) -> list[str]:
    """The names of tensors of the model outside its state: masks, tables, plain attributes."""
    return [name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.CONSTANT]


def _another_graph(document: PefDocument, traced: Program, difference: str) -> PefError:
    name = document.program.name
    cause = arguments.likely_cause(document.metadata)
    what = f"the PEF {name} was compiled from another graph: {difference}{cause}"
    remedy = "compile the app again, and run it with the same model, batch size and optimizers"
    before, now = (
        {name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.PARAMETER}
        for program in (document.program, traced)
    )
    if (before or now) and before.isdisjoint(now):
        what = f"the PEF {name} is of another model: {difference}"
        remedy = f"give --pef the PEF of this model, or compile one: {process.compile_command()}"
    return app_error(PefError, what, remedy)


def first_difference(compiled: Program, traced: Program) -> str | None:
    """The first difference, with the source line of the model; None if both compute the same.

    Weights, names of programs and line numbers are ignored.
    """
    return (
        _symbol_difference(_own(compiled), _own(traced))
        or _graph_difference(compiled, traced)
        or _optimizer_difference(compiled, traced)
        or _symbol_difference(compiled.symbols, traced.symbols)
    )


def _first_use(program: Program, name: str) -> str:
    """The first operator that reads `name`, with the source line of the model, for a message."""
    graphs = [graph for graph in (program.training, program.evaluation) if graph is not None]
    readers = (node for graph in graphs for node in graph.nodes if name in node.reads)
    return next((f", which is read by {_described(node)}," for node in readers), "")


def _own(program: Program) -> Mapping[str, Symbol]:
    """The symbols of the model, without those of data parallelism, which are named by digests."""
    return {name: symbol for name, symbol in program.symbols.items() if symbol.kind not in _OF_DATA_PARALLEL}


def _symbol_difference(compiled: Mapping[str, Symbol], traced: Mapping[str, Symbol]) -> str | None:
    """The first symbol that differs, as a sentence for a message."""
    for name, before, now in symbol_differences(compiled, traced):
        if before and now:
            return f"{name} is {before.kind} {before.type} in the PEF, and {now.kind} {now.type} in the model"
        if before:
            return f"the PEF has the {before.kind} {name}, {before.type}, and the model does not"
        if now:
            return f"the model has the {now.kind} {name}, {now.type}, and the PEF does not"
    return None


def _graph_difference(compiled: Program, traced: Program) -> str | None:
    graphs = compiled.leading, traced.leading
    if nodes := node_difference(*graphs):
        _, before, now = nodes
        return _of_one_operator(before, now) or f"the PEF has {_described(before)}, and the model {_described(now)}"
    if symbol := output_difference(*graphs):
        return f"{symbol} is another value of the graph in the PEF than in the model"
    return None if section_difference(*graphs) is None else "the sections are cut at other places"


def _optimizer_difference(compiled: Program, traced: Program) -> str | None:
    for before, now in zip_longest(compiled.groups, traced.groups):
        if before is None or now is None or before.members != now.members or before.optimizer != now.optimizer:
            return "the optimizers update other groups of parameters"
    return None


def _of_one_operator(compiled: Node | None, traced: Node | None) -> str | None:
    """The difference of two nodes with one operator: in its arguments, or in which results are read."""
    if compiled is None or traced is None or compiled.operator != traced.operator:
        return None
    before, now = _arguments(compiled), _arguments(traced)
    apart = [
        f"{name} is {before.get(name, 'not given')} in the PEF, and {now.get(name, 'not given')} in the model"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if apart:
        return f"{'; '.join(apart)}: an argument of {_described(traced)}"
    for number, (one, other) in enumerate(zip(compiled.results, traced.results, strict=False), start=1):
        if (one is None) != (other is None):
            reads, ignores = ("model", "PEF") if one is None else ("PEF", "model")
            return f"the {reads} reads result {number} of {_described(traced)}, and the {ignores} does not"
    return None


def _arguments(node: Node) -> Mapping[str, str]:
    """The arguments by torch's names; those of a composite node by number."""
    is_torchs = node.operator.startswith("aten.")
    names = [one.name for one in find_operator(node.operator)._schema.arguments] if is_torchs else map(str, count(1))
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: format_argument(argument) for name, argument in given.items()}


def _described(node: Node | None) -> str:
    if node is None:
        return "nothing more"
    module = f" in {node.module}" if node.module else ""
    return f"`{node.operator}`{module}" + (f" from {node.source}" if node.source else "")
