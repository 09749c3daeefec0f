"""Values of tensors that the code of a library asks for: taken from the example batch, and checked in each step."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sambasim.errors import AssertionFailedError, CaptureError
from tests.support.compiled import Made, compile_net, loaded, step_of

LIBRARY = """
import torch

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


def asking(name: str, folder: Path) -> Any:
    """With tied weights, which a capture must not take apart."""
    file = folder / "site-packages" / "asks.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, str(file), "exec"), library)
    layers: Any = {"table": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)}
    layers["head"].weight = layers["table"].weight
    return Made(lambda net, x: net.head(library[name](net.table(x).sum(1), x)).square().mean(), **layers)


@pytest.mark.parametrize("name", ["branch", "number", "places", "selection", "sizes", "never_dropped"])
def test_the_answer_for_the_example_batch_holds_for_others_or_is_an_error(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = asking(name, tmp_path)
    program, memory = loaded(compile_net(net, {"x": EXAMPLE}, tmp_path, loss=None), {"x": EXAMPLE})
    loss, gradients = step_of(program, memory)
    eager = net(EXAMPLE)
    eager.backward()
    assert torch.equal(loss, eager.detach())
    assert gradients.keys() == {"table.weight"}
    assert torch.equal(gradients["table.weight"], net.table.weight.grad)
    memory.tensor("x").copy_(OTHER)
    refused = pytest.raises(AssertionFailedError, match="than for the example batch")
    with contextlib.nullcontext() if name == "never_dropped" else refused:
        step_of(program, memory)


def test_a_branch_on_random_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="a branch on random numbers") as caught:
        compile_net(asking("dropped", tmp_path), {"x": EXAMPLE}, tmp_path, loss=None)
    assert "layerdrop=0" in (caught.value.remedy or "")
