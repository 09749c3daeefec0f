"""Models of which nothing trains, and networks that forward uses and no module holds."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import ModelError, OptionError, PefError
from sambasim.samba import process
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, compiled, equal, layer_batch, refused

INPUTS = layer_batch()


class Frozen(nn.Module):
    output_tensors: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3).requires_grad_(False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.linear(x))


def _sgd(parameters: Any) -> Any:
    return samba.optim.SGD(parameters, lr=0.1, momentum=0.9)


ROWS: list[Any] = [
    (nn.ReLU, lambda model: _sgd(model.parameters())),
    (nn.ReLU, lambda model: samba.optim.AdamW(model.parameters(), lr=0.1)),
    (nn.ReLU, lambda model: samba.optim.Adam(model.named_parameters(), lr=0.1)),
    (nn.ReLU, lambda model: _sgd([{"params": model.parameters()}, {"params": []}])),
    (Frozen, lambda model: _sgd(model.parameters())),
    (Frozen, lambda model: _sgd([one for one in model.parameters() if one.requires_grad])),
]


@pytest.mark.parametrize(("make", "optimizer_of"), ROWS)
def test_where_nothing_trains_the_forward_is_compiled_and_told(
    make: type[Any], optimizer_of: Callable[[Any], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make()
    optimizer = optimizer_of(model)
    pef = compiled((model, optimizer), INPUTS, tmp_path, data_parallel=True, world_size=2)
    told = capsys.readouterr().err
    assert told.count("nothing trains") == 1
    assert f"the optimizer of {make.__name__} has no effect" in told
    outputs = trace_graph(model, INPUTS, optimizer, pef=pef)
    assert [tensor.shape[0] for tensor in outputs] == [BATCH]
    for options in ({}, {"section_types": ["fwd"]}, {"hyperparam_dict": {"lr": 0.5}}):
        (result,) = samba.session.run(INPUTS, **options)
        assert equal(result, model.eval()(samba.to_torch(INPUTS[0])))
    with refused(OptionError, "this PEF predicts, and has no BCKWD, OPT", "parameters that require a gradient"):
        samba.session.run(INPUTS, section_types=["bckwd", "opt"])
    samba.session.to_cpu(model, optimizer)
    optimizer.zero_grad()
    assert session.optim_dict == {}


def test_parameters_in_no_group_of_an_optimizer_are_still_missed(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(ModelError, match="SGD does not update weight, bias"):
        compiled((model, _sgd([])), INPUTS, tmp_path)


NET: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


class UsesNet(nn.Module):
    output_tensors: Any

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3) if trains else nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.last(NET(x))


@pytest.mark.parametrize(("trains", "inference"), [(True, False), (True, True), (False, False)])
def test_a_change_of_a_network_outside_the_model_is_found(
    trains: bool, inference: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = UsesNet(trains)
    optimizer = None if inference else _sgd(model.parameters())
    pef = compiled((model, optimizer), INPUTS, tmp_path, inference=inference)
    said = capsys.readouterr()
    assert re.search(r"forward\(\) uses the parameters of NET \(test_untrained\.py:\d+\); .* does not train", said.out)
    assert all(parameter.grad is None for parameter in NET.parameters())
    trace_graph(model, INPUTS, optimizer, pef=pef)
    (result, *_) = samba.session.run(INPUTS, section_types=["fwd"])
    assert equal(result, model.eval()(samba.to_torch(INPUTS[0])))
    kept = NET[2].bias.detach().clone()
    try:
        with torch.no_grad():
            NET[2].bias[1] += 1
        session.reset()
        process.reset()
        with pytest.raises(PefError, match=r"the constant .*NET_2_bias.* has changed since the PEF net was compiled"):
            trace_graph(model, INPUTS, optimizer, pef=pef)
    finally:
        with torch.no_grad():
            NET[2].bias.copy_(kept)


def test_an_optimizer_of_a_network_outside_the_model_is_refused(tmp_path: Path) -> None:
    model = UsesNet()
    with pytest.raises(ModelError, match="SGD updates 4 parameters that the model does not have"):
        compiled((model, _sgd([*model.parameters(), *NET.parameters()])), INPUTS, tmp_path)
