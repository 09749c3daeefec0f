"""Apps whose `state_dict()` has other names than `named_parameters()`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sambasim import samba
from sambasim.errors import PefError
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, Net, compiled

pytestmark = pytest.mark.usefixtures("one_thread")


def _wrapped() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.add_module("first", checkpoint_wrapper(model.first))
    return model


def _renamed() -> Net:
    torch.manual_seed(0)
    model = Net()

    def hook(module: nn.Module, entries: dict[str, Any], *_: object) -> None:
        for name in list(entries):
            entries[f"old.{name}"] = entries.pop(name)

    model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch's, untyped
    return model


class Own(Net):
    """A `state_dict` without arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # on purpose
        return {f"net/{name}": value for name, value in super().state_dict().items()}


def _own() -> Net:
    torch.manual_seed(0)
    return Own()


def _optimizers(model: Net, kind: Any) -> list[Any]:
    """Two parameter groups in one optimizer, and a second optimizer."""
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias], "lr": 0.3}]
    return [kind(groups, lr=0.1, momentum=0.9), kind(model.second.parameters(), lr=0.2)]


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, 5, generator=generator), torch.randint(3, (BATCH,), generator=generator)


@pytest.mark.parametrize("make", [_wrapped, _renamed, _own])
def test_an_app_trains_fetches_and_finds_its_tensors(make: Callable[[], Net], tmp_path: Path) -> None:
    model, eager = make(), make()
    samba.from_torch_model_(model)
    x, target = _batch()
    inputs = (
        samba.from_torch_tensor(x, name="x", batch_dim=0),
        samba.from_torch_tensor(target, name="target", batch_dim=0),
    )
    optimizers = _optimizers(model, samba.optim.SGD)
    pef = compiled((model, optimizers), inputs, tmp_path)
    trace_graph(model, inputs, optimizers, pef=pef)
    for _ in range(3):
        samba.session.run(inputs, model.output_tensors)
    torch_optimizers = _optimizers(eager, torch.optim.SGD)
    for _ in range(3):
        eager.zero_grad()
        torch.autograd.backward(eager(x, target)[0].mean())
        for one in torch_optimizers:
            one.step()
    for name, parameter in model.named_parameters():
        (of_symbol,) = samba.session.get_tensors_by_name([str(parameter.sn_name)])  # type: ignore[attr-defined]  # SambaFlow's
        assert torch.equal(of_symbol.sn_data, eager.get_parameter(name))
    samba.session.to_cpu(model)
    for (name, parameter), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    momentum = optimizers[0].state[model.first.weight]["momentum_buffer"]
    assert torch.equal(momentum, torch_optimizers[0].state[eager.first.weight]["momentum_buffer"])


def test_a_model_with_other_names_is_another_model(tmp_path: Path) -> None:
    pefs = {}
    inputs = [samba.from_torch_tensor(one, name=name, batch_dim=0) for name, one in zip("xy", _batch(), strict=True)]
    for make in (Net, _renamed):
        model = make()
        samba.from_torch_model_(model)
        optimizers = _optimizers(model, samba.optim.SGD)
        pefs[make] = compiled((model, optimizers), inputs, tmp_path, make.__name__.lower())
    with pytest.raises(PefError, match="is of another model"):
        trace_graph(model, inputs, optimizers, pef=pefs[Net])
    trace_graph(model, inputs, optimizers, pef=pefs[_renamed])
