"""Values of tensors that the code of a library asks for: taken from the example batch, and checked in each step."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import Compiled, compile_model
from sambasim.errors import AssertionFailedError, CaptureError
from sambasim.options.compile import CompileOptions
from tests.support.compiled import loaded, step_of

LIBRARY = """
import torch
from torch.nn import functional

def branch(h, x):
    return h.tanh() if (x[:, 0] == 0).any() else h

def number(h, x):
    return h[:, : int(x.max())].sum(1, keepdim=True) + h

def places(h, x):
    rows, columns = (x == 1).nonzero(as_tuple=True)
    return h + h[rows].mean() + torch.where(x == 2)[1].sum()

def selection(h, x):
    return h * 2 - h[x > 1].mean()

def sizes(h, x):
    return h.view(len(h), torch.div(x.max(), 1, rounding_mode="trunc"), -1).flatten(1)

def dropped(h, x):
    return h if torch.rand([]) < 0.5 else h.tanh()

def never_dropped(h, x):
    return h if torch.rand([]) < 0.0 else h.tanh()
"""
EXAMPLE = torch.tensor([[0, 1, 2, 1], [2, 1, 1, 0]])
OTHER = torch.tensor([[1, 1, 1, 1], [1, 1, 3, 1]])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("python") / "site-packages" / "asks.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("asks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Net(nn.Module):
    """With tied weights, which a capture must not take apart."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.table.weight
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.table(x).sum(1), x)).square().mean()


def compiled(net: Net, folder: Path) -> Compiled:
    options = {"model": {"target": "net:Net"}, "optimizer": {"name": "sgd"}, "training": {"batch_size": 2}}
    chosen = CompileOptions.model_validate(options | {"output_folder": folder})
    return compile_model(net, Example({"x": EXAMPLE}), chosen)


@pytest.mark.parametrize("name", ["branch", "number", "places", "selection", "sizes", "never_dropped"])
def test_the_answer_for_the_example_batch_holds_for_others_or_is_an_error(
    name: str, library: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = Net(getattr(library, name))
    program, memory = loaded(compiled(net, tmp_path).path, {"x": EXAMPLE})
    loss, gradients = step_of(program, memory)
    eager = net(EXAMPLE)
    eager.backward()
    assert torch.equal(loss, eager.detach())
    assert net.table.weight.grad is not None
    assert gradients.keys() == {"table.weight"}
    assert torch.equal(gradients["table.weight"], net.table.weight.grad)
    memory.tensor("x").copy_(OTHER)
    refused = pytest.raises(AssertionFailedError, match="than for the example batch")
    with contextlib.nullcontext() if name == "never_dropped" else refused:
        step_of(program, memory)


def test_a_branch_on_random_numbers_is_refused(library: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="a branch on random numbers") as caught:
        compiled(Net(library.dropped), tmp_path)
    assert "layerdrop=0" in (caught.value.remedy or "")


def test_the_users_own_code_may_not_ask(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="the value of a tensor as a Python number"):
        compiled(Net(lambda h, x: h[:, : int(x.max())].sum(1, keepdim=True) + h), tmp_path)
