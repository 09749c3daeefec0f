"""What a captured step asks of a device, on models whose figures can be counted by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.costs.price import load_of
from sambasim.costs.work import LANES, Work, work_of
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from tests.costs.graphs import ROWS, chain
from tests.costs.test_price import BUDGET

BATCH, FEATURES, CLASSES = 8, 64, 10


class Classifier(nn.Module):
    """A product, a view, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x.view(BATCH, FEATURES)), target)


@pytest.fixture(scope="module")
def program() -> Program:
    inputs = {"x": torch.zeros(BATCH, 8, 8), "target": torch.zeros(BATCH, dtype=torch.int64)}
    options = CompileOptions(optimizer=OptimizerOptions(name="sgd"))
    watch = Stopwatch(lambda phase: None)
    return capture_model(Classifier(), inputs, options, by_keyword=False, watch=watch).program


@pytest.fixture(scope="module")
def work(program: Program) -> Work:
    assert program.training is not None
    return work_of(program.training, program.symbols)


def _operators(program: Program, work: Work) -> list[str]:
    assert program.training is not None
    return [program.training.nodes[stage.node].operator.split(".")[1] for stage in work.stages]


def test_views_are_no_stages(program: Program, work: Work) -> None:
    assert _operators(program, work) == [
        *("mm", "_log_softmax", "nll_loss_forward"),
        *("nll_loss_backward", "_log_softmax_backward_data", "mm"),
    ]


def test_products_are_counted_with_the_blocks_of_what_is_laid_out(work: Work) -> None:
    forward, backward = (stage for stage in work.stages if stage.product_flops)
    assert forward.product_flops == backward.product_flops == 2 * BATCH * FEATURES * CLASSES
    assert forward.units == FEATURES // LANES
    assert all(stage.units == 0 for stage in work.stages if not stage.product_flops)


def test_the_loss_is_float32_and_the_rest_bf16(program: Program, work: Work) -> None:
    (weight,) = (name for name, symbol in program.symbols.items() if symbol.torch_names)
    assert work.tensors[weight].size_bytes == 2 * FEATURES * CLASSES
    logits = work.stages[0].writes[0]
    assert work.tensors[logits].size_bytes == 4 * BATCH * CLASSES
    assert work.tensors["x"].size_bytes == 2 * BATCH * FEATURES


def test_weights_and_their_gradients_are_the_same_for_each_sample(work: Work) -> None:
    forward, *_, backward = work.stages
    assert [work.tensors[read.value].resident for read in forward.reads] == [False, True]
    assert work.tensors[backward.writes[0]].resident
    assert not work.tensors[forward.writes[0]].resident


def test_what_stays_within_a_section_is_no_traffic() -> None:
    work = chain([32, 64, 32])
    apart = [load_of(work, 0, 1, BUDGET), load_of(work, 1, 2, BUDGET)]
    together = load_of(work, 0, 2, BUDGET)
    between = 2 * ROWS * 64
    assert sum(load.traffic_bytes for load in apart) - together.traffic_bytes == 2 * between
    assert together.traffic_bytes == 2 * (ROWS * 32 + 32 * 64 + 64 * 32 + ROWS * 32)
    assert together.resident_bytes == 2 * 2 * 32 * 64
    assert (together.buffered_bytes, apart[0].buffered_bytes) == (2 * 64 * BUDGET.tile_rows, 0)
    assert together.once_bytes == together.resident_bytes
    assert (together.rows, together.stages, together.product_flops) == (ROWS, 2, 4 * ROWS * 32 * 64)
