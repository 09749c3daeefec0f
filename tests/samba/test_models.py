"""Models, optimizers and tensors of apps: named, lazy, in bfloat16, of each kind of output, and trained as by torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.samba.harness import (
    BATCH,
    CLASSES,
    FEATURES,
    MOMENTUM,
    Load,
    LogReg,
    Made,
    Net,
    OnlyOut,
    Plainly,
    batch_of,
    compiled,
    equal,
    imported,
    net_batch,
    refused,
    same_weights,
    seeded,
    with_sgd,
)


@pytest.mark.parametrize("order", ["from_torch_model_(model.bfloat16())", "from_torch_(model); model.bfloat16()"])
def test_a_model_in_bfloat16(order: str, samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    if order.startswith("from_torch_model_"):
        samba.from_torch_model_(model.bfloat16())
    else:
        samba.from_torch_(model)
        model.bfloat16()
    gold = copy.deepcopy(model)(samba.to_torch(batch[0]).bfloat16(), samba.to_torch(batch[1]))
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    samba.utils.trace_graph(model, batch, optimizer, pef=samba.session.compile(model, batch, optimizer, name="net"))
    before = copy.deepcopy(model)
    loss, outputs = samba.session.run(batch, model.output_tensors)
    samba.session.to_cpu(model)
    assert outputs.dtype is torch.bfloat16
    assert equal(outputs, gold[1])
    samba.utils.assert_close(loss.float(), gold[0], "loss", threshold=3e-3)
    assert not same_weights(model, before)


def test_methods_of_optimizers_around_a_run(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, optimizer = logreg
    plainly = Plainly(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
    optimizer.zero_grad()
    samba.session.run(batch, model.output_tensors)
    optimizer.step()
    optimizer.zero_grad()
    samba.session.to_cpu(model, optimizer)
    plainly.step(batch)
    assert same_weights(model, plainly.model)
    assert scheduler.get_last_lr() == [0.1]
    state = optimizer.state_dict()
    assert equal(state["state"][0]["momentum_buffer"], plainly.optimizer.state_dict()["state"][0]["momentum_buffer"])
    again = samba.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.1


def _trains_as_torch(samba: Any, model: Any, batch: list[Any]) -> bool:
    plainly = Plainly(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samba.utils.trace_graph(model, batch, optimizer, pef=samba.session.compile(model, batch, optimizer, name="net"))
    outputs = samba.session.run(input_tensors=batch, output_tensors=model.output_tensors)
    expected = plainly.step(batch)
    samba.session.to_cpu(model)
    return same_weights(model, plainly.model) and all(map(equal, outputs, expected))


class Three(LogReg):
    """(loss, out, third)."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        loss, out = super().forward(inputs, targets)
        return loss, out, out.softmax(1)


class HostMemory(LogReg):
    """It assigns an attribute of SambaFlow's in its forward."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        loss, out = super().forward(inputs, targets)
        out.host_memory = True
        return loss, out


@pytest.mark.parametrize("model", [Three, HostMemory])
def test_a_model_trains_as_in_torch(model: type[Any], samba: Any, batch: list[Any]) -> None:
    batch[0].host_memory = False
    assert _trains_as_torch(samba, samba.from_torch_model_(seeded(model)), batch)


def test_a_subclass_of_samba_nn_without_a_conversion(samba: Any, batch: list[Any]) -> None:
    sn = samba.nn

    class Old(sn.Module):  # type: ignore[misc, name-defined]  # it is Any here
        def __init__(self) -> None:
            super().__init__()
            self.layers = sn.Sequential(sn.Linear(FEATURES, CLASSES), sn.ReLU(inplace=True))
            self.criterion = sn.CrossEntropyLoss()

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = self.layers(x)
            return self.criterion(out, y), out

    assert _trains_as_torch(samba, seeded(Old), batch)


class Tuple1(OnlyOut):
    """(out,)."""

    def forward(self, inputs: Tensor) -> Any:
        return (super().forward(inputs),)


@pytest.mark.parametrize("model", [OnlyOut, Tuple1], ids=["out", "(out,)"])
def test_a_model_that_returns_out_alone(model: type[Any], samba: Any, batch: list[Any]) -> None:
    made = samba.from_torch_model_(seeded(model))
    plainly = Plainly(made)
    optimizer = samba.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    pef = samba.session.compile(made, batch[:1], optimizer, name="net")
    samba.utils.trace_graph(made, batch[:1], optimizer, pef=pef)
    (out,) = samba.session.run(batch[:1], made.output_tensors, section_types=["fwd"])
    gradient = torch.ones(out.shape) / out.numel()
    samba.session.run(batch[:1], made.output_tensors, section_types=["bckwd", "opt"], grad_of_outputs=[gradient])
    samba.session.to_cpu(made)
    assert equal(out, plainly.step(batch[:1], gradient)[0])
    assert same_weights(made, plainly.model)


def test_a_criterion_on_the_wrong_shape_is_refused(samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    images = samba.randn(4, FEATURES + 1, name="image", batch_dim=0)
    with refused("mat1 and mat2", "self.lin_layer(inputs)"):
        samba.session.compile(model, [images, batch[1]], samba.optim.SGD(model.parameters(), lr=0.1), name="net")


def _only_out() -> Made:
    return with_sgd(OnlyOut, momentum=MOMENTUM)


@pytest.mark.parametrize("way", ["output.sn_grad = output.grad", "ctx.set_tensors", "grad_of_outputs"])
def test_the_loss_is_computed_on_the_host(way: str, samba: Any, batch: list[Any], load: Load) -> None:
    model, _ = load(_only_out, batch[:1])
    plainly = Plainly(model)
    criterion = nn.CrossEntropyLoss()
    for number in range(2):
        image, label = batch_of(samba, number)
        labels, rest = samba.to_torch(label), {}
        output = samba.to_torch(samba.session.run([image], model.output_tensors, section_types=["fwd"])[0].float())
        output.requires_grad = True
        criterion(output, labels).backward()
        if way.startswith("output"):
            model.output_tensors[0].sn_grad = output.grad
        elif way == "ctx.set_tensors":
            name = f"{model.output_tensors[0].sn_name}__grad"
            samba.session.ctx.set_tensors({name: output.grad.numpy()})
        else:
            rest["grad_of_outputs"] = [samba.from_torch_tensor(output.grad)]
        samba.session.run(
            [image], model.output_tensors, section_types=["bckwd", "opt"], hyperparam_dict={"lr": 0.1}, **rest
        )
        gold = plainly.model(samba.to_torch(image))
        assert equal(output, gold)
        plainly.step([image], torch.autograd.grad(criterion(leaf := gold.detach().requires_grad_(), labels), leaf)[0])
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def _constants(samba: Any) -> Any:
    class Constants(nn.Module):
        """Operators of samba on the tensors of a forward, and a constant matrix as a plain attribute."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(FEATURES, CLASSES)
            self.table = samba.from_torch_tensor(torch.eye(FEATURES).bfloat16(), name="table")

        def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.matmul(image, self.table.float())
            half = samba.mul(samba.sigmoid(mixed), 0.5) + samba.div(mixed, 2.0)
            both = samba.cat((half[:, :4], half[:, 4:]), dim=1)
            both = samba.log(samba.sigmoid(both)) + samba.triu_fill(both[:, :BATCH], 0.0).sum()
            weight, bias = self.lin.weight, self.lin.bias
            out = samba.addmm(input=bias, mat1=both, mat2=weight, beta=1, alpha=1, out=None, is_transposed=True)
            out = samba.from_torch(samba.to_torch(out))  # to torch, and back inside of forward
            return nn.functional.cross_entropy(out, label), out

    return samba.from_torch_model_(seeded(Constants))


def test_operators_of_samba_are_mixed_with_those_of_torch(samba: Any, batch: list[Any]) -> None:
    model = _constants(samba)
    images, labels = map(samba.to_torch, batch)
    half = torch.sigmoid(images) * 0.5 + images / 2
    mixed = torch.log(torch.sigmoid(half)) + half[:, :BATCH].tril().sum()
    torch.testing.assert_close(model(images, labels)[1], torch.addmm(model.lin.bias, mixed, model.lin.weight.t()))
    assert _trains_as_torch(samba, model, batch)


def test_samba_loader(samba: Any, logreg: Made) -> None:
    images, labels = torch.randn(2 * BATCH, FEATURES), torch.randint(CLASSES, (2 * BATCH,))
    pairs = [(images[at : at + BATCH], labels[at : at + BATCH]) for at in (0, BATCH)]
    model, _ = logreg
    plainly = Plainly(model)
    batches = samba.sambaloader.SambaLoader(DataLoader(TensorDataset(images, labels), BATCH), ["image", "label"])
    assert len(batches) == 2
    for (image, label), pair in zip(batches, pairs, strict=True):
        _, out = samba.session.run(input_tensors=(image, label), output_tensors=model.output_tensors)
        assert equal(out, plainly.step(pair)[1])
        predicted = torch.max(out.data, 1)[1]
        assert label.size(0) == BATCH
        assert (predicted == label).sum() == (samba.to_torch(predicted) == pair[1]).sum()
        assert label.reshape(-1, 1).shape == (BATCH, 1)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


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
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.Embedding(5, 3, padding_idx=1),
    ],
    ids=["attention", "encoder", "lstm", "embedding"],
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_what_a_reset_leaves_unset_is_refused(samba: Any, dtype: torch.dtype) -> None:
    class Masked(nn.Linear):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__(2, 3)
            self.register_buffer("mask", torch.ones(3, dtype=dtype))

    class Reset(Masked):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "mask"):
                self.mask.fill_(1)

    with samba.lazy_param():
        complete = Reset()
    assert torch.equal(samba.materialize(complete).mask, torch.ones(3, dtype=dtype))


def test_a_fusion_directive_has_no_effect(samba: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op_fusion = imported("samba.directives").op_fusion

    class Fused(Net):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            with op_fusion("block", heuristic="any"):
                losses, outputs = super().forward(x, target)
            return self.doubled(self.same(losses)), outputs

        @op_fusion("block")  # type: ignore[untyped-decorator]  # apps give it to any function
        def doubled(self, losses: Tensor) -> Tensor:
            return losses * 2

        @op_fusion  # type: ignore[untyped-decorator]  # apps give it to any function
        def same(self, losses: Tensor) -> Tensor:
            return losses

    (model, optimizer), inputs = with_sgd(Fused), net_batch(samba)
    samba.utils.trace_graph(model, inputs, optimizer, pef=compiled((model, optimizer), inputs, tmp_path))
    losses, _ = samba.session.run(inputs, section_types=["FWD"])
    assert torch.equal(losses.torch(), seeded(Net)(*inputs)[0].torch() * 2)
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
    samba: Any, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    model, inputs = samba.from_torch_model_(seeded(Net)), net_batch(samba)
    parts = (model.first, model.second)  # a list of optimizers, as apps of several have it
    optimizers = [getattr(samba.optim, name)(part.parameters(), max_grad_norm=0.05, **options) for part in parts]
    samba.utils.trace_graph(model, inputs, optimizers, pef=compiled((model, optimizers), inputs, tmp_path))
    for _ in range(3):
        samba.session.run(inputs)
    samba.session.to_cpu(model)
    gold = seeded(Net)
    gold_optimizer = getattr(torch.optim, name)(gold.parameters(), **options)
    for _ in range(3):
        gold_optimizer.zero_grad()
        gold(*(tensor.torch() for tensor in inputs))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(gold.parameters(), 0.05)
        gold_optimizer.step()
    for found, expected in zip(model.parameters(), gold.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    first, second = optimizers
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    first.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_whole_resets_its_parts_after_they_have_begun_unless_some_are_loaded(samba: Any) -> None:
    class Zeros(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

    with samba.lazy_param():
        model, loaded = Zeros(), Zeros()
    assert all(bool((parameter == 0).all()) for parameter in samba.materialize(model).parameters())
    loaded.first.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, assign=True)
    samba.materialize(loaded)
    assert torch.equal(loaded.first.weight, torch.ones(2, 2))
