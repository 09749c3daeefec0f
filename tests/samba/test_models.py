"""Models, optimizers and tensors of apps: named, lazy, in bfloat16, of each kind of output, and trained as by torch."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba as ours
from sambasim.errors import DataError, ModelError
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.samba.nn import SambaParameter
from sambasim.samba.session import session
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
    layer_batch,
    net_batch,
    same_weights,
    seeded,
    with_sgd,
)


def _traced(samba: Any, made: Made, batch: Any) -> Any:
    model, optimizer = made
    samba.utils.trace_graph(model, batch, optimizer, pef=samba.session.compile(model, batch, optimizer, name="net"))
    return model


@pytest.mark.parametrize("make", [LogReg, lambda: LogReg().bfloat16()], ids=["after", "before"])
def test_a_model_is_in_bfloat16_after_from_torch_model_or_before(make: Any, samba: Any, batch: list[Any]) -> None:
    model, optimizer = with_sgd(make)
    model.bfloat16()
    gold = copy.deepcopy(model)(samba.to_torch(batch[0]).bfloat16(), samba.to_torch(batch[1]))
    before = copy.deepcopy(_traced(samba, (model, optimizer), batch))
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
    _traced(samba, (model, samba.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)), batch)
    outputs = samba.session.run(input_tensors=batch, output_tensors=model.output_tensors)
    expected = plainly.step(batch)
    samba.session.to_cpu(model)
    return same_weights(model, plainly.model) and all(map(equal, outputs, expected))


def test_a_subclass_of_samba_nn_trains_without_a_conversion(samba: Any, batch: list[Any]) -> None:
    sn = samba.nn

    class Old(sn.Module):  # type: ignore[misc, name-defined]  # it is Any here
        def __init__(self) -> None:
            super().__init__()
            self.layers = sn.Sequential(sn.Linear(FEATURES, CLASSES), sn.ReLU(inplace=True))
            self.criterion = sn.CrossEntropyLoss()

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out = self.layers(x)
            out.host_memory = True  # an attribute of SambaFlow's
            return self.criterion(out, y), out, out.softmax(1)

    batch[0].host_memory = False
    assert _trains_as_torch(samba, seeded(Old), batch)
    for name in ("functional", "init", "Parameter"):
        assert getattr(ours.nn, name) is getattr(nn, name)
    with pytest.raises(AttributeError, match=r"^sambasim\.samba\.nn has no Linaer; similar names: Linear, "):
        ours.nn.Linaer  # noqa: B018  # the mistake


class Tuple1(OnlyOut):
    """(out,)."""

    def forward(self, inputs: Tensor) -> Any:
        return (super().forward(inputs),)


_only_out, _tuple1 = (partial(with_sgd, kind, momentum=MOMENTUM) for kind in (OnlyOut, Tuple1))


@pytest.mark.parametrize(
    ("make", "way"),
    [(_only_out, "output.sn_grad = output.grad"), (_only_out, "ctx.set_tensors"), (_tuple1, "grad_of_outputs")],
)
def test_the_loss_is_computed_on_the_host(make: Any, way: str, samba: Any, batch: list[Any], load: Load) -> None:
    model, _ = load(make, batch[:1])
    plainly = Plainly(model)
    criterion = nn.CrossEntropyLoss()
    for number in range(2):
        image, label = batch_of(samba, number)
        labels = samba.to_torch(label)
        options: dict[str, Any] = {"hyperparam_dict": {"lr": 0.1}}
        output = samba.to_torch(samba.session.run([image], model.output_tensors, section_types=["fwd"])[0].float())
        output.requires_grad = True
        criterion(output, labels).backward()
        if way.startswith("output"):
            model.output_tensors[0].sn_grad = output.grad
        elif way == "ctx.set_tensors":
            samba.session.ctx.set_tensors({f"{model.output_tensors[0].sn_name}__grad": output.grad.numpy()})
        else:
            options["grad_of_outputs"] = [samba.from_torch_tensor(output.grad)]
        samba.session.run([image], model.output_tensors, section_types=["bckwd", "opt"], **options)
        assert equal(output, plainly.step([image], output.grad)[0])
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


def test_a_fusion_directive_has_no_effect(samba: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a model can ask whether it is traced."""
    op_fusion = imported("samba.directives").op_fusion

    class Fused(Net):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            with op_fusion("block", heuristic="any"):
                losses, outputs = super().forward(x, target)
            return self.doubled(self.same(losses)) * (2 if session.tracing else 1), outputs

        @op_fusion("block")  # type: ignore[untyped-decorator]  # apps give it to any function
        def doubled(self, losses: Tensor) -> Tensor:
            return losses * 2

        @op_fusion  # type: ignore[untyped-decorator]  # apps give it to any function
        def same(self, losses: Tensor) -> Tensor:
            return losses

    made, inputs = with_sgd(Fused), net_batch(samba)
    samba.utils.trace_graph(made[0], inputs, made[1], pef=compiled(made, inputs, tmp_path))
    losses, _ = samba.session.run(inputs, section_types=["FWD"])
    assert not session.tracing
    assert torch.equal(losses.torch(), seeded(Net)(*inputs)[0].torch() * 4)
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
    gold = seeded(Net)
    gold_optimizer = getattr(torch.optim, name)(gold.parameters(), **options)
    for _ in range(3):
        samba.session.run(inputs)
        gold_optimizer.zero_grad()
        gold(*(tensor.torch() for tensor in inputs))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(gold.parameters(), 0.05)
        gold_optimizer.step()
    samba.session.to_cpu(model)
    torch.testing.assert_close(model.state_dict(), gold.state_dict(), rtol=1e-5, atol=1e-6)
    first, second = optimizers
    second.load_state_dict(copy.deepcopy(second.state_dict()))
    first.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_is_named_in_place(samba: Any) -> None:
    for name_it in (samba.from_torch_model_, samba.from_torch_model, samba.from_torch_):
        linear = nn.Linear(3, 2)
        assert name_it(linear) is linear
        assert (linear.name, linear.weight.sn_name) == ("linear", "linear__weight")
    part = samba.from_torch_model_(nn.Linear(3, 2), parent_module_prefix="net")
    assert (part.name, part.bias.sn_name) == ("net__linear", "net__linear__bias")
    assert not hasattr(part, "run")
    with pytest.raises(ModelError, match=r"^an nn\.Module is needed, not Tensor") as caught:
        samba.from_torch_model_(torch.ones(2))
    assert caught.value.remedy == "samba.from_torch_tensor(tensor, name=…)"


class Colliding(nn.Module):
    """Names that collide: with the loss, with a gradient, and by the way dots are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(6, 3)
        self.tied = self.lin_layer
        self.loss, self.a, self.a__grad, self.lin_layer__bias = (nn.Parameter(torch.ones(3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tied(x)
        return (y * self.loss * self.a * self.a__grad * self.lin_layer__bias).square().mean()


def names_in(model: nn.Module) -> dict[str, str]:
    return {path: parameter.sn_name for path, parameter in model.named_parameters()}  # type: ignore[attr-defined]  # samba sets it


def test_names_of_parameters_are_those_of_the_symbols_in_the_pef(tmp_path: Path) -> None:
    made = with_sgd(Colliding)
    symbols = read(Path(compiled(made, layer_batch(), tmp_path))).program.symbols.values()
    names = {symbol.torch_names[0]: symbol.name for symbol in symbols if symbol.kind is SymbolKind.PARAMETER}
    assert names_in(made[0]) == names
    assert len(names) == 6
    ours.utils.weight_norm_(made[0].lin_layer)
    names = names_in(ours.from_torch_model_(made[0]))
    assert names["lin_layer.parametrizations.weight.original0"] == "colliding__lin_layer__weight_magnitude"
    assert names["lin_layer.parametrizations.weight.original1"] == "colliding__lin_layer__weight_direction"
    normed = names_in(ours.from_torch_model_(ours.utils.weight_norm_(nn.Linear(2, 2))))
    assert "parametrizedlinear__weight_magnitude" in normed.values()


def test_a_samba_parameter_is_made_from_a_shape_or_by_a_function() -> None:
    scale = SambaParameter(shape=(2, 3), dtype=torch.bfloat16, requires_grad=False)
    assert (scale.tolist(), scale.dtype, scale.requires_grad) == ([[0] * 3] * 2, torch.bfloat16, False)
    made = SambaParameter(shape=(2,), dtype=torch.float64, materializer=lambda: torch.full((2,), 3.0))
    assert (made.tolist(), made.dtype, type(made)) == ([3, 3], torch.float64, nn.Parameter)
    with pytest.raises(DataError, match=r"the tensor has the shape \(3,\), and shape= is \(2,\)"):
        SambaParameter(shape=(2,), materializer=lambda: torch.ones(3))
    with pytest.raises(DataError, match="needs a tensor or a shape"):
        SambaParameter(requires_grad=True)
    values = torch.tensor([3.0, 4.0])
    model = nn.Module()
    with ours.lazy_param(quantized=True):
        model.table = SambaParameter(shape=(2,), materializer=lambda: values)
    assert ours.from_torch_model_(model).table.is_meta
    with ours.materialize(model) as same:  # type: ignore[attr-defined]  # every model has it then
        assert same is model
    assert torch.equal(model.table, values)
    assert names_in(model) == {"table": "module__table"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 4, bias=False)),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.Embedding(5, 3, padding_idx=1),
    ],
    ids=["layers", "attention", "encoder", "lstm", "embedding"],
)
def test_a_lazy_model_begins_as_when_it_is_made(samba: Any, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    gold = make()
    before = torch.random.get_rng_state()
    with samba.lazy_param():
        model = make()
    assert torch.equal(torch.random.get_rng_state(), before), "nothing was drawn"
    assert all(parameter.is_meta for parameter in model.parameters())
    names = names_in(samba.from_torch_model_(model))
    torch.manual_seed(5)
    assert imported("samba.materialize").materialize(model) is model
    assert all(torch.equal(value, gold.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert names_in(model) == names
    if isinstance(model, nn.LSTM):
        assert torch.equal(model(torch.ones(2, 3))[0], gold(torch.ones(2, 3))[0])


def test_shared_parameters_stay_shared_and_loaded_ones_stay(samba: Any) -> None:
    with samba.lazy_param():
        table, shared, last = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2)
        shared.weight = table.weight
    last.load_state_dict({"weight": torch.ones(2, 5), "bias": torch.zeros(2)}, assign=True)
    samba.materialize(nn.Sequential(table, shared, last))
    assert table.weight is shared.weight
    assert not table.weight.is_meta
    assert torch.equal(torch.ones(2, 5), last.weight)


def test_what_a_reset_fills_has_memory_of_its_type(samba: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float32, torch.int64, torch.bool):
                self.register_buffer(str(dtype).replace(".", "_"), torch.ones(3, dtype=dtype))

    class Reset(Masked):
        def reset_parameters(self) -> None:
            for buffer in self.buffers():
                buffer.fill_(1)

    with samba.lazy_param():
        model, without = Reset(), Masked()
    dtypes = {buffer.dtype for buffer in samba.materialize(model).buffers() if buffer.all()}
    assert dtypes == {torch.float32, torch.int64, torch.bool}
    with pytest.raises(ModelError, match="Masked is a lazy Masked, which has no reset_parameters"):
        samba.materialize(without)


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
