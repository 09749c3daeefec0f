"""One executor carries out every operator of a program, communication and optimizers too, by MPI and in one process."""

import json
import sys
from pathlib import Path

import pytest
import torch

from sambasim.compiler.compile import compile_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.errors import InternalError
from sambasim.ir.graph import SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.verify import Stage, verify
from sambasim.pef import read
from sambasim.runtime import handlers, lowering
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.executor import Executor
from sambasim.runtime.handlers import HANDLERS, handler_of
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.replica import place_inputs
from sambasim.runtime.transports.in_process import Hub, InProcess, run_together
from tests.support.by_hand import RANKS, operand, program, seed
from tests.support.examples import example_options
from tests.support.ir_text import parse_program
from tests.support.mpi import ROOT, run_mpi
from tests.support.whole import whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "by_hand.py"
REBOUND = ROOT / "tests" / "mpi" / "bodies" / "rebound.py"


@pytest.fixture(scope="module")
def char_gpt_pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = example_options("char_gpt", tmp_path_factory.mktemp("program"), "optimizer.max_grad_norm=0.05")
    model = build_model(options)
    inputs, by_keyword = example_batch(model, options)
    return compile_model(model, inputs, options, by_keyword=by_keyword).path


def emulated() -> list[dict[str, torch.Tensor]]:
    """The outputs of all ranks, played by this process."""
    by_hand, hub = program(), Hub(RANKS)
    memories = [DeviceMemory(by_hand, private_storage(by_hand.device_bytes)) for _ in range(RANKS)]
    executors = []
    for rank, memory in enumerate(memories):
        place_inputs(memory, {"x": operand(rank)})
        transport = InProcess(by_hand, memories, hub, rank)
        executors.append(Executor(by_hand.evaluation, by_hand, memory.tensor, transport=transport))

    def passed(rank: int, executor: Executor):  # type: ignore[no-untyped-def]  # a generator
        seed(rank)
        return (yield from executor.run_pass())

    for _ in range(2):  # the second pass meets what the first left
        found = run_together([passed(rank, executor) for rank, executor in enumerate(executors)], hub)
    return found


def test_a_program_by_hand_has_the_same_bits_under_mpi_and_in_emulation() -> None:
    verify(program(), Stage.CAPTURED)
    ours = emulated()
    printed = run_mpi(RANKS, [sys.executable, str(BODY)], timeout=120).check().stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("[")]
    theirs = json.loads(line)
    assert [{name: tensor.numpy().tobytes().hex() for name, tensor in one.items()} for one in ours] == theirs


def test_the_program_by_hand_computes_what_it_says() -> None:
    squares = [operand(rank) ** 2 for rank in range(RANKS)]
    ours = emulated()
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


def test_ranks_that_wait_for_one_another_are_told_of() -> None:
    text = """
      %x : float32[2] input
    section 0 FWD never
      %y = comm.recv(axis='ring', shift=1, tag=0) : float32[2]
      comm.send(%x, axis='ring', shift=1, tag=0)
      %y -> out
    """
    by_hand, hub = parse_program(text, *program().mesh), Hub(2)
    memories = [DeviceMemory(by_hand, private_storage(by_hand.device_bytes)) for _ in range(2)]
    transports = [InProcess(by_hand, memories, hub, rank) for rank in range(2)]
    executors = [
        Executor(by_hand.evaluation, by_hand, memory.tensor, transport=transport)
        for memory, transport in zip(memories, transports, strict=True)
    ]
    with pytest.raises(InternalError, match="deadlock: ranks 0, 1 wait for one another"):
        run_together([executor.run_pass() for executor in executors], hub)


@pytest.mark.parametrize(("mode", "ranks", "env"), [
    ("device", 2, {}),
    ("host", 2, {}),
    whole_case("device", 4, {"MPIR_CVAR_NUM_CLIQUES": "2"}),
])  # fmt: skip
def test_a_graph_that_is_replaced_within_a_step_changes_nothing(
    mode: str, ranks: int, env: dict[str, str], char_gpt_pef: Path
) -> None:
    """As an app does that changes a dropout rate while it accumulates."""
    argv = [sys.executable, str(REBOUND), str(char_gpt_pef), mode]
    printed = run_mpi(ranks, argv, timeout=120, env=env).check().stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["plain"] == found["replaced"]


def test_every_operator_has_a_handler() -> None:
    for name, operator in OPERATORS.items():
        assert handler_of(name) is (handlers._aten if name.startswith("aten.") else HANDLERS[name])
        assert (operator.kind in (OperatorKind.COLLECTIVE, OperatorKind.OPTIMIZER)) == (name in HANDLERS)
    with pytest.raises(InternalError, match=r"no handler for comm\.scatter"):
        handler_of("comm.scatter")


def test_every_node_of_a_training_step_is_executed_by_its_handler(
    char_gpt_pef: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each handler that is asked for, once for each node, makes an instruction; each instruction runs in the step."""
    training_program = read(char_gpt_pef).program
    graph = training_program.training
    assert graph is not None
    asked: list[str] = []

    def noted(operator: str) -> handlers.Handler:
        handler = handler_of(operator)

        def bind(nodes, binding):  # type: ignore[no-untyped-def]  # as the handler
            asked.extend(node.name for node in nodes)
            return handler(nodes, binding)

        return bind

    monkeypatch.setattr(lowering, "handler_of", noted)
    memories = [DeviceMemory(training_program, private_storage(training_program.device_bytes)) for _ in range(2)]
    arguments = {argument.name: argument.default for argument in training_program.runtime_arguments}
    transport = InProcess(training_program, memories, Hub(2), 0)
    optimizers = Optimizers(training_program, memories[0], arguments)
    Executor(graph, training_program, memories[0].tensor, transport=transport, optimizers=optimizers)
    assert sorted(asked) == sorted(node.name for node in graph.nodes)
    kinds = {section.kind for section in graph.sections}
    assert kinds == set(SectionKind), "the program has every kind of section"


def test_no_other_module_names_an_update_section_to_decide_what_runs() -> None:
    kinds = ("SectionKind.REDUCE", "SectionKind.GATHER", "SectionKind.OPT", "SectionKind.GRADNORM")
    runtime = ROOT / "sambasim" / "runtime"
    naming = {
        str(path.relative_to(runtime))
        for path in runtime.rglob("*.py")
        if any(kind in path.read_text(encoding="utf-8") for kind in kinds)
    }
    # What a trace calls a track, and which sections an app asks for by SambaFlow's names.
    assert naming == {"tracing.py", "stepwise.py"}
