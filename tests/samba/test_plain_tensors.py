"""SambaFlow's names on plain tensors."""

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
from sambasim.samba import plain_tensors
from sambasim.samba.session import Session


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


def test_a_samba_tensor_has_its_own(device: object) -> None:
    tensor = samba.randn(2, name="x")
    tensor.sn_grad = 3.0
    assert (tensor.sn_name, tensor.sn_grad) == ("x", torch.tensor(3.0))
    assert type(tensor.torch()) is Tensor


def test_a_second_installation_changes_nothing() -> None:
    before: Any = vars(Tensor)["sn_grad"].fget
    plain_tensors.install()
    assert vars(Tensor)["sn_grad"].fget is before


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
    constants = [feed.name for feed in captured.feeds.values() if "matrix" in feed.name]
    assert constants == ["matrix"]
    assert any(str(node.target) == "aten.mul.Tensor" and node.args[1] == 2 for node in captured.graph.nodes)
