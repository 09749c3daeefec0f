"""What a compiled model draws and loses in one step, next to eager PyTorch."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.capture.step import per_sample_loss, training_loss
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.runtime.engine.executor import Executor, outputs_in_order, tangent_of
from sambasim.runtime.values.memory import DeviceMemory
from tests.support.compiled import compile_net, loaded, outputs_of

BATCH = 3
IGNORED = -100
SEED = 11


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        torch.randn_like(x)
        functional.dropout(x, 0.5, self.training)
        noise = torch.randn_like(x)
        return self.linear(functional.dropout(x + noise, 0.5, self.training))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2)


def evaluated(graph: Graph, program: Program, memory: DeviceMemory) -> list[Tensor]:
    torch.manual_seed(SEED)
    return outputs_in_order(graph, outputs_of(Executor(graph, program, memory.tensor)))


@pytest.mark.parametrize("level", ["o0", "o1", "o3"])
def test_what_nobody_reads_is_drawn_as_in_eager(level: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = Unread(), torch.randn(BATCH, 4), torch.tensor([0, 4, 2])
    inputs = {"x": x, "target": target}
    program, memory = loaded(compile_net(model, inputs, tmp_path, opt_level=level), inputs)
    assert program.training is not None
    assert program.loss is not None

    torch.manual_seed(SEED)
    ours = outputs_of(Executor(program.training, program, memory.tensor), tangent_of(program, 1.0))[program.loss]
    ours_then = torch.get_rng_state()
    torch.manual_seed(SEED)
    assert ours.equal(functional.cross_entropy(model.train()(x), target))
    assert ours_then.equal(torch.get_rng_state())

    per_sample, outputs = evaluated(program.evaluation, program, memory)
    torch.manual_seed(SEED)
    eager = model.eval()(x)
    assert outputs.equal(eager)
    assert per_sample.equal(functional.cross_entropy(eager, target, reduction="none"))


def test_the_loss_of_a_sample_is_the_mean_of_its_counted_elements(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(BATCH, 6, 4)
    target = torch.randint(0, 5, (BATCH, 6))
    target[0, 1:] = IGNORED
    target[1] = IGNORED
    inputs = {"x": x, "target": target}
    program, memory = loaded(compile_net(model, inputs, tmp_path), inputs)
    per_sample = evaluated(program.evaluation, program, memory)[0]
    scores = model(x)
    expected = [functional.cross_entropy(scores[i : i + 1], target[i : i + 1]) for i in (0, 2)]
    assert per_sample.shape == (BATCH,)
    assert float(per_sample[1]) == 0
    torch.testing.assert_close(per_sample[[0, 2]], torch.stack(expected))


@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_another_ignore_index_is_followed(name: str) -> None:
    by_sample, mean = per_sample_loss(name, {"ignore_index": 2}), training_loss(name, {"ignore_index": 2})
    assert by_sample is not None
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 3, 2).log_softmax(1)
    target = torch.tensor([[[2, 2], [2, 1], [2, 0]], [[3, 0], [1, 1], [0, 2]]])
    found = by_sample(scores, target)
    torch.testing.assert_close(found, torch.stack([mean(scores[i : i + 1], target[i : i + 1]) for i in range(2)]))


def test_probabilities_as_target_have_nothing_to_ignore() -> None:
    by_sample = per_sample_loss("cross_entropy", {})
    assert by_sample is not None
    scores, target = torch.randn(2, 4, 3), torch.rand(2, 4, 3).softmax(1)
    elements = functional.cross_entropy(scores, target, reduction="none")
    assert by_sample(scores, target).equal(elements.mean(1))
