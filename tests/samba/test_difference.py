"""What is said of a model that is not the one that was compiled: as much as differs, and where."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import PefError
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

Function = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A layer, what the case does with it, and a loss."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).mean()


def _made(function: Function) -> tuple[Net, samba.optim.SGD]:
    model = Net(function)
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


def _clamp(low: float, high: float) -> Function:
    return lambda x: x.clamp(low, high)


@pytest.mark.parametrize(
    ("compiled", "traced", "words"),
    [
        (_clamp(0.0, 1.0), _clamp(0.0, 2.0), "max is 1.0 in the PEF, and 2.0 in the model: an argument of `aten.clamp"),
        (torch.relu, torch.tanh, "the PEF has `aten.relu.default` from "),
        (lambda x: x.sum(0), lambda x: x.sum(1), "dim is (0,) in the PEF, and (1,) in the model"),
    ],
    ids=["an argument", "another operator", "a shape"],
)
def test_the_first_difference_is_told_and_nothing_else(
    tmp_path: Path, compiled: Function, traced: Function, words: str
) -> None:
    inputs = [samba.from_torch_tensor(torch.ones(3, 3), name="x", batch_dim=0)]
    model, optimizer = _made(compiled)
    pef = session.compile(model, inputs, optimizer, "net", config_dict={"output_folder": str(tmp_path)})
    model, optimizer = _made(traced)
    with pytest.raises(PefError) as caught:
        trace_graph(model, inputs, optimizer, pef=pef)
    said = str(caught.value)
    assert words in said
    assert f" from tests/samba/{Path(__file__).name}:" in said, "the line of the model"
    assert "%" not in said, "the operands are the same"


SCALE = torch.tensor([1.0, 0.0, -2.0])


class Scaled(nn.Module):
    """With tensors that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.scales = [{"first": torch.tensor([3.0, 1.0, 2.0])}]

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x) * SCALE * self.scales[0]["first"]
        return outputs.square().mean()


@pytest.mark.parametrize("change", ["SCALE", "first"])
def test_a_tensor_that_no_module_has_is_a_constant_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(f"{__name__}.SCALE", SCALE.clone())
    model = Scaled()
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    inputs = [samba.from_torch_tensor(torch.randn(4, 5), name="x", batch_dim=0)]
    pef = session.compile(model, inputs, optimizer, name="scaled", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, inputs, optimizer, pef=pef)
    (loss,) = samba.session.run(inputs)
    assert torch.equal(loss, model(*inputs))
    (SCALE if change == "SCALE" else model.scales[0]["first"])[0] = 3.5
    with pytest.raises(
        PefError, match=rf"the constant scaled__\w*{change}\w*, which is read by `aten\.mul\.Tensor` from"
    ):
        trace_graph(model, inputs, optimizer, pef=pef)
