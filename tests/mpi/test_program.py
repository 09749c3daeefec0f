"""One executor carries out every operator of a program, communication and optimizers too, by MPI and in one process."""

import json
from collections.abc import Generator, Sequence

import pytest
import torch

from sambasim.errors import InternalError
from sambasim.ir.graph import Node
from sambasim.ir.mesh import Axis
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.verify import Progress, verify
from sambasim.runtime.engine.executor import Executor
from sambasim.runtime.engine.handlers import HANDLERS, Binding, instruction_of
from sambasim.runtime.engine.instructions import RegisterFile
from sambasim.runtime.transports.connect import Transport, connect_here
from sambasim.runtime.transports.in_process import Hub, run_together
from sambasim.runtime.values.memory import DeviceMemory, place_inputs
from tests.mpi.bodies.by_hand import PROGRAMS, RANKS, operand, seed
from tests.support.ir_text import parse_program
from tests.support.mpi import body_command, run_mpi


def bound(program: Program, memories: Sequence[DeviceMemory]) -> tuple[Sequence[Transport], list[Executor]]:
    transports = connect_here(memories)
    pairs = zip(memories, transports, strict=True)
    return transports, [Executor(program.evaluation, program, m.tensor, transport=transport) for m, transport in pairs]


def emulated(name: str) -> list[dict[str, torch.Tensor]]:
    by_hand = PROGRAMS[name]
    memories = [DeviceMemory.private(by_hand) for _ in range(RANKS)]
    transports, executors = bound(by_hand, memories)
    for rank, memory in enumerate(memories):
        place_inputs(memory, {"x": operand(rank)})

    def passed(rank: int, executor: Executor):  # type: ignore[no-untyped-def]  # a generator
        seed(rank)
        (outputs,) = yield from executor.run()
        return outputs

    for _ in range(2):  # the second pass meets what the first left
        found = run_together([passed(rank, executor) for rank, executor in enumerate(executors)], transports[0].hub)
    return found


def test_a_program_by_hand_has_the_same_bits_under_mpi_and_in_emulation() -> None:
    for one in PROGRAMS.values():
        verify(one, Progress.CAPTURED)
    printed = run_mpi(RANKS, body_command("by_hand"), timeout=120).check().stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("[")]
    theirs = json.loads(line)
    for name in PROGRAMS:
        ours = [{out: tensor.numpy().tobytes().hex() for out, tensor in one.items()} for one in emulated(name)]
        assert ours == [one[name] for one in theirs]


def test_the_program_by_hand_computes_what_it_says() -> None:
    squares = [operand(rank) ** 2 for rank in range(RANKS)]
    ours = emulated("ring")
    total = (squares[0] + squares[1]) + (squares[2] + squares[3])
    noises = []
    for rank in range(RANKS):
        seed(rank)
        noises.append((torch.rand(6, 3), torch.rand(6, 3)))
    noisy = [squares[(rank - 1) % RANKS] + noises[rank][0] for rank in range(RANKS)]
    for rank, outputs in enumerate(ours):
        assert torch.equal(outputs["total_out"], total)
        assert torch.equal(outputs["mean_out"], total / RANKS)
        assert torch.equal(outputs["received_out"], squares[(rank - 1) % RANKS])
        assert torch.equal(outputs["gathered_out"], torch.cat(noisy, dim=1))
        assert torch.equal(outputs["again_out"], noises[rank][1])
        assert torch.equal(outputs["first_out"], noises[2][1])


def test_each_node_communicates_along_its_own_axis() -> None:
    x = [operand(rank) for rank in range(RANKS)]  # ranks 0 and 1, and 2 and 3, are neighbours along tp
    rows = [x[0] + x[1], x[2] + x[3]]
    columns = [(x[0] + x[2]) / 2, (x[1] + x[3]) / 2]
    for rank, outputs in enumerate(emulated("square")):
        dp, tp = divmod(rank, 2)
        assert torch.equal(outputs["row_out"], rows[dp])
        assert torch.equal(outputs["column_out"], columns[tp])
        assert torch.equal(outputs["wide_out"], torch.cat(rows, dim=1))
        assert torch.equal(outputs["right_out"], columns[1 - tp])
        assert torch.equal(outputs["below_out"], x[2 * (1 - dp) + tp])
        assert torch.equal(outputs["last_out"], x[2 * dp + 1])


def test_ranks_of_one_process_draw_as_if_each_ran_alone() -> None:
    def draws(rank: int) -> Generator[None, None, torch.Tensor]:
        first = torch.rand(2)
        hub.meet("drawn", rank, 2, first)
        yield
        return torch.cat([first, torch.rand(2)])

    torch.manual_seed(5)
    right = torch.rand(4)
    torch.manual_seed(5)
    hub = Hub(2)
    assert all(torch.equal(drawn, right) for drawn in run_together([draws(0), draws(1)], hub))


def test_ranks_that_wait_for_one_another_are_an_error() -> None:
    text = """
      %x : float32[2] input
    section 0 FWD never
      %y = comm.recv(axis='ring', shift=1, tag=0) : float32[2]
      comm.send(%x, axis='ring', shift=1, tag=0)
      %y -> out
    """
    by_hand = parse_program(text, Axis("ring", 2))
    transports, executors = bound(by_hand, [DeviceMemory.private(by_hand) for _ in range(2)])
    with pytest.raises(InternalError, match="deadlock: ranks 0, 1 wait for one another"):
        run_together([executor.run() for executor in executors], transports[0].hub)


_OURS = (
    OperatorKind.COLLECTIVE, OperatorKind.OPTIMIZER, OperatorKind.MEMORY, OperatorKind.GENERATOR, OperatorKind.CHECK,
)  # fmt: skip


def test_every_operator_has_a_handler() -> None:
    for name, operator in OPERATORS.items():
        assert (operator.kind in _OURS) == (name in HANDLERS) == (not name.startswith("aten."))
    with pytest.raises(InternalError, match=r"no handler for comm\.scatter"):
        instruction_of(Node("n", "comm.scatter"), Binding(RegisterFile(), {}, lambda name: torch.empty(0)))
