"""Comparison of the program in a PEF with the one that the app's model makes now: the first difference."""

import shlex
from collections.abc import Collection, Mapping
from itertools import count, zip_longest

from torch import Tensor

from sambasim.errors import PefError
from sambasim.ir.graph import Node, node_references
from sambasim.ir.printer import format_argument, numbered, numbered_output
from sambasim.ir.printer import numbers as number_values
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.pef import PefDocument
from sambasim.pef.weights import bytes_of
from sambasim.runtime.instructions import find_operator
from sambasim.samba import context
from sambasim.samba.checks import arguments
from sambasim.samba.checks.place import app_line
from sambasim.samba.request import Request

_OF_DATA_PARALLEL = (SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)


def capture_and_compare(document: PefDocument, asked: Request, weights: Mapping[str, Tensor]) -> None:
    """Compiles the model as the PEF was. Raises PefError if the program, or a constant, is another."""
    # They take seconds to import, and samba should import fast.
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
    for name in constants(document.program):
        if bytes_of(weights[name]) != bytes_of(built.weights[name]):
            raise PefError(
                f"the constant {name}{_first_use(document.program, name)} has changed since the PEF "
                f"{document.program.name} was compiled",
                where=app_line(),
                remedy="compile the app again",
            )


def constants(program: Program) -> list[str]:
    """The names of tensors of the model outside its state: masks, tables, plain attributes."""
    return [name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.CONSTANT]


def _compare(document: PefDocument, traced: Program) -> None:
    difference = first_difference(document.program, traced)
    if difference is None:
        return
    name, typed = document.program.name, context.current().arguments
    cause = arguments.likely_cause(typed, document.metadata)
    before, now = _parameter_names(document.program), _parameter_names(traced)
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
            remedy=f"give --pef the PEF of this model, or compile one: {compile_command()}",
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
    """The class in the names of symbols, in lower case."""
    return next(iter(parameters)).partition("__")[0]


def _parameter_names(program: Program) -> set[str]:
    return {name for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.PARAMETER}


def compile_command() -> str:
    """The command line that compiles this app."""
    words, command = context.typed_command(), context.current().command
    if command not in words:
        return "samba.session.compile(model, inputs, optim, …)"
    return f"{shlex.join(words[: words.index(command)])} compile …"


def first_difference(compiled: Program, traced: Program) -> str | None:
    """The first difference, with the source line of the model; None if both compute the same.

    Weights, names of programs and line numbers are ignored.
    """
    return (
        _symbols(_own(compiled), _own(traced))
        or _graphs(compiled, traced)
        or _optimizers(compiled, traced)
        or _symbols(compiled.symbols, traced.symbols)
    )


def _first_use(program: Program, name: str) -> str:
    """The first operator that reads `name`, with the source line of the model, for a message."""
    graphs = [graph for graph in (program.training, program.evaluation) if graph is not None]
    node = next((node for graph in graphs for node in graph.nodes if name in node_references(node)), None)
    return "" if node is None else f", which is read by {_described(node)},"


def _own(program: Program) -> Mapping[str, Symbol]:
    """The symbols of the model, without those of data parallelism, which are named by digests."""
    return {name: symbol for name, symbol in program.symbols.items() if symbol.kind not in _OF_DATA_PARALLEL}


def _symbols(compiled: Mapping[str, Symbol], traced: Mapping[str, Symbol]) -> str | None:
    for name in [*compiled, *(name for name in traced if name not in compiled)]:
        before, now = compiled.get(name), traced.get(name)
        if before is None and now is not None:
            return f"the model has the {now.kind} {name}, {now.type}, and the PEF does not"
        if before is not None and now is None:
            return f"the PEF has the {before.kind} {name}, {before.type}, and the model does not"
        if before and now and (before.kind, before.type) != (now.kind, now.type):
            return f"{name} is {before.kind} {before.type} in the PEF, and {now.kind} {now.type} in the model"
    return None


def _graphs(compiled: Program, traced: Program) -> str | None:
    before, now = compiled.training or compiled.evaluation, traced.training or traced.evaluation
    numbers: tuple[dict[str, str], dict[str, str]] = number_values(before), number_values(now)
    for one, other in zip_longest(before.nodes, now.nodes):
        if numbered(one, numbers[0]) != numbered(other, numbers[1]):
            return _of_one_operator(one, other) or f"the PEF has {_described(one)}, and the model {_described(other)}"
    for output, now_output in zip_longest(before.outputs, now.outputs):
        if numbered_output(output, numbers[0]) != numbered_output(now_output, numbers[1]):
            return f"{(output or now_output).symbol} is another value of the graph in the PEF than in the model"
    sections = [[(section.kind, section.start, section.stop) for section in graph.sections] for graph in (before, now)]
    return None if sections[0] == sections[1] else "the sections are cut at other places"


def _optimizers(compiled: Program, traced: Program) -> str | None:
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
    """By torch's names; of a composite by number."""
    is_torchs = node.operator.startswith("aten.")
    names = [one.name for one in find_operator(node.operator)._schema.arguments] if is_torchs else map(str, count(1))
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: format_argument(argument) for name, argument in given.items()}


def _described(node: Node | None) -> str:
    if node is None:
        return "nothing more"
    module = f" in {node.module}" if node.module else ""
    return f"`{node.operator}`{module}" + (f" from {node.source}" if node.source else "")
