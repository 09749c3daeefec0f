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
        (
            _clamp(0.0, 1.0),
            _clamp(0.0, 2.0),
            "max is 1.0 in the PEF, and 2.0 in the model: an argument of `aten.clamp",
        ),
        (
            _clamp(0.0, 1.0),
            _clamp(0.5, 2.0),
            "min is 0.0 in the PEF, and 0.5 in the model; max is 1.0 in the PEF, and 2.0 in ",
        ),
        (torch.relu, torch.tanh, "the PEF has `aten.relu.default` from "),
        (lambda x: x.sum(0), lambda x: x.sum(1), "dim is (0,) in the PEF, and (1,) in the model"),
    ],
    ids=["one argument", "two arguments", "another operator", "a shape"],
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
