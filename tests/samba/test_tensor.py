"""SambaTensor, SambaFlow's attributes of plain tensors, operators, SambaLoader, and assert_close."""

# Torch has no types for backward().
# mypy: no-disallow-untyped-calls

import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sambasim import samba
from sambasim.errors import DataError, OptionError, WeightsError
from sambasim.samba import SambaTensor, from_torch_tensor, randn
from sambasim.samba import functional as stir
from sambasim.samba.inputs import SambaLoader
from sambasim.samba.test import assert_close
from tests.samba.conftest import make_logreg
from tests.samba.harness import Load, batch_of, refused, with_sgd


def image() -> SambaTensor:
    plain = torch.arange(12.0).reshape(4, 3)
    return from_torch_tensor(plain, name="image", batch_dim=0, named_dims=["sample", "pixel"])


def test_a_new_value_is_a_samba_tensor_without_a_name() -> None:
    tensor = image()
    new: tuple[Any, ...] = (tensor @ torch.ones(3, 2), torch.cat([tensor, tensor]), tensor.max(dim=1).values)
    for result in (*new, nn.Linear(3, 2)(tensor)):
        assert isinstance(result, SambaTensor)
        assert (result.sn_name, result.batch_dim, result.named_dims) == (None, None, None)
    assert tensor.sn_name == "image"


def test_the_same_tensor_in_another_form_keeps_its_description() -> None:
    tensor = image()
    tensor.host_memory, tensor.mem_type = False, "ddr"
    forms: tuple[Any, ...] = (tensor.bfloat16().float(), tensor.to(torch.int16), tensor.data, tensor.rdu())
    for result in (*forms, from_torch_tensor(tensor), pickle.loads(pickle.dumps(tensor))):
        assert isinstance(result, SambaTensor)
        assert (result.sn_name, result.name, result.batch_dim) == ("image", "image", 0)
        assert result.named_dims == ("sample", "pixel")
        assert (result.host_memory, result.mem_type) == (False, "ddr")


def test_autograd_runs_through_it_unless_it_is_a_result_without_a_graph() -> None:
    weight: Any = torch.ones(2, requires_grad=True)
    (from_torch_tensor(weight * 2, name="x") * 3).sum().backward()
    tensor: Any = randn(2, requires_grad=True)
    (tensor.torch() * 4).sum().backward()
    assert [one.grad.tolist() for one in (weight, tensor)] == [[6, 6], [4, 4]]
    loss = SambaTensor(torch.ones(2), name="loss")
    with refused(OptionError, r"the host has no autograd graph of a result of session\.run", r"session\.run does both"):
        (loss.mean() * 2).backward()
    (loss * weight).sum().backward()
    assert weight.grad.tolist() == [7, 7]


def test_a_mean_loss_of_a_session_is_also_taken_as_one_element(load: Load) -> None:
    load(make_logreg, batch_of())
    loss, outputs = samba.session.run(batch_of())
    value, plain = loss.item(), samba.to_torch(loss)
    assert plain.ndim == 0
    first: Any = loss[0]
    last, whole = loss.float()[-1], loss.detach()[:1]
    assert [first.item(), last.item(), *whole.tolist(), *(one.item() for one in loss)] == [value] * 4
    assert float(loss[0].mean()) == float(loss.mean().numpy()) == value
    assert (len(loss), loss.size(0), first.sn_name, first.ndim) == (1, 1, None, 0)
    assert torch.stack([loss]).shape == torch.tensor([loss]).shape == np.array([loss]).shape == (1,)
    uses: tuple[Callable[[Any], Any], ...] = (lambda x: x[0], len, iter, lambda x: x.size(0))
    for use in uses:
        for other in (plain, loss * 2, outputs.sum()):
            with pytest.raises((IndexError, TypeError), match=r"0-d|no dimensions"):
                use(other)
    with pytest.raises(IndexError, match="index 1 is out of bounds"):
        loss[1]
    loss[0] = outputs[0, 0]
    assert loss.item() == outputs[0, 0].item()


def test_a_shape_alone_has_no_data_until_some_is_written() -> None:
    threes = torch.full((2, 3), 3)
    for write in (lambda x: x.fill_(3), lambda x: x.torch().fill_(3), lambda x: setattr(x, "sn_data", threes)):
        tensor = SambaTensor(shape=(2, 3), dtype=torch.int16, name="label", batch_dim=0)
        assert not tensor.has_data
        write(tensor)
        assert tensor.has_data
        assert tensor.tolist() == [[3, 3, 3], [3, 3, 3]]


def test_a_lazy_tensor_without_data_is_refused_by_name_until_it_has_some() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = SambaTensor(shape=(3,), name="shift", materializer=lambda: torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    with samba.lazy_param():
        lazy, model = SambaTensor(shape=(4, 3), name="x", batch_dim=0), Shift()
    ready = image()
    for use in (
        lambda: lazy.numpy(),
        lambda: lazy.sn_data,
        lambda: lazy + ready,
        lambda: samba.materialize(lazy),
        lambda: samba.utils.assert_close(lazy, ready, "x"),
        lambda: samba.session.compile(nn.Identity(), [lazy], inference=True),
    ):
        remedy = "^assign its sn_data, or make it outside lazy_param$"
        with refused(WeightsError, "the tensor x was made in lazy_param, and has no data", remedy):
            use()
    remedy = r"^samba\.materialize\(tensor\), which calls its materializer$"
    with refused(WeightsError, "the tensor shift was made in lazy_param", remedy):
        samba.session.compile(model, [ready], inference=True)
    assert samba.materialize(model.shift).tolist() == [1, 1, 1]
    lazy.sn_data = torch.full((4, 3), 2.0)
    assert (lazy.numpy().sum(), lazy.sn_name, lazy.batch_dim, lazy.has_data) == (24, "x", 0, True)
    assert model(lazy).sum() == 36


def test_the_gradient_is_a_plain_tensor_or_a_number() -> None:
    loss: Any = from_torch_tensor(torch.tensor(2.0), name="loss")
    loss.sn_grad = from_torch_tensor(torch.tensor(0.5))
    assert type(loss.sn_grad) is Tensor
    assert loss.sn_grad == 0.5
    loss.sn_grad = 128
    assert loss.sn_grad.equal(torch.tensor(128.0))
    assert loss.float().clone().sn_grad is None
    loss.sn_grad = None
    assert loss.sn_grad is None


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: SambaTensor(), "SambaTensor needs a tensor or a shape"),
        (lambda: SambaTensor(torch.ones(2), shape=(3,)), "the tensor has the shape (2,), and shape= is (3,)"),
        (lambda: randn(2, 3, name="x", batch_dim=2), "the tensor x has no dimension 2: its shape is (2, 3)"),
        (lambda: from_torch_tensor(torch.ones(2) * 1j, name="x"), "holds real numbers, and the tensor x is complex"),
        (lambda: SambaTensor((torch.ones(1), torch.ones(2))), "a tensor is needed, not tuple"),  # type: ignore[arg-type]  # the mistake
        (lambda: setattr(image(), "sn_data", torch.ones(3, 4)), "the tensor image has the shape (4, 3), and the data"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        make()
    assert caught.value.remedy


_linear = partial(with_sgd, lambda: nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("sn_grad", "set sn_grad on an output"), ("sn_data", r"param.data.copy_\(…\).* samba.session.to_device\(model\)")],
)
def test_a_tensor_of_the_model_cannot_be_assigned_to(name: str, remedy: str, load: Load) -> None:
    weight = load(_linear, [image()])[0].weight
    samba.session.run([image()])
    before = getattr(weight, name)
    assert not before.equal(weight), "it is on the device"
    with refused(OptionError, f"{name} of a parameter or buffer of the loaded model", remedy):
        setattr(weight, name, torch.zeros(2, 3))
    assert getattr(weight, name).equal(before)


def test_any_other_is_what_the_app_assigned() -> None:
    weight: Any = nn.Linear(3, 2).weight
    assert weight.sn_grad is None
    assert weight.sn_data.data_ptr() == weight.data_ptr()
    assert not weight.sn_data.requires_grad
    weight.sn_grad, weight.sn_data = torch.ones(2, 3), torch.zeros(2, 3)
    assert weight.sn_grad.equal(torch.ones(2, 3))
    assert weight.sn_data.equal(torch.zeros(2, 3))
    with pytest.raises(DataError, match=r"the tensor has the shape \(2, 3\), and the data the shape \(3, 2\)"):
        weight.sn_data = torch.zeros(3, 2)
    weight.sn_grad = None
    assert weight.sn_grad is None


def test_makers_take_what_describes_a_tensor() -> None:
    for make in (samba.rand, samba.randn, samba.zeros):
        tensor = make([4, 3], dtype=torch.float64, name="x", sized_dims=[None, 3], region_name="state")
        assert (tensor.shape, tensor.dtype, tensor.name) == ((4, 3), torch.float64, "x")
        assert (tensor.sized_dims, tensor.region_name) == ([None, 3], "state")
    likes = [name for name in dir(torch) if name.endswith("_like") and not name.startswith("_")]
    assert len(likes) > 5
    for name in likes:
        given = {"full_like": {"fill_value": 7}, "randint_like": {"high": 3}}.get(name, {})
        made = getattr(samba, name)(torch.ones(4, 2), name="x", batch_dim=0, dtype=torch.float64, **given)
        assert isinstance(made, SambaTensor)
        assert (made.name, made.batch_dim, made.shape, made.dtype) == ("x", 0, (4, 2), torch.float64)
    with pytest.raises(TypeError, match=r"^randint\(\): argument .high."):
        samba.randint("ten", (4,))


def test_an_operator_is_torchs_own() -> None:
    for name in ("cat", "sigmoid", "mul", "log", "div", "einsum", "stack", "where", "matmul", "split"):
        assert getattr(samba, name) is getattr(torch, name)
    for name in ("cross_entropy", "gelu", "pad", "interpolate", "mse_loss"):
        assert getattr(samba, name) is getattr(nn.functional, name)


def test_operators_of_samba_alone() -> None:
    assert samba.triu_fill(torch.ones(2, 3), -5).tolist() == [[1, -5, -5], [1, 1, -5]]
    assert samba.triu_fill(torch.zeros(2, 2, 2), float("-inf"))[1].tolist() == [[0, float("-inf")], [0, 0]]


def test_int16_indices_and_labels_are_computed_as_int64_on_the_host() -> None:
    table, rows = torch.eye(3), torch.tensor([2, 0])
    short: Any = SambaTensor(rows.short(), name="rows")
    functions: tuple[Callable[[Any], Any], ...] = (
        lambda x: nn.functional.embedding(x, table), lambda x: table.index_select(0, x), lambda x: table[:, x],
        lambda x: nn.functional.cross_entropy(table[:2], x), lambda x: nn.functional.one_hot(x),
        lambda x: nn.functional.cross_entropy(table[:2], target=x), lambda x: torch.gather(table, 1, index=x[:, None]),
    )  # fmt: skip
    for function in functions:
        assert torch.equal(function(short), function(rows))
    with pytest.raises(RuntimeError, match="can't be cast"):
        short.add_(0.5)


def test_what_is_no_operator_is_not_there() -> None:
    for name in ("save", "load", "manual_seed", "compile", "Tensor", "float32", "_VF", "__path_hooks__"):
        assert not hasattr(samba, name)
    with pytest.raises(AttributeError, match="has no qqqqqqqq"):
        samba.qqqqqqqq  # noqa: B018  # the mistake


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
    with refused(OptionError, "no reduction ARGSORT", "^reduce_func is one of MIN, MAX, SUM, MEAN$"):
        stir.sn_zipmapreduce(lambda attrs, x: x, [torch.ones(2)], reduce_func="ARGSORT")


IMAGES, LABELS = torch.randn(10, 3), torch.arange(10)


class Custom:
    """A loader of an app's own, without a length."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 2:
            raise IndexError
        return IMAGES, LABELS


def test_anything_to_iterate_over_is_a_loader() -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(IMAGES, LABELS), 4)
    batches = SambaLoader(loader, ["label", "image"], lambda batch: batch[::-1], return_original_batch=True)
    assert len(batches) == 3
    for ([label, image], original), rows in zip(batches, IMAGES.split(4), strict=True):
        assert (label.name, image.name, image.batch_dim, type(original)) == ("label", "image", 0, list)
        assert image.torch().equal(rows)
    batches = SambaLoader(Custom(), ["image", "label"])  # type: ignore[arg-type]  # an iterable by __getitem__
    assert [label.name for _, label in batches] == ["label", "label"]
    with pytest.raises(TypeError, match="'Custom' has no len"):
        len(batches)
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
    with refused(DataError, f"^{what}"):
        list(SambaLoader(batches, names))


def test_a_sampler_of_one_replica_has_rank_0_unless_a_rank_is_given() -> None:
    dataset = TensorDataset(IMAGES)
    assert DistributedSampler(dataset, num_replicas=1, shuffle=False).rank == 0
    assert list(DistributedSampler(dataset, 2, 1, shuffle=False)) == [1, 3, 5, 7, 9]
    with pytest.raises(ValueError, match="Invalid rank 3"):
        DistributedSampler(dataset, num_replicas=1, rank=3)


NAN, INF = float("nan"), float("inf")


def test_what_is_close_passes() -> None:
    assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0029, 1.9971]), "loss")
    assert_close(samba.from_torch_tensor(torch.ones(2).bfloat16()).requires_grad_(), np.ones(2), "loss", threshold=0.0)
    assert_close(torch.tensor([110.0]), torch.tensor([100.0]), "loss", threshold=0.0, rtol=0.1)
    assert_close(torch.tensor([INF, -INF]), torch.tensor([INF, -INF]), "loss")
    assert_close(1.0, torch.tensor(1.002), "loss")
    assert_close(torch.ones(2), samba.from_torch_tensor(torch.ones(2), name="x"), "loss", visualize=True)


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (
            torch.tensor([[1.0, 2.0], [3.0, 4.01]]), torch.tensor([[1.0, 2.004], [3.0, 4.0]]),
            "loss: 2 of 4 elements differ by more than 0.003; the worst at [1, 1] is 4.01, and 4 was expected",
        ),
        (
            torch.tensor([1.0]).bfloat16(), torch.tensor([1.01]),
            "loss: 1 of 1 elements differ by more than 0.003 + 0.00390625 of the expected value; the worst at [0] is 1"
            ", and 1.01 was expected; in bf16: are both inputs the same, as of samba.randn(…).bfloat16().float()?",
        ),
        (
            torch.tensor([9.0, NAN]), torch.tensor([0.0, NAN]),
            "loss: 2 of 2 elements differ by more than 0.003; the worst at [1] is nan, and nan was expected",
        ),
        (torch.ones(2, 1), torch.ones(2), "loss: the shape is (2, 1), and (2,) was expected"),
    ],
)  # fmt: skip
def test_what_is_not_close_is_told(found: Any, expected: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_close(found, expected, "loss")
    for value in (None, "text", object()):
        with refused(DataError, f"^loss: a {type(value).__name__} cannot be compared, the second value$"):
            assert_close(expected, value, "loss")
