"""Recomputed activations: the same bits, and less to keep."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.build import Built
from sambasim.compiler.passes import Partition
from sambasim.compiler.pipeline.pipeline_parallel import PipelineParallel
from sambasim.compiler.recompute import Recompute
from sambasim.ir.graph import SectionKind, node_references
from sambasim.ir.program import Program
from sambasim.ir.schedule import make
from sambasim.ir.verify import Stage, verify
from tests.compiler.pipeline.test_pipeline_parallel import BUDGET, MICRO_BATCHES, Batch, accumulated, example, pipelined
from tests.compiler.sharding.test_plan import built_from

Between = Literal["sections", "full"]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(self.norm(layer(x)).tanh(), 0.3, training=self.training)
        return F.mse_loss(x, target)


def recomputed(program: Program, between: Between) -> Program:
    if between == "sections":
        program = Partition("o1", BUDGET)(program)
    found = Recompute(between)(program)
    verify(found, Stage.CAPTURED)
    return found


def kept_bytes(program: Program) -> int:
    """Of the values of the forward that the backward reads, without views."""
    training = program.training
    assert training is not None
    stop = max(one.stop for one in training.sections if one.kind is SectionKind.FWD)
    made = {name for node in training.nodes[:stop] for name in node.results}
    read = {name for node in training.nodes[stop:] for name in node_references(node)} & made
    return sum(training.values[name].size_bytes for name in read)


def same_bits(built: Built, batches: list[Batch], between: Between) -> None:
    again = recomputed(built.program, between)
    expected = accumulated(built, batches)
    found = accumulated(Built(again, built.weights), batches)
    for name, right in expected.items():
        assert torch.equal(found[name], right), name


@pytest.mark.parametrize("between", ["sections", "full"])
@pytest.mark.parametrize("name", ["char_gpt", "resnet", "digits", "lstm_classifier"])
def test_an_example_keeps_less_and_has_the_same_bits(name: str, between: Between) -> None:
    built, inputs = example(name)
    same_bits(built, [inputs, {key: one.roll(1, 0) for key, one in inputs.items()}], between)
    assert kept_bytes(recomputed(built.program, between)) <= kept_bytes(built.program)


@pytest.mark.parametrize("between", ["sections", "full"])
def test_dropout_is_made_again_by_its_mask(between: Between) -> None:
    torch.manual_seed(0)
    built, inputs = built_from(Dropped(), x=torch.randn(16, 8), target=torch.randn(16, 8))
    same_bits(built, [inputs], between)
    assert kept_bytes(recomputed(built.program, "full")) < 0.6 * kept_bytes(built.program)


def test_stages_recompute_too() -> None:
    built, inputs = example("char_gpt")
    batches = [{key: one.roll(number, 0) for key, one in inputs.items()} for number in range(MICRO_BATCHES)]
    program = PipelineParallel(make("1f1b", 2, MICRO_BATCHES), BUDGET)(recomputed(built.program, "full"))
    expected, found = accumulated(built, batches), pipelined(built, batches, program)
    for name, right in expected.items():
        assert torch.equal(found[name], right), name


def test_dropout_that_is_off_stays_off() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.native_dropout(layer(x).tanh(), 0.5, False)[0].sin()
            return F.mse_loss(x, target)

    torch.manual_seed(0)
    built, inputs = built_from(Off(), x=torch.randn(16, 8), target=torch.randn(16, 8))
    same_bits(built, [inputs], "full")
