"""SambaTensor, and SambaFlow's attributes of plain tensors."""

# Torch has no types for backward().
# mypy: no-disallow-untyped-calls

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, OptionError, WeightsError
from sambasim.samba import SambaTensor, from_torch_tensor, randn
from tests.samba.harness import Load, Made, with_sgd


def image() -> SambaTensor:
    plain = torch.arange(12.0).reshape(4, 3)
    return from_torch_tensor(plain, name="image", batch_dim=0, named_dims=["sample", "pixel"])


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x @ torch.ones(3, 2),
        lambda x: torch.cat([x, x]),
        lambda x: x.max(dim=1).values,
        lambda x: torch.nn.Linear(3, 2)(x),
    ],
)
def test_a_new_value_is_a_samba_tensor_without_a_name(compute: Callable[[Tensor], Tensor]) -> None:
    tensor = image()
    result = compute(tensor)
    assert isinstance(result, SambaTensor)
    assert (result.sn_name, result.batch_dim, result.named_dims) == (None, None, None)
    assert tensor.sn_name == "image"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.bfloat16().float(),
        lambda x: x.to(torch.int16),
        lambda x: x.data,
        lambda x: x.rdu(),
        lambda x: from_torch_tensor(x),
        lambda x: pickle.loads(pickle.dumps(x)),
    ],
)
def test_the_same_tensor_in_another_form_keeps_its_description(change: Callable[[SambaTensor], SambaTensor]) -> None:
    tensor = image()
    tensor.host_memory, tensor.mem_type = False, "ddr"
    result = change(tensor)
    assert isinstance(result, SambaTensor)
    assert (result.sn_name, result.name, result.batch_dim) == ("image", "image", 0)
    assert result.named_dims == ("sample", "pixel")
    assert (result.host_memory, result.mem_type) == (False, "ddr")


def test_autograd_runs_through_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    (from_torch_tensor(weight * 2, name="x") * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6, 6, 6]
    tensor = randn(3, requires_grad=True)
    (tensor.torch() * 4).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [4, 4, 4]


def test_a_shape_alone_has_no_data_until_some_is_written() -> None:
    for write in (
        lambda x: x.fill_(3),
        lambda x: x.torch().fill_(3),
        lambda x: setattr(x, "sn_data", torch.full((2, 3), 3)),
    ):
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
        with pytest.raises(WeightsError, match="the tensor x was made in lazy_param, and has no data") as caught:
            use()
        assert str(caught.value.where).startswith(__file__)
        assert caught.value.remedy == "assign its sn_data, or make it outside lazy_param"
    with pytest.raises(WeightsError, match="the tensor shift was made in lazy_param") as caught:
        samba.session.compile(model, [ready], inference=True)
    assert caught.value.remedy == "samba.materialize(tensor), which calls its materializer"
    assert samba.materialize(model.shift).tolist() == [1, 1, 1]
    lazy.sn_data = torch.full((4, 3), 2.0)
    assert (lazy.numpy().sum(), lazy.sn_name, lazy.batch_dim, lazy.has_data) == (24, "x", 0, True)
    assert model(lazy).sum() == 36


def test_the_gradient_is_a_plain_tensor_or_a_number() -> None:
    loss: Any = from_torch_tensor(torch.tensor(2.0), name="loss")
    assert loss.sn_grad is None
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
        (
            lambda: from_torch_tensor(torch.ones(2, dtype=torch.complex64), name="x"),
            "a SambaTensor holds real numbers, and the tensor x is complex",
        ),
        (lambda: SambaTensor((torch.ones(1), torch.ones(2))), "a tensor is needed, not tuple"),  # type: ignore[arg-type]  # the mistake
        (lambda: setattr(image(), "sn_data", torch.ones(3, 4)), "the tensor image has the shape (4, 3), and the data"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        make()
    assert caught.value.remedy


def test_the_backward_of_a_result_without_a_graph_says_who_does_it() -> None:
    loss = SambaTensor(torch.ones(2), name="loss")
    with pytest.raises(OptionError, match=r"the host has no autograd graph of a result of session\.run") as caught:
        (loss.mean() * 2).backward()
    assert "session.run does both" in str(caught.value.remedy)
    weight = torch.ones(2, requires_grad=True)
    (loss * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def _linear() -> Made:
    return with_sgd(lambda: nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("sn_grad", "set sn_grad on an output"), ("sn_data", r"param.data.copy_\(…\).* samba.session.to_device\(model\)")],
)
def test_a_tensor_of_the_model_cannot_be_assigned_to(name: str, remedy: str, load: Load) -> None:
    weight = load(_linear, [image()])[0].weight
    samba.session.run([image()])
    before = getattr(weight, name)
    assert not before.equal(weight), "it is on the device"
    with pytest.raises(OptionError, match=f"{name} of a parameter or buffer of the loaded model") as caught:
        setattr(weight, name, torch.zeros(2, 3))
    assert str(caught.value.where).startswith(__file__)
    assert re.search(remedy, str(caught.value.remedy))
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
