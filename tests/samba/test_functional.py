"""What makes tensors: torch's operators under the same names, and SambaLoader."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sambasim import samba
from sambasim.errors import DataError, OptionError
from sambasim.samba import functional as stir
from sambasim.samba.inputs import SambaLoader
from sambasim.samba.keywords import KeywordError


@pytest.mark.parametrize("name", [name for name in dir(torch) if name.endswith("_like") and not name.startswith("_")])
def test_so_does_everything_that_is_made_like_a_tensor(name: str) -> None:
    given = {"full_like": {"fill_value": 7}, "randint_like": {"high": 3}}.get(name, {})
    made = getattr(samba, name)(torch.ones(4, 2), name="x", batch_dim=0, dtype=torch.float64, **given)
    assert isinstance(made, samba.SambaTensor)
    assert (made.name, made.batch_dim, made.shape, made.dtype) == ("x", 0, (4, 2), torch.float64)


def test_an_operator_is_torchs_own() -> None:
    for name in ("cat", "sigmoid", "mul", "log", "div", "einsum", "stack", "softmax", "where", "matmul", "split"):
        assert getattr(samba, name) is getattr(torch, name)
    for name in ("cross_entropy", "gelu", "logsigmoid", "linear", "mse_loss"):
        assert getattr(samba, name) is getattr(nn.functional, name)


def test_makers_take_what_describes_a_tensor() -> None:
    for make in (samba.rand, samba.randn, samba.zeros):
        tensor = make([4, 3], dtype=torch.float64, name="x", sized_dims=[None, 3], region_name="state")
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


def test_what_is_no_operator_is_not_there_and_the_error_has_the_nearest_names() -> None:
    for name in ("save", "load", "manual_seed", "compile", "Tensor", "float32", "_VF", "__path_hooks__"):
        assert not hasattr(samba, name)
    with pytest.raises(AttributeError, match=r"^sambasim\.samba has no sigmod; similar names: sigmoid, "):
        samba.sigmod  # noqa: B018
    with pytest.raises(AttributeError, match=r"^sambasim\.samba has no randnt; similar names: .*\brandn\b"):
        samba.randnt  # noqa: B018
    with pytest.raises(AttributeError, match=r"^sambasim\.samba has no qqqqqqqq$"):
        samba.qqqqqqqq  # noqa: B018


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


IMAGES, LABELS = torch.randn(10, 3), torch.arange(10)


def loader() -> "DataLoader[Any]":
    return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4)


class Custom:
    """A loader of an app's own, without a length."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 2:
            raise IndexError
        return IMAGES, LABELS


def test_anything_to_iterate_over_is_a_loader() -> None:
    batches = SambaLoader(Custom(), ["image", "label"])  # type: ignore[arg-type]  # an iterable by __getitem__
    assert [label.name for _, label in batches] == ["label", "label"]
    with pytest.raises(TypeError, match="Custom has no length"):
        len(batches)


def test_a_mapping_is_read_by_name() -> None:
    [[label, image]] = SambaLoader([{"image": IMAGES, "index": 1, "label": LABELS}], ["label", "image"])
    assert label.torch().equal(LABELS)
    assert image.torch().equal(IMAGES)


@pytest.mark.parametrize(
    ("batches", "names", "what"),
    [
        ([[IMAGES, LABELS]], ["image"], "a batch has 2 values, and SambaLoader 1 name: image"),
        ([IMAGES], ["image", "label"], "a batch has 1 value, and SambaLoader 2 names: image, label"),
        ([{"x": IMAGES}], ["x", "y"], "a batch has no y; it has x"),
        ([[IMAGES, ["a", "b"]]], ["image", "word"], "word of a batch must be a tensor, not list"),
    ],
)
def test_batches_that_do_not_fit_the_names_are_refused(batches: Any, names: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"^{what}") as caught:
        list(SambaLoader(batches, names))
    assert str(caught.value.where).startswith(__file__)
    assert caught.value.remedy


def test_a_sampler_of_one_replica_has_rank_0_unless_a_rank_is_given() -> None:
    dataset = TensorDataset(IMAGES)
    assert DistributedSampler(dataset, num_replicas=1, shuffle=False).rank == 0
    assert list(DistributedSampler(dataset, 2, 1, shuffle=False)) == [1, 3, 5, 7, 9]
    with pytest.raises(ValueError, match="Invalid rank 3"):
        DistributedSampler(dataset, num_replicas=1, rank=3)
