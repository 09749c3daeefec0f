"""What is said of a model that is not the one that was compiled: as much as differs, and where."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import PefError
from sambasim.pef import read
from sambasim.samba.session import session
from sambasim.samba.trace import first_difference
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


class Pair(nn.Module):
    """Returns what the case makes of a layer's output, after a loss."""

    def __init__(self, function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.layer(x)
        return hidden.mean(), *self.function(hidden)


def _swapped(first: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def function(h: Tensor) -> tuple[Tensor, ...]:
        both = h.sin(), h.cos()
        return both[first], both[1 - first]

    return function


@pytest.mark.parametrize(
    ("compiled", "traced", "words"),
    [
        (
            lambda h: (h.max(1)[0] + h.max(1)[1],),
            lambda h: (h.max(1)[0] + h.max(1)[0],),
            "the model reads result 1 of `aten.max.dim` from ",
        ),
        (lambda h: (h.sin(), h.cos()), lambda h: (h.cos(), h.sin()), "the PEF has `aten.sin.default` from "),
        (_swapped(0), _swapped(1), "pair__outputs__0 is another value of the graph in the PEF than in the model"),
    ],
)
def test_what_is_read_and_what_is_handed_out_differ_too(
    tmp_path: Path,
    compiled: Callable[[Tensor], tuple[Tensor, ...]],
    traced: Callable[[Tensor], tuple[Tensor, ...]],
    words: str,
) -> None:
    inputs = [samba.from_torch_tensor(torch.ones(3, 3), name="x", batch_dim=0)]
    programs = []
    for function in (compiled, traced):
        model = Pair(function)
        samba.from_torch_model_(model)
        optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
        config = {"output_folder": str(tmp_path)}
        pef = session.compile(model, inputs, optimizer, "pair", config_dict=config)
        programs.append(read(Path(pef)).program)
    assert words in str(first_difference(*programs))


def test_what_data_parallelism_names_by_digests_is_not_the_first_difference(tmp_path: Path) -> None:
    inputs = [samba.from_torch_tensor(torch.ones(3, 3), name="x", batch_dim=0)]
    programs = []
    for function in (torch.relu, torch.tanh):
        model, optimizer = _made(function)
        config = {"output_folder": str(tmp_path), "data_parallel": True}
        pef = session.compile(model, inputs, optimizer, "net", config_dict=config)
        programs.append(read(Path(pef)).program)
    assert str(first_difference(*programs)).startswith("the PEF has `aten.relu.default` from ")


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
