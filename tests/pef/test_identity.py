"""Digests by which a checkpoint knows its model: equal for every batch size, and not after an edit."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.pef.sources import digests_of_model
from tests.compiler.test_build import built as capture
from tests.models import Batch, Case, case
from tests.models.case import evaluate_loss
from tests.support.whole import whole_case

OPERATORS, INTEGERS = "operators_sha256", "integers_sha256"


class Lost(nn.Module):
    """A case of the zoo with its loss; takes its batch by position."""

    def __init__(self, one: Case) -> None:
        super().__init__()
        self.case, self.model, batch = one, one.module(), one.batch(1)
        self.names = list(batch) if isinstance(batch, dict) else None

    def forward(self, *inputs: Tensor) -> Tensor:
        batch: Batch = dict(zip(self.names, inputs, strict=True)) if self.names else inputs
        return evaluate_loss(self.case, self.model, batch)


@pytest.mark.parametrize(
    "name", ["normalized", "lstm", "embedding_bag_sum", whole_case("gpt"), whole_case("bert"), whole_case("cnn")]
)
def test_the_operators_are_equal_for_every_batch_size(name: str) -> None:
    """With GroupNorm, whose operator has the batch size; with views, masks and recurrences."""

    def digest(batch_size: int) -> str:
        batch = case(name).batch(batch_size)
        tensors = batch.values() if isinstance(batch, dict) else batch
        inputs = {f"input_{at}": tensor for at, tensor in enumerate(tensors)}
        built = capture(Lost(case(name)), inputs)
        return digests_of_model(built.program, built.weights)[OPERATORS]

    assert digest(4) == digest(6)


class Edited(nn.Module):
    """What may be edited and leaves every tensor as large as it is."""

    def __init__(self, heads: int = 2, kernel: int = 3, factor: float = 2, power: int = 2, scale: float = 1.5) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)
        self.heads, self.kernel, self.factor, self.power = heads, kernel, factor, power
        self.scale = torch.tensor([scale])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.up(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) * self.factor
        x = F.avg_pool1d(x, self.kernel, stride=1, padding=self.kernel // 2) * self.scale
        return F.mse_loss(self.down(x).pow(self.power), target) / x.shape[0]


def digests(model: nn.Module, batch_size: int = 4) -> dict[str, str]:
    built = capture(model, {name: torch.zeros(batch_size, 6, 8) for name in ("x", "target")})
    return digests_of_model(built.program, built.weights)


@cache
def unedited(batch_size: int = 4) -> dict[str, str]:
    return digests(Edited(), batch_size)


@pytest.mark.parametrize("edit", [{"kernel": 5}, {"factor": 3}, {"factor": 2.5}, {"power": 3}, {"scale": 1.25}])
def test_a_factor_a_size_or_a_constant_is_seen_at_every_batch_size(edit: dict[str, float]) -> None:
    assert digests(Edited(**edit), batch_size=6)[OPERATORS] != unedited()[OPERATORS]  # type: ignore[arg-type]


def test_a_size_of_a_shape_is_seen_at_one_batch_size() -> None:
    found, edited = unedited(), digests(Edited(heads=4))
    assert found == digests(Edited())
    assert found[INTEGERS] != edited[INTEGERS]
    assert found[OPERATORS] == edited[OPERATORS]
    assert unedited(batch_size=6)[OPERATORS] == found[OPERATORS]
