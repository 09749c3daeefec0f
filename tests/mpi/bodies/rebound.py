"""A replica driven from outside whose graph is replaced between a backward and the optimizer step that uses it.

    rebound.py PEF MODE...

For each mode, rank 0 prints the sum of squares of every parameter after three steps, without and with the replacement.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.pef import map_weights, read
from sambasim.runtime.engine.executor import tangent_of
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.stepwise import Mode, StepwiseReplica

PEF = Path(sys.argv[1])
communicator = connect(sys.argv)
program = read(PEF).program
assert program.training is not None
symbols = program.symbols.values()


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + communicator.rank)
    inputs = [symbol for symbol in symbols if symbol.kind is SymbolKind.INPUT]
    assert all(symbol.exclusive_bound for symbol in inputs)
    return {one.name: torch.randint(one.exclusive_bound or 1, one.type.shape, generator=generator) for one in inputs}


def trained(mode: Mode, *, replaces: bool) -> list[float]:
    replica = StepwiseReplica(program, communicator)
    for name, tensor in map_weights(PEF).items():
        replica.write(name, tensor)
    tangent = tangent_of(program, 1.0)
    for step in range(3):
        for half in range(2):
            replica.run({SectionKind.FWD}, batch(2 * step + half), None, mode)
            replica.run({SectionKind.BCKWD}, {}, tangent, mode)
            if replaces and half == 0 and program.training is not None:
                replica.run_graph(program.training)
        replica.run({SectionKind.OPT}, {}, None, mode)
        communicator.barrier()
    parameters = [symbol.name for symbol in symbols if symbol.kind is SymbolKind.PARAMETER]
    return [float(replica.read(name).double().square().sum()) for name in parameters]


for mode in map(Mode, sys.argv[2:]):
    plain, replaced = trained(mode, replaces=False), trained(mode, replaces=True)
    if communicator.rank == 0:
        print(json.dumps({"mode": mode, "plain": plain, "replaced": replaced}))
