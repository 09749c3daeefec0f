"""Programs by hand on meshes of four ranks: every communication of values, with random numbers in between.

As a program, this prints on rank 0 the outputs of all ranks as hexadecimal bytes.
"""

import json
import sys

import torch
from torch import Tensor

from sambasim.ir.mesh import Axis, mesh_of
from sambasim.ir.program import Program
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.transports.connect import Way, open_ranks
from sambasim.runtime.values.memory import DeviceMemory, place_inputs
from tests.support.compiled import outputs_of
from tests.support.ir_text import parse_program

RANKS = 4
RING = """
graph evaluation(
  %x : float32[6, 3] input
)
section 0 FWD sums
  %square = aten.mul.Tensor(%x, %x) : float32[6, 3]
  %total = comm.all_reduce(%square, axis='ring', op='sum', order='tree') : float32[6, 3]
  %mean = comm.all_reduce(%square, axis='ring', op='mean', order='tree') : float32[6, 3]
section 1 FWD neighbours
  comm.send(%square, axis='ring', shift=1, tag=7)
  %noise = aten.rand.default((6, 3)) : float32[6, 3]
  %received = comm.recv(axis='ring', shift=-1, tag=7) : float32[6, 3]
  %noisy = aten.add.Tensor(%received, %noise) : float32[6, 3]
section 2 FWD all
  %gathered = comm.all_gather(%noisy, axis='ring', dim=1) : float32[6, 12]
  %again = aten.rand.default((6, 3)) : float32[6, 3]
  %first = comm.broadcast(%again, axis='ring', root=2) : float32[6, 3]
return
  %total -> total_out
  %mean -> mean_out
  %received -> received_out
  %gathered -> gathered_out
  %again -> again_out
  %first -> first_out
"""

SQUARE = """
graph evaluation(
  %x : float32[6, 3] input
)
section 0 FWD rows
  %row = comm.all_reduce(%x, axis='tp', op='sum', order='tree') : float32[6, 3]
  %column = comm.all_reduce(%x, axis='dp', op='mean', order='tree') : float32[6, 3]
  %wide = comm.all_gather(%row, axis='dp', dim=1) : float32[6, 6]
section 1 FWD neighbours
  comm.send(%column, axis='tp', shift=1, tag=7)
  comm.send(%x, axis='dp', shift=1, tag=7)
  %right = comm.recv(axis='tp', shift=-1, tag=7) : float32[6, 3]
  %below = comm.recv(axis='dp', shift=-1, tag=7) : float32[6, 3]
  %last = comm.broadcast(%x, axis='tp', root=1) : float32[6, 3]
return
  %row -> row_out
  %column -> column_out
  %wide -> wide_out
  %right -> right_out
  %below -> below_out
  %last -> last_out
"""

PROGRAMS = {
    "ring": parse_program(RING, Axis("ring", RANKS)),
    "square": parse_program(SQUARE, Axis("dp", 2, at_run_time=True), Axis("tp", 2)),
}
"""For four ranks: on one axis, and on two axes of two."""


def operand(rank: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 + rank))


def seed(rank: int) -> None:
    torch.manual_seed(rank)


def hex_outputs(by_hand: Program, communicator: Communicator) -> dict[str, str]:
    def fill(memory: DeviceMemory, rank: int) -> None:
        place_inputs(memory, {"x": operand(rank)})

    mesh = mesh_of(by_hand.mesh, communicator.world_size)
    (transport,) = open_ranks(by_hand, communicator, Way.HOST, fill, [communicator.rank], mesh)
    executor = Executor(by_hand.evaluation, by_hand, transport.memory.tensor, transport=transport)
    for _ in range(2):
        seed(communicator.rank)
        outputs = {name: tensor.numpy().tobytes().hex() for name, tensor in outputs_of(executor).items()}
    return outputs


def main() -> None:
    communicator = connect(sys.argv)
    everybody = communicator.gather_object({name: hex_outputs(one, communicator) for name, one in PROGRAMS.items()})
    if everybody is not None:
        print(json.dumps(everybody))
