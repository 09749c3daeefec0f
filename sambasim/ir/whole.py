"""A replica of several ranks, seen from outside: whole tensors and the whole batch, of which each rank has a part."""

from dataclasses import replace

from sambasim.errors import OptionError
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.program import Program
from sambasim.ir.types import Cut, Symbol, SymbolKind

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
        data_parallel=program.data_parallel if along_dp else None,
        mesh=tuple(replace(axis, size=axis.size // axis.chips, chips=1) for axis in along_dp),
    )


def _check_mean(program: Program, symbol: Symbol) -> None:
    if symbol.type.numel != 1 or not symbol.type.dtype.startswith(("float", "bfloat")):
        raise OptionError(
            f"the output {symbol.name}, {symbol.type}, cannot be joined over the chips of a replica: it has neither "
            f"the {program.batch_size} samples of a chip along its first dimension, nor is it a loss",
            remedy="return a value for each sample, or compile without --tensor-parallel batch",
        )
