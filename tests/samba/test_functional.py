"""What makes tensors, and torch's operators under the same names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import OptionError
from sambasim.samba import functional as stir
from sambasim.samba.checks.findings import KeywordError


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


def test_arguments_that_torch_does_not_take_are_refused_with_the_line() -> None:
    with pytest.raises(
        KeywordError, match=r"^AP04: wrong arguments of samba\.randint: randint\(\): argument .high."
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
