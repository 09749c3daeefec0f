"""The passes: what each leaves, by law where there is one."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sambasim.compiler.build import Built
from sambasim.compiler.compile import Stopwatch, capture_model, compile_model, pipeline
from sambasim.compiler.passes import Partition, Pass, Place, run_pipeline
from sambasim.compiler.passes.optimizer import REDUCE_BUFFER, AddDataParallel, AttachOptimizers, Update
from sambasim.costs.cut import MOST_OF_A_MODULE, Level
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.options.compile import CompileOptions
from sambasim.options.training import LossOptions, ModelOptions, OptimizerOptions, TrainingOptions

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}


class LogReg(nn.Module):
    """The reference's logistic regression."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lin_layer(x)
        return result


INPUTS = {"x": torch.zeros(4, 784), "target": torch.zeros(4, dtype=torch.int64)}


def _options(folder: Path = Path("out"), **changes: object) -> CompileOptions:
    plain: dict[str, object] = {
        "model": ModelOptions(target="tests.compiler.test_passes:LogReg"),
        "loss": LossOptions(name="cross_entropy"),
        "optimizer": OptimizerOptions(name="sgd", momentum=0.9),
        "training": TrainingOptions(batch_size=4),
        "output_folder": folder,
    }
    return CompileOptions.model_validate({**plain, **changes})


BUDGET = budget_of(load_device("sn30"), load_calibration())


@pytest.fixture(scope="module")
def built() -> Built:
    watch = Stopwatch(lambda phase: None)
    return capture_model(LogReg(), INPUTS, _options(), by_keyword=False, watch=watch)


def _assembled(built: Built, *, clipped: bool = False, world_size: int = 0) -> Program:
    hyperparameters = {**SGD, "max_grad_norm": 1.0} if clipped else SGD
    passes: list[Pass] = [Partition("o3", BUDGET), AttachOptimizers((Update("sgd", hyperparameters),))]
    parallel: list[Pass] = [AddDataParallel(world_size)] if world_size else []
    return run_pipeline(built.program, [*passes, *parallel, Place()], lambda title: None)


def _kinds(program: Program) -> list[str]:
    assert program.training is not None
    return list(dict.fromkeys(section.kind.value for section in program.training.sections))


def test_symbols_have_sambaflow_names(built: Built) -> None:
    names = set(_assembled(built).symbols)
    assert {
        "logreg__lin_layer__weight",
        "logreg__lin_layer__bias",
        "logreg__lin_layer__weight__grad",
        "logreg__lin_layer__weight__sgd0__momentum",
        "logreg__loss",
        "x",
        "target",
    } <= names


def test_without_data_parallelism_there_is_none_of_it(built: Built) -> None:
    program = _assembled(built)
    assert _kinds(program) == ["FWD", "BCKWD", "OPT"]
    kinds = {symbol.kind for symbol in program.symbols.values()}
    assert not kinds & {SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER}
    assert not [argument for argument in program.runtime_arguments if argument.name.startswith("dp_")]
    assert program.data_parallel is None


def test_data_parallelism_adds_groups_a_buffer_sections_and_arguments(built: Built) -> None:
    program = _assembled(built, clipped=True, world_size=2)
    assert _kinds(program) == ["FWD", "BCKWD", "REDUCE", "GRADNORM", "OPT", "GATHER"]
    parallel = program.data_parallel
    assert parallel is not None
    assert (program.mesh, program.world_size) == ((Axis("dp", 2, at_run_time=True),), 2)
    (group,) = program.groups
    (gradient_group,) = parallel.gradient_groups
    assert gradient_group.symbol.startswith("$OPT_dp_accum_group_")
    assert len(gradient_group.symbol.removeprefix("$OPT_dp_accum_group_")) == 40
    assert group.numel == 123 * 64 + 64, "7,840 and 10 elements, each from a multiple of 64 on"
    assert program.symbols[REDUCE_BUFFER].type.numel == group.numel + 64
    assert "dp_scale_factor" in {argument.name for argument in program.runtime_arguments}


class Sequences(nn.Module):
    """An LSTM with the sizes of a public SambaFlow PEF."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 256, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


def test_a_gradient_group_for_each_parameter_as_in_a_public_pef_of_an_lstm() -> None:
    inputs = {"x": torch.zeros(4, 3, 28), "target": torch.zeros(4, dtype=torch.int64)}
    options = _options(data_parallel=True, gradient_groups="parameter")
    watch = Stopwatch(lambda phase: None)
    captured = capture_model(Sequences(), inputs, options, by_keyword=False, watch=watch)
    program = run_pipeline(captured.program, pipeline(options), lambda title: None)
    members = [[member.parameter for member in group.members] for group in program.groups]
    assert sorted(members) == sorted([s.name] for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER)
    assert len(members) == 6
    assert program.symbols[REDUCE_BUFFER].type.numel == 4 * 256 * 256 + 64 == 262_208
    assert program.data_parallel is not None
    wrappers = {group.symbol for group in program.data_parallel.gradient_groups}
    assert len(wrappers) == 6


def test_plain_sgd_keeps_no_momentum(built: Built) -> None:
    passes = [AttachOptimizers((Update("sgd", {**SGD, "momentum": 0.0}),))]
    program = run_pipeline(built.program, passes, lambda title: None)
    assert program.optimizers[0].states == ()
    assert not [s for s in program.symbols.values() if s.kind is SymbolKind.OPTIMIZER_STATE]


def test_the_same_model_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LogReg()
    files = [
        compile_model(model, INPUTS, _options(tmp_path / name, data_parallel=True), by_keyword=False).path
        for name in ("first", "second")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model.plain = torch.ones(3)  # a tensor that is no buffer
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = {"input": torch.randn(4, 4), "target": torch.randn(4, 4)}
    generator = torch.get_rng_state()
    compile_model(model, inputs, _options(tmp_path, loss=LossOptions(name="mse")), by_keyword=False)
    assert not model.training
    assert "plain" in vars(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


MOST_OF_A_SECTION = {"o0": 1, "o1": MOST_OF_A_MODULE, "o3": BUDGET.stages}

runs = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=200)
@given(forward=runs, backward=runs, level=st.sampled_from(["o0", "o1", "o3"]))
def test_any_partition_covers_each_node_once_and_in_order(
    forward: list[tuple[str, int]], backward: list[tuple[str, int]], level: Level
) -> None:
    modules = [[module for module, count in part for _ in range(count)] for part in (forward, backward)]
    nodes = tuple(
        Node(
            f"node_{index}",
            "aten.relu.default",
            (Ref(f"value_{index}"),),
            results=(f"value_{index + 1}",),
            module=module,
        )
        for index, module in enumerate(modules[0] + modules[1])
    )
    values = {f"value_{index + 1}": TensorType("float32", (2, 3)) for index in range(len(nodes))}
    symbols = {"value_0": Symbol("value_0", SymbolKind.INPUT, TensorType("float32", (2, 3)))}
    split = len(modules[0])
    whole = (
        Section(0, SectionKind.FWD, "forward", 0, split),
        Section(1, SectionKind.BCKWD, "backward", split, len(nodes)),
    )
    graph = Graph("training", ("value_0",), nodes, (), values, whole)
    empty = replace(graph, nodes=(), sections=())
    program = Program("p", 1, symbols, graph, empty, None, None, False, (), (), (), None, 0)
    partitioned = Partition(level, BUDGET)(program).training
    assert partitioned is not None
    sections = partitioned.sections
    covered = [node for section in sections for node in partitioned.section_nodes(section)]
    assert covered == list(nodes)
    for before, after in pairwise(sections):
        assert before.stop == after.start
    for section in sections:
        assert 1 <= section.stop - section.start <= MOST_OF_A_SECTION[level]
        assert (section.kind is SectionKind.FWD) == (section.stop <= split)
        if level == "o1":
            assert len({node.module for node in partitioned.section_nodes(section)}) == 1
    assert len({section.name for section in sections}) == len(sections)
