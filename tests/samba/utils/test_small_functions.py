"""Seeds, folders, ranks and weight normalisation."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sambasim.errors import ModelError, OptionError, UserError
from sambasim.samba import utils
from sambasim.samba.utils.common import seed_from_environment


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_seed_sets_every_generator() -> None:
    utils.set_seed(256)
    first = drawn()
    again = drawn()
    utils.set_seed(256)
    assert drawn() == first
    assert all(before != after for before, after in zip(first, again, strict=True))


def test_the_environment_may_have_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    utils.set_seed(256)
    expected = drawn()
    monkeypatch.setenv("SAMBA_SEED", "256")
    seed_from_environment()
    assert drawn() == expected
    monkeypatch.setenv("SAMBA_SEED", "")
    seed_from_environment()
    assert drawn() != expected
    for wrong in ("-1", "many"):
        monkeypatch.setenv("SAMBA_SEED", wrong)
        with pytest.raises(OptionError, match=f"SAMBA_SEED is '{wrong}'") as caught:
            seed_from_environment()
        assert "export SAMBA_SEED=256" in (caught.value.remedy or "")


@pytest.mark.parametrize("seed", [-1, "256"])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(UserError, match=f"not {seed!r}") as caught:
        utils.set_seed(seed)
    assert str(caught.value.where).startswith(__file__)


def test_weight_norm_splits_every_weight_and_keeps_what_is_computed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Conv1d(3, 2, 1))
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def outputs() -> torch.Tensor:
        hidden = model[1](model[0](inputs))
        return torch.Tensor(model[2](hidden.T[None]))

    before = outputs()
    assert utils.weight_norm_(model) is model
    torch.testing.assert_close(outputs(), before)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {
        "0.bias": (3,),
        "0.parametrizations.weight.original0": (3, 1),
        "0.parametrizations.weight.original1": (3, 4),
        "1.weight": (3,),
        "1.bias": (3,),
        "2.bias": (2,),
        "2.parametrizations.weight.original0": (2, 1, 1),
        "2.parametrizations.weight.original1": (2, 3, 1),
    }


def test_weight_norm_does_not_part_what_is_shared() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ModelError, match="0 and 1 share one weight"):
        utils.weight_norm_(model)
    assert model[1].weight is model[0].weight
