"""SambaTensor, and SambaFlow's attributes of plain tensors."""

# Torch has no types for backward().
# mypy: no-disallow-untyped-calls

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.compiler.capture import capture_evaluation, capture_training
from sambasim.errors import DataError, OptionError
from sambasim.samba import SambaTensor, from_torch, from_torch_tensor, randn, to_torch
from sambasim.samba.session import Session


def image() -> SambaTensor:
    plain = torch.arange(12.0).reshape(4, 3)
    return from_torch_tensor(plain, name="image", batch_dim=0, named_dims=["sample", "pixel"])


def test_it_shares_memory_with_the_tensor_it_is_made_from() -> None:
    plain = torch.zeros(3)
    tensor = from_torch_tensor(plain, name="x")
    plain[1] = 5
    assert tensor.tolist() == [0, 5, 0]
    tensor.torch()[2] = 7
    tensor.numpy()[0] = 1
    assert plain.tolist() == [1, 5, 7]


def test_what_an_app_says_of_its_place_is_kept() -> None:
    tensor = from_torch_tensor(torch.ones(2, 3), name="x", sized_dims=[2, None], region_name="weights")
    assert (tensor.sized_dims, tensor.sn_region_name) == ([2, None], "weights")
    tensor.sn_region_name = "state"
    copied: Any = tensor.clone()
    assert tensor.region_name == copied.sn_region_name == "state"


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: x @ torch.ones(3, 2),
        lambda x: torch.cat([x, x]),
        lambda x: x.mean(),
        lambda x: x[:2],
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
        lambda x: x.clone().detach(),
        lambda x: x.data,
        lambda x: x.cpu(),
        lambda x: x.rdu(),
        lambda x: x.requires_grad_(),
        lambda x: x.add_(1),
        lambda x: from_torch_tensor(x),
        copy.deepcopy,
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


def test_a_checkpoint_with_one_reads_back() -> None:
    file = io.BytesIO()
    torch.save({"loss": image()}, file)
    file.seek(0)
    loss = torch.load(file)["loss"]
    assert isinstance(loss, SambaTensor)
    assert loss.sn_name == "image"
    assert loss.torch().equal(image().torch())


def test_autograd_runs_through_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    (from_torch_tensor(weight * 2, name="x") * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6, 6, 6]
    tensor = randn(3, requires_grad=True)
    (tensor.torch() * 4).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [4, 4, 4]


def test_numbers_are_read_also_where_autograd_follows() -> None:
    tensor: Any = from_torch_tensor(torch.ones(2)).requires_grad_()
    assert tensor.numpy().tolist() == [1, 1]
    assert (tensor * 2).sn_data.tolist() == [2, 2]
    assert not tensor.sn_data.requires_grad


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


def test_a_materializer_gives_the_data() -> None:
    tensor = SambaTensor(materializer=lambda: torch.ones(2), region_name="weights", sized_dims=(2,))
    assert tensor.has_data
    assert tensor.tolist() == [1, 1]
    assert (tensor.region_name, tensor.sized_dims) == ("weights", (2,))


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
        (lambda: from_torch_tensor(torch.ones(2), batch_dim=-2), "the tensor has no dimension -2: its shape is (2,)"),
        (lambda: SambaTensor(torch.ones(2), is_complex=True), "a SambaTensor holds real numbers, and the tensor is"),
        (
            lambda: from_torch_tensor(torch.ones(2, dtype=torch.complex64), name="x"),
            "a SambaTensor holds real numbers, and the tensor x is complex",
        ),
        (lambda: SambaTensor((torch.ones(1), torch.ones(2))), "a tensor is needed, not tuple"),  # type: ignore[arg-type]  # the mistake
        (lambda: to_torch((torch.ones(1), None)), "a tensor is needed, not NoneType"),  # type: ignore[type-var]
        (lambda: from_torch_tensor([1, 2]), "a tensor is needed, not list"),  # type: ignore[arg-type]
        (lambda: setattr(image(), "sn_data", torch.ones(3, 4)), "the tensor image has the shape (4, 3), and the data"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        make()
    assert caught.value.remedy


def test_a_model_in_place_of_a_tensor_is_told_what_to_call() -> None:
    with pytest.raises(DataError, match="not Linear") as caught:
        from_torch(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    assert caught.value.remedy == "samba.from_torch_model_(model) for a model"


def test_the_backward_of_a_result_without_a_graph_says_who_does_it() -> None:
    loss = SambaTensor(torch.ones(2), name="loss")
    with pytest.raises(OptionError, match=r"the host has no autograd graph of a result of session\.run") as caught:
        (loss.mean() * 2).backward()
    assert "session.run does both" in str(caught.value.remedy)
    weight = torch.ones(2, requires_grad=True)
    (loss * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


@pytest.fixture
def weight() -> Any:
    return nn.Linear(3, 2).weight


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Tensor, Tensor]]:
    """By the id of a tensor of the model: its value and its gradient on the device."""
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def of(part: int) -> Callable[[Session, Tensor], Tensor | None]:
        return lambda session, tensor: held[id(tensor)][part] if id(tensor) in held else None

    monkeypatch.setattr(Session, "device_value", of(0))
    monkeypatch.setattr(Session, "device_gradient", of(1))
    return held


def test_a_plain_tensor_becomes_itself() -> None:
    tensor: Any = torch.ones(2)
    assert tensor.torch() is tensor.torch_tensor() is tensor
    assert tensor.sn_name is None


def test_a_tensor_of_the_model_is_what_the_device_has(weight: Any, device: dict[int, tuple[Tensor, Tensor]]) -> None:
    device[id(weight)] = torch.full((2, 3), 5.0), torch.full((2, 3), 7.0)
    assert weight.sn_data.equal(torch.full((2, 3), 5.0))
    assert weight.sn_grad.equal(torch.full((2, 3), 7.0))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("sn_grad", "set sn_grad on an output"), ("sn_data", r"param.data.copy_\(…\).* samba.session.to_device\(model\)")],
)
def test_a_tensor_of_the_model_cannot_be_assigned_to(
    name: str, remedy: str, weight: Any, device: dict[int, tuple[Tensor, Tensor]]
) -> None:
    device[id(weight)] = torch.full((2, 3), 5.0), torch.full((2, 3), 7.0)
    before = getattr(weight, name)
    with pytest.raises(OptionError, match=f"{name} of a parameter or buffer of the loaded model") as caught:
        setattr(weight, name, torch.zeros(2, 3))
    assert str(caught.value.where).startswith(__file__)
    assert re.search(remedy, str(caught.value.remedy))
    assert getattr(weight, name).equal(before)


def test_any_other_is_what_the_app_assigned(weight: Any, device: object) -> None:
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


@pytest.mark.parametrize("make", [lambda: torch.ones(2), lambda: nn.Parameter(torch.ones(2))])
def test_tensors_are_copied_and_saved_as_before(make: Callable[[], Any]) -> None:
    tensor = make()
    tensor.sn_name, tensor.sn_grad = "weight", torch.ones(2)
    file = io.BytesIO()
    torch.save({"plain": make(), "named": tensor}, file)
    file.seek(0)
    for copied in (torch.load(file)["named"], copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert type(copied) is type(tensor)
        assert copied.equal(tensor)


class Model(nn.Module):
    """Uses the names in its forward, and a SambaTensor that it made in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.matrix = samba.from_torch_tensor(torch.eye(3).bfloat16().float(), name="matrix")

    def forward(self, x: Any) -> Tensor:
        hidden: Any = self.layer(x.torch()) @ self.matrix
        hidden.host_memory = False
        weight: Any = self.layer.weight
        named = weight.sn_name is not None
        loss: Tensor = (hidden.torch_tensor() @ samba.to_torch(self.matrix) * (2 if named else 1)).square().mean()
        return loss


@pytest.mark.parametrize("capture", [capture_training, capture_evaluation])
def test_a_forward_that_uses_them_is_captured(capture: Callable[..., object]) -> None:
    captured: Any = capture(samba.from_torch_model_(Model()), [torch.randn(2, 3)])
    constants = [role.name for role in captured.inputs.values() if "matrix" in role.name]
    assert constants == ["matrix"]
    assert any(str(node.target) == "aten.mul.Tensor" and node.args[1] == 2 for node in captured.graph.nodes)
