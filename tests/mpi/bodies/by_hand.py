"""A program by hand on a mesh of four ranks: every communication of values, with random numbers in between.

As a program, this prints on rank 0 the outputs of all ranks as hexadecimal bytes.
"""

import json
import sys

import torch
from torch import Tensor

from sambasim.ir.mesh import Axis
from sambasim.ir.program import Program
from sambasim.runtime.communicator import connect
from sambasim.runtime.executor import Executor
from sambasim.runtime.replica import place_inputs
from sambasim.runtime.transports.factory import Way, allocate
from sambasim.runtime.transports.factory import connect as transports_of
from tests.support.ir_text import parse_program

RANKS = 4
TEXT = """
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


def program() -> Program:
    """The program, for four ranks along the axis `ring`."""
    return parse_program(TEXT, Axis("ring", RANKS))


def operand(rank: int) -> Tensor:
    """What rank `rank` is given: no two ranks have the same."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 + rank))


def seed(rank: int) -> None:
    """Set torch's generator for `rank`."""
    torch.manual_seed(rank)


def main() -> None:
    communicator = connect(sys.argv)
    by_hand = program()
    allocated = allocate(by_hand, communicator, Way.HOST)
    (transport,) = transports_of(by_hand, communicator, Way.HOST, allocated)
    memory = allocated.memories[0]
    executor = Executor(by_hand.evaluation, by_hand, memory.tensor, transport=transport)
    place_inputs(memory, {"x": operand(communicator.rank)})
    for _ in range(2):
        seed(communicator.rank)
        outputs = {name: tensor.numpy().tobytes().hex() for name, tensor in executor.run().items()}
    everybody = communicator.gather_object(outputs)
    if everybody is not None:
        print(json.dumps(everybody))


if __name__ == "__main__":
    main()
