"""A program seen otherwise: for inference, which needs no labels; and a replica of several ranks as one, with whole
tensors and the whole batch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sambasim.errors import OptionError
from sambasim.ir.graph import Node, Section
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import Cut, Symbol, SymbolKind


def without_loss(program: Program) -> Program:
    """`program` for inference without its loss, and without the inputs that only the loss reads. Assertions and random
    draws stay, but for assertions on those inputs. A program that gives only its loss, or draws random numbers for
    them, is returned as it is."""
    whole, outputs = program.evaluation, program.evaluation.outputs[1:]
    if program.loss is None or not outputs:
        return program
    wanted = {output.value for output in outputs}
    read = _read(whole.nodes, wanted)
    effects = _effects(whole.nodes, [name for name in whole.inputs if name not in read])
    if effects is None:
        return program
    read = _read(whole.nodes, wanted, effects)
    nodes, sections = list[Node](), list[Section]()
    for section in whole.sections:
        start = len(nodes)
        nodes += (node for node in whole.section_nodes(section) if _is_kept(node, read, effects))
        if len(nodes) > start:
            sections.append(replace(section, index=len(sections), start=start, stop=len(nodes)))
    symbols = {
        name: symbol for name, symbol in program.symbols.items() if symbol.kind is not SymbolKind.INPUT or name in read
    }
    evaluation = replace(
        whole,
        inputs=tuple(name for name in whole.inputs if name in symbols),
        nodes=tuple(nodes),
        outputs=outputs,
        sections=tuple(sections),
    )
    # The training graph stays: a pipeline's ranks hold what it says.
    return replace(program, symbols=symbols, evaluation=evaluation, single=None, loss=None, per_sample_loss=False)


def _read(nodes: Sequence[Node], wanted: Iterable[str], effects: Iterable[str] = ()) -> set[str]:
    """`wanted`, and all values that its nodes and the nodes `effects` read."""
    read, named = set(wanted), set(effects)
    for node in reversed(nodes):
        if _is_kept(node, read, named):
            read.update(node.reads)
            if node.operator == "comm.recv":
                read.add(_message(node))
    return read


def _is_kept(node: Node, read: set[str], effects: Iterable[str]) -> bool:
    if node.operator == "comm.send":
        return _message(node) in read
    return node.name in effects or not read.isdisjoint(node.results)


def _message(node: Node) -> str:
    """What a send and its receive have in common."""
    return f"message {dict(node.kwargs)['tag']}"


def _effects(nodes: Sequence[Node], left_out: Sequence[str]) -> set[str] | None:
    """The names of the nodes that check or draw something, without checks that depend on the inputs `left_out`. None if
    a draw depends on them: without it, later draws would be others."""
    depends, effects = set[str | None](left_out), set[str]()
    for node in nodes:
        operator = OPERATORS[node.operator]
        if not depends.isdisjoint(node.reads):
            depends.update(node.results)
            if operator.draws_random_numbers:
                return None
        elif operator.draws_random_numbers or operator.kind in (OperatorKind.CHECK, OperatorKind.GENERATOR):
            effects.add(node.name)
    return effects


_OF_A_BATCH = (SymbolKind.INPUT, SymbolKind.TANGENT, SymbolKind.OUTPUT)


def with_cut_batch(program: Program, chips: int) -> Program:
    """`program`, compiled for one of `chips` that share the batch of a replica: its inputs, tangents and outputs are
    cut over the chips, by samples, and its axis dp counts replicas. Other outputs are losses, of which a replica has
    the mean. Raises OptionError for an output that is neither."""
    if chips == 1:
        return program
    symbols = dict(program.symbols)
    at_batch_1 = {output.symbol for output in program.single.outputs} if program.single is not None else set()
    for name, symbol in program.symbols.items():
        shape = symbol.type.shape
        if symbol.kind in _OF_A_BATCH and name not in at_batch_1:
            if shape and shape[0] % program.batch_size == 0:
                symbols[name] = replace(symbol, cuts=(Cut(DATA_PARALLEL, 0, chips),))
            elif symbol.kind is SymbolKind.OUTPUT:
                _check_mean(program, symbol)
    mesh = tuple(replace(axis, size=axis.size // axis.chips, chips=1) for axis in program.mesh)
    return replace(program, symbols=symbols, mesh=mesh)


def as_one_rank(program: Program) -> Program:
    """`program` with the types and the batch size that a replica of one rank would have. Not to be executed."""
    symbols = {
        name: replace(symbol, type=symbol.whole, cuts=())
        for name, symbol in with_cut_batch(program, program.chips).symbols.items()
    }
    along_dp = [axis for axis in program.mesh if axis.name == DATA_PARALLEL and axis.at_run_time]
    return replace(
        program,
        batch_size=program.batch_size * program.chips,
        symbols=symbols,
        mesh=tuple(replace(axis, size=axis.size // axis.chips, chips=1) for axis in along_dp),
        reduce_buffer=program.reduce_buffer if along_dp else None,
        zero=program.zero if along_dp else 0,
    )


def _check_mean(program: Program, symbol: Symbol) -> None:
    if symbol.type.numel != 1 or not symbol.type.dtype.startswith(("float", "bfloat")):
        raise OptionError(
            f"the output {symbol.name}, {symbol.type}, cannot be joined over the chips of a replica: it has neither "
            f"the {program.batch_size} samples of a chip along its first dimension, nor is it a loss",
            remedy="return a value for each sample, or compile without --tensor-parallel batch",
        )
