"""What makes tensors, and torch's operators under the same names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.compiler.capture import capture_evaluation, capture_training
from sambasim.errors import OptionError
from sambasim.samba import stir
from sambasim.samba.checks.findings import KeywordError


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


@pytest.mark.parametrize(
    "name", ["cat", "sigmoid", "mul", "log", "div", "einsum", "stack", "softmax", "where", "matmul", "split"]
)
def test_an_operator_is_torchs_own(name: str) -> None:
    assert getattr(samba, name) is getattr(torch, name)


@pytest.mark.parametrize("name", ["cross_entropy", "gelu", "logsigmoid", "linear", "mse_loss"])
def test_so_are_those_of_torch_nn_functional(name: str) -> None:
    assert getattr(samba, name) is getattr(nn.functional, name)


@pytest.mark.parametrize("make", ["rand", "randn", "zeros"])
def test_makers_take_what_describes_a_tensor(make: str) -> None:
    tensor = getattr(samba, make)([4, 3], dtype=torch.float64, name="x", sized_dims=[None, 3], region_name="state")
    assert (tensor.shape, tensor.dtype, tensor.name) == ((4, 3), torch.float64, "x")
    assert (tensor.sized_dims, tensor.region_name) == ([None, 3], "state")


def test_randint_in_two_dimensions_as_int16() -> None:
    label = samba.randint(2, 9, (4, 3), name="label", batch_dim=0, named_dims=("B", "F"), dtype=torch.int16)
    assert (label.shape, label.dtype, label.named_dims) == ((4, 3), torch.int16, ("B", "F"))
    assert bool(((label >= 2) & (label < 9)).all())


def test_a_tensor_like_the_data_of_another() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    for given in (weight.data, samba.randn(4, 2, name="x"), samba.randn(4, 2, name="x").data):
        drawn = samba.randn_like(given).bfloat16()
        assert isinstance(drawn, samba.SambaTensor)
        assert (drawn.shape, drawn.name) == ((4, 2), None)


def test_arguments_that_torch_does_not_take_are_refused_with_the_line() -> None:
    with pytest.raises(
        KeywordError, match=r"^AP04: samba\.randint cannot be called so: randint\(\): argument .high."
    ) as caught:
        samba.randint("ten", (4,))
    assert str(caught.value.where).startswith(f"{__file__}:")
    assert caught.value.remedy == "give it the arguments of torch.randint"


def test_addmm_also_takes_its_second_matrix_transposed() -> None:
    bias, x, weight = torch.randn(2), torch.randn(4, 3), torch.randn(2, 3)
    expected = torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2)
    assert samba.addmm(bias, x, weight, beta=0.5, alpha=2, is_transposed=True).equal(expected)
    out = torch.empty(4, 2)
    samba.addmm(bias, x, weight.t(), beta=0.5, alpha=2, out=out)
    assert out.equal(expected)


def test_triu_fill_fills_above_the_main_diagonal() -> None:
    assert samba.triu_fill(torch.ones(2, 3), -5).tolist() == [[1, -5, -5], [1, 1, -5]]
    assert samba.triu_fill(torch.zeros(2, 2, 2), float("-inf"))[1].tolist() == [[0, float("-inf")], [0, 0]]


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


@pytest.mark.parametrize(
    ("reduction", "dim", "expected"),
    [(None, None, [[1.0, 8.0], [3.0, 12.0]]), ("MIN", [1], [1.0, 3.0]), ("max", 0, [3.0, 12.0]), ("SUM", None, 24.0)],
)
def test_a_function_of_elements_is_mapped_and_reduced(reduction: Any, dim: Any, expected: Any) -> None:
    def twice_beyond_the_first(attrs: Any, x: Tensor, scale: Tensor) -> Tensor:
        column = stir.sn_iteridx(attrs=attrs, dim=1, dtype=torch.int16)
        return stir.sn_select(column > 0, x * scale * stir.sn_imm(2.0, torch.float32), x)

    tensors = [torch.tensor([[1.0, 2.0], [3.0, 3.0]]), torch.tensor([2.0])]
    found = stir.sn_zipmapreduce(twice_beyond_the_first, tensors, reduce_func=reduction, reduce_dim=dim)
    assert found.tolist() == expected


def test_a_reduction_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="no reduction ARGSORT") as caught:
        stir.sn_zipmapreduce(lambda attrs, x: x, [torch.ones(2)], reduce_func="ARGSORT")
    assert caught.value.remedy == "reduce_func is one of MIN, MAX, SUM, MEAN"


class Old(nn.Module):
    """Calls samba's operators in `forward`, as old apps do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = samba.nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = samba.addmm(self.layer.bias, x, self.layer.weight, is_transposed=True)
        wide = samba.cat([samba.sigmoid(hidden), samba.zeros(len(x), 2, name="padding")], dim=1)
        wide = samba.triu_fill(samba.from_torch(samba.to_torch(wide), name="wide", batch_dim=0), 0.5)
        least = stir.sn_zipmapreduce(_beyond_the_first, [wide], reduce_func="MIN", reduce_dim=[1])
        wide = wide.torch() - least.torch_tensor().unsqueeze(1)  # type: ignore[attr-defined]
        loss: Tensor = samba.nn.functional.relu(wide).mean()
        return loss


def _beyond_the_first(attrs: Any, x: Tensor) -> Tensor:
    return stir.sn_select(stir.sn_iteridx(attrs=attrs, dim=1, dtype=torch.int16) > 0, x, stir.sn_imm(1, x.dtype))


@pytest.mark.parametrize("capture", [capture_training, capture_evaluation])
def test_a_forward_of_sambas_operators_is_captured(capture: Callable[..., object]) -> None:
    captured = capture(Old(), [torch.randn(2, 3)])
    targets = [str(node.target) for node in captured.graph.nodes]  # type: ignore[attr-defined]
    assert {"aten.sigmoid.default", "aten.zeros.default", "aten.cat.default", "aten.amin.default"} <= set(targets)
