"""Models: named, lazy, fused by directive, and run by themselves as in old apps."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.errors import ModelError
from sambasim.samba import notices
from tests.samba.api.conftest import BATCH, Net, imported, seeded_net


def test_a_model_is_named_in_place(samba: Any) -> None:
    for name_it in (samba.from_torch_model_, samba.from_torch_model, samba.from_torch_):
        linear = nn.Linear(3, 2)
        assert name_it(linear) is linear
        assert (linear.name, linear.weight.sn_name) == ("linear", "linear__weight")
    part = samba.from_torch_model_(nn.Linear(3, 2), parent_module_prefix="net")
    assert (part.name, part.bias.sn_name) == ("net__linear", "net__linear__bias")
    assert not hasattr(part, "run")


def test_a_lazy_model_gets_its_parameters_when_it_is_materialized(samba: Any) -> None:
    before = torch.random.get_rng_state()
    with samba.lazy_param():
        model = nn.Sequential(nn.Linear(4, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 4, bias=False))
    assert torch.equal(torch.random.get_rng_state(), before), "nothing was drawn"
    assert all(parameter.is_meta for parameter in model.parameters())
    samba.from_torch_model_(model)
    torch.manual_seed(5)
    assert imported("samba.materialize").materialize(model) is model
    torch.manual_seed(5)
    gold = nn.Sequential(nn.Linear(4, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 4, bias=False))
    assert all(torch.equal(value, gold.state_dict()[name]) for name, value in model.state_dict().items())
    assert model[0].weight.sn_name == "sequential__0__weight"
    assert model[0].weight.requires_grad


def test_shared_parameters_stay_shared_and_loaded_ones_stay(samba: Any) -> None:
    with samba.lazy_param():
        table, shared, last = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2)
        shared.weight = table.weight
    last.load_state_dict({"weight": torch.ones(2, 5), "bias": torch.zeros(2)}, assign=True)
    samba.materialize(nn.Sequential(table, shared, last))
    assert table.weight is shared.weight
    assert not table.weight.is_meta
    assert torch.equal(torch.ones(2, 5), last.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.LSTM(3, 4, num_layers=2),
    ],
    ids=["attention", "lstm"],
)
def test_a_layer_of_torch_begins_as_when_it_is_made(samba: Any, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    gold = make()
    with samba.lazy_param():
        model = make()
    torch.manual_seed(5)
    samba.materialize(model)
    assert all(torch.equal(value, gold.state_dict()[name]) for name, value in model.state_dict().items())
    if isinstance(model, nn.LSTM):
        assert torch.equal(model(torch.ones(2, 3))[0], gold(torch.ones(2, 3))[0])


def test_what_a_reset_leaves_unset_is_refused(samba: Any) -> None:
    class Masked(nn.Linear):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__(2, 3)
            self.register_buffer("mask", torch.ones(3))

    class Reset(Masked):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "mask"):
                self.mask.fill_(1)

    with samba.lazy_param():
        model, complete = nn.Sequential(Masked()), Reset()
    with pytest.raises(ModelError, match="0 is a Masked, whose reset_parameters does not set mask"):
        samba.materialize(model)
    assert torch.equal(samba.materialize(complete).mask, torch.ones(3))


def test_a_fusion_directive_changes_nothing_and_says_so(
    samba: Any, inputs: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(notices, "_SAID", set())
    op_fusion = imported("samba.directives").op_fusion

    class Fused(Net):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            with op_fusion("block", heuristic="any"):
                losses, outputs = super().forward(x, target)
            return self.doubled(self.same(losses)), outputs

        @op_fusion("block")  # type: ignore[untyped-decorator]  # apps give it to any function
        def doubled(self, losses: Tensor) -> Tensor:
            return losses * 2

        @op_fusion  # type: ignore[untyped-decorator]
        def same(self, losses: Tensor) -> Tensor:
            return losses

    torch.manual_seed(0)
    model = samba.from_torch_model_(Fused())
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    path = samba.session.compile(model, inputs, optimizer, name="fused", config_dict={"output_folder": str(tmp_path)})
    samba.utils.trace_graph(model, inputs, optimizer, pef=path)
    losses, _ = samba.session.run(inputs, section_types=["FWD"])
    assert torch.equal(losses.torch(), seeded_net()(*inputs)[0].torch() * 2)
    assert capsys.readouterr().err.count("notice: op_fusion has no effect: ") == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
        ("AdamW", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    ],
)
def test_an_optimizer_steps_on_the_device_as_torchs_does_on_the_host(
    samba: Any, inputs: tuple[Any, Any], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    model = samba.from_torch_model_(seeded_net())
    parts = (model.first, model.second)  # a list of optimizers, as apps of several have it
    optimizers = [getattr(samba.optim, name)(part.parameters(), max_grad_norm=0.05, **options) for part in parts]
    path = samba.session.compile(model, inputs, optimizers, name="net", config_dict={"output_folder": str(tmp_path)})
    samba.utils.trace_graph(model, inputs, optimizers, pef=path)
    for _ in range(3):
        samba.session.run(inputs)
    samba.session.to_cpu(model)
    gold = seeded_net()
    gold_optimizer = getattr(torch.optim, name)(gold.parameters(), **options)
    for _ in range(3):
        gold_optimizer.zero_grad()
        gold(*(tensor.torch() for tensor in inputs))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(gold.parameters(), 0.05)
        gold_optimizer.step()
    for found, expected in zip(model.parameters(), gold.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert inputs[0].shape[0] == BATCH
    first, second = optimizers
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    first.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
