"""What makes tensors, and torch's operators under the same names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.compiler.capture import capture_evaluation, capture_training


@pytest.mark.parametrize("make", [lambda: samba.randn(4, 3), lambda: samba.randn((4, 3)), lambda: samba.randn([4, 3])])
def test_randn_draws_what_torch_draws(make: Callable[[], Tensor]) -> None:
    torch.manual_seed(3)
    drawn = make()
    torch.manual_seed(3)
    assert samba.to_torch(drawn).equal(torch.randn(4, 3))


def test_randn_names_what_it_draws() -> None:
    tensor: Any = (
        samba.randn(4, 3, name="image", batch_dim=0, named_dims=("n", "x"), requires_grad=True).bfloat16().float()
    )
    assert (tensor.name, tensor.batch_dim, tensor.named_dims) == ("image", 0, ("n", "x"))
    assert tensor.requires_grad
    assert samba.randn(2, requires_grad=True).is_leaf


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (lambda: samba.randint(3, (500,), name="label", batch_dim=0), 0, 3),
        (lambda: samba.randint(5, 7, (500,), name="label", batch_dim=0), 5, 7),
        (lambda: samba.randint(5, 7, shape=(500,), name="label", batch_dim=0), 5, 7),
        (lambda: samba.randint(low=5, high=7, size=(500,), name="label", batch_dim=0), 5, 7),
    ],
)
def test_randint_draws_below_its_upper_bound(make: Callable[[], samba.SambaTensor], low: int, high: int) -> None:
    label = make()
    assert set(label.tolist()) == set(range(low, high))
    assert (label.name, label.batch_dim, label.dtype) == ("label", 0, torch.int64)


def test_randint_takes_a_dtype() -> None:
    assert samba.randint(10, (4,), dtype=torch.int16).dtype is torch.int16


def test_makers_take_a_name() -> None:
    zeros = samba.zeros(2, 3, name="state", batch_dim=0, dtype=torch.float64)
    assert isinstance(zeros, samba.SambaTensor)
    assert (zeros.name, zeros.batch_dim, zeros.shape, zeros.dtype) == ("state", 0, (2, 3), torch.float64)
    assert samba.full((2,), 7).tolist() == [7, 7]
    assert samba.randn_like(zeros, name="noise").name == "noise"


@pytest.mark.parametrize("name", [name for name in dir(torch) if name.endswith("_like") and not name.startswith("_")])
def test_so_does_everything_that_is_made_like_a_tensor(name: str) -> None:
    given = {"full_like": {"fill_value": 7}, "randint_like": {"high": 3}}.get(name, {})
    made = getattr(samba, name)(torch.ones(4, 2), name="x", batch_dim=0, dtype=torch.float64, **given)
    assert isinstance(made, samba.SambaTensor)
    assert (made.name, made.batch_dim, made.shape, made.dtype) == ("x", 0, (4, 2), torch.float64)


@pytest.mark.parametrize("name", ["addmm", "cat", "sigmoid", "einsum", "stack", "softmax", "where", "matmul", "split"])
def test_an_operator_is_torchs_own(name: str) -> None:
    assert getattr(samba, name) is getattr(torch, name)


@pytest.mark.parametrize("name", ["cross_entropy", "gelu", "logsigmoid", "linear", "mse_loss"])
def test_so_are_those_of_torch_nn_functional(name: str) -> None:
    assert getattr(samba, name) is getattr(nn.functional, name)


def test_operators_give_samba_tensors() -> None:
    x, weight, bias = samba.randn(4, 3, name="x"), torch.randn(3, 2), torch.randn(2)
    result: Tensor = samba.sigmoid(samba.addmm(bias, x, weight))
    assert isinstance(result, samba.SambaTensor)
    assert samba.to_torch(result).equal(torch.sigmoid(torch.addmm(bias, x.torch(), weight)))


@pytest.mark.parametrize(
    "name", ["save", "load", "manual_seed", "compile", "Tensor", "float32", "_VF", "__path_hooks__"]
)
def test_what_is_no_operator_is_not_there(name: str) -> None:
    assert not hasattr(samba, name)


def test_an_unknown_name_is_told_its_neighbours() -> None:
    with pytest.raises(AttributeError, match=r"^sambasim\.samba has no sigmod; near it there is sigmoid, "):
        samba.sigmod  # noqa: B018
    with pytest.raises(AttributeError, match=r"^sambasim\.samba has no randnt; near it there is .*\brandn\b"):
        samba.randnt  # noqa: B018
    with pytest.raises(AttributeError, match=r"^sambasim\.samba has no qqqqqqqq$"):
        samba.qqqqqqqq  # noqa: B018


def test_dir_lists_own_names_and_operators() -> None:
    assert {"SambaTensor", "optim", "randn", "addmm", "zeros"} <= set(dir(samba))


class Old(nn.Module):
    """Calls samba's operators in `forward`, as old apps do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = samba.nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = samba.cat([samba.sigmoid(self.layer(x)), samba.zeros(len(x), 2)], dim=1)
        loss: Tensor = samba.nn.functional.relu(wide).mean()
        return loss


@pytest.mark.parametrize("capture", [capture_training, capture_evaluation])
def test_a_forward_of_sambas_operators_is_captured(capture: Callable[..., object]) -> None:
    captured = capture(Old(), [torch.randn(2, 3)])
    targets = [str(node.target) for node in captured.graph.nodes]  # type: ignore[attr-defined]
    assert {"aten.sigmoid.default", "aten.zeros.default", "aten.cat.default"} <= set(targets)
