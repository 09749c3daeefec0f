"""Models, optimizers and tensors of apps: named, lazy, in bfloat16, of each kind of output, and trained as by torch."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, ModelError, WeightsError
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.samba import SambaTensor
from sambasim.samba.nn import SambaParameter
from sambasim.samba.session import session
from tests.samba.harness import (
    BATCH,
    FEATURES,
    MOMENTUM,
    LogReg,
    Net,
    Plainly,
    batch_of,
    compiled,
    equal,
    imported,
    layer_batch,
    net_batch,
    refused,
    same_weights,
    seeded,
    with_sgd,
)

pytestmark = pytest.mark.usefixtures("app")


@pytest.mark.parametrize("make", [LogReg, lambda: LogReg().bfloat16()], ids=["after", "before"])
def test_a_model_is_in_bfloat16_after_from_torch_model_or_before(make: Any, tmp_path: Path) -> None:
    (model, optimizer), batch = with_sgd(make), batch_of()
    model.bfloat16()
    gold = copy.deepcopy(model)(samba.to_torch(batch[0]).bfloat16(), samba.to_torch(batch[1]))
    samba.utils.trace_graph(model, batch, optimizer, pef=compiled((model, optimizer), batch, tmp_path))
    before = copy.deepcopy(model)
    loss, outputs = session.run(batch, model.output_tensors)
    session.to_cpu(model)
    assert outputs.dtype is torch.bfloat16
    assert equal(outputs, gold[1])
    samba.utils.assert_close(loss.float(), gold[0], "loss", threshold=3e-3)
    assert not same_weights(model, before)


def test_what_apps_write_in_a_model_trains_as_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of samba.nn, without a conversion; operators of samba on the tensors of a forward; a constant matrix as a
    plain attribute; directives; and the model can ask whether it is traced."""
    sn, op_fusion = samba.nn, imported("samba.directives").op_fusion

    class Old(sn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.relu, self.criterion = sn.Linear(8, 64), sn.ReLU(inplace=True), sn.CrossEntropyLoss()
            self.table = samba.from_torch_tensor(torch.eye(FEATURES).bfloat16(), name="table")

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mixed = torch.matmul(x, self.table.float())
            half = samba.mul(samba.sigmoid(mixed), 0.5) + samba.div(mixed, 2.0)
            both = samba.cat((half[:, :4], half[:, 4:]), dim=1)
            with op_fusion("block", heuristic="any"):
                both = samba.log(samba.sigmoid(both)) + samba.triu_fill(both[:, :BATCH], 0.0).sum()
            weight, bias = self.layer.weight, self.layer.bias
            out = samba.addmm(input=bias, mat1=both, mat2=weight, beta=1, alpha=1, out=None, is_transposed=True)
            out = self.relu(samba.from_torch(samba.to_torch(out)))  # to torch, and back inside of forward
            out.host_memory = True  # an attribute of SambaFlow's
            return self.criterion(out, y), out, self.doubled(self.same(out))

        @op_fusion("block")  # type: ignore[untyped-decorator]  # apps give it to any function
        def doubled(self, out: Tensor) -> Tensor:
            return out * (2 if session.tracing else 1)

        @op_fusion  # type: ignore[untyped-decorator]  # apps give it to any function
        def same(self, out: Tensor) -> Tensor:
            return out

    model, batch = seeded(Old), batch_of()
    made = model, samba.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
    plainly = Plainly(model)
    batch[0].host_memory = False
    samba.utils.trace_graph(model, batch, made[1], pef=compiled(made, batch, tmp_path))
    loss, out, doubled = session.run(input_tensors=batch, output_tensors=model.output_tensors)
    assert not session.tracing
    assert all(map(equal, (loss, out, doubled / 2), plainly.step(batch)))
    session.to_cpu(model)
    assert same_weights(model, plainly.model)
    assert capsys.readouterr().err.count("notice: op_fusion has no effect: ") == 1


def test_what_samba_nn_has() -> None:
    for name in ("functional", "init", "Parameter"):
        assert getattr(samba.nn, name) is getattr(nn, name)


def optimizers_of(model: Net, library: Any, **options: float) -> list[Any]:
    """One of each kind."""
    return [
        library.SGD(model.first.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, **options),
        library.Adam([model.second.weight], lr=0.01, weight_decay=0.01, **options),
        library.AdamW([model.second.bias], lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, **options),
    ]


def test_an_optimizer_steps_on_the_device_as_torchs_does_on_the_host(tmp_path: Path) -> None:
    model, gold, inputs = samba.from_torch_model_(seeded(Net)), seeded(Net), net_batch()
    optimizers = optimizers_of(model, samba.optim, max_grad_norm=0.05)
    samba.utils.trace_graph(model, inputs, optimizers, pef=compiled((model, optimizers), inputs, tmp_path))
    gold_optimizers = optimizers_of(gold, torch.optim)
    for _ in range(3):
        session.run(inputs)
        gold.zero_grad()
        gold(*map(samba.to_torch, inputs))[0].mean().backward()
        torch.nn.utils.clip_grad_norm_(gold.parameters(), 0.05)
        for optimizer in gold_optimizers:
            optimizer.step()
    session.to_cpu(model)
    torch.testing.assert_close(model.state_dict(), gold.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_model_is_named_in_place() -> None:
    names: tuple[Any, ...] = (samba.from_torch_model_, samba.from_torch_model, samba.from_torch_)
    for name_it in names:
        linear: Any = nn.Linear(3, 2)
        assert name_it(linear) is linear
        assert (linear.name, linear.weight.sn_name) == ("linear", "linear__weight")
    part: Any = samba.from_torch_model_(nn.Linear(3, 2), parent_module_prefix="net")
    assert (part.name, part.bias.sn_name) == ("net__linear", "net__linear__bias")
    assert not hasattr(part, "run")
    with refused(ModelError, r"^an nn\.Module is needed, not Tensor", r"^samba\.from_torch_tensor\(tensor, name=…\)$"):
        name_it(torch.ones(2))


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
    samba.utils.weight_norm_(made[0].lin_layer)
    names = names_in(samba.from_torch_model_(made[0]))
    assert names["lin_layer.parametrizations.weight.original0"] == "colliding__lin_layer__weight_magnitude"
    assert names["lin_layer.parametrizations.weight.original1"] == "colliding__lin_layer__weight_direction"
    normed = names_in(samba.from_torch_model_(samba.utils.weight_norm_(nn.Linear(2, 2))))
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
    with samba.lazy_param(quantized=True):
        model.table = SambaParameter(shape=(2,), materializer=lambda: values)
    assert samba.from_torch_model_(model).table.is_meta
    with samba.materialize(model) as same:  # type: ignore[attr-defined]  # every model has it then
        assert same is model
    assert torch.equal(model.table, values)
    assert names_in(model) == {"table": "module__table"}


class Filler:
    """A materializer that is an object."""

    def __call__(self, tensor: Any) -> None:
        tensor.copy_(VALUES)

    def method(self, tensor: Any, scale: float = 1.0) -> Any:
        return tensor.torch().data.copy_(VALUES * scale)

    def alone(self) -> Tensor:
        return VALUES.clone()


VALUES = torch.arange(6.0).reshape(3, 2)
MATERIALIZERS: dict[str, Any] = {
    "fills and returns": lambda this: this.copy_(VALUES),
    "fills": lambda this: this.copy_(VALUES) is None or None,
    "fills its data": lambda this: this.data.copy_(VALUES) is None or None,
    "assigns its data": lambda this: setattr(this, "data", VALUES.clone()),
    "assigns sn_data": lambda this: setattr(this, "sn_data", VALUES),
    "adds to zeros": lambda this: this.add_(VALUES),
    "makes one alike": lambda this: torch.zeros_like(this) + VALUES,
    "by nn.init": lambda this: nn.init.zeros_(this).add_(VALUES),
    "positional only": lambda this, /: VALUES.clone(),
    "any arguments": lambda *these: these[0].copy_(VALUES),
    "any arguments and keywords": lambda *these, **options: these[0].copy_(VALUES),
    "a default besides": lambda this, scale=1.0: this.copy_(VALUES * scale),
    "a bound default": lambda values=VALUES: values.clone(),
    "none": lambda: VALUES.clone(),
    "only keywords": lambda **options: VALUES.clone(),
    "an object": Filler(),
    "a method": Filler().method,
    "a method without": Filler().alone,
    "a method of a tensor": VALUES.clone,
    "partial": partial(Filler.method, Filler(), scale=1.0),
    "partial of torch": partial(torch.add, VALUES, 0),
    "complete partial": partial(lambda this, values: values.clone(), None, VALUES),
    "partial by keyword": partial(lambda this, values: this.copy_(values), values=VALUES),
}


@pytest.mark.parametrize("materializer", MATERIALIZERS.values(), ids=MATERIALIZERS)
def test_a_materializer_fills_a_tensor_or_returns_one(materializer: Any) -> None:
    given: Any = {"shape": (3, 2), "name": "table", "materializer": materializer}
    model: Any = nn.Module()
    with samba.lazy_param():
        model.table, model.shift = SambaParameter(**given), SambaParameter(**given, requires_grad=False)
        single, tensor = SambaParameter(**given), SambaTensor(**given)
    copied = copy.deepcopy(model)
    assert all(one.is_meta for one in (*model.parameters(), *copied.parameters(), single, tensor))
    lazy: Any
    for lazy in (model, copied, single, tensor):
        assert samba.materialize(lazy) is lazy
    parameters = (SambaParameter(**given), *model.parameters(), *copied.parameters(), single)
    for one in (*parameters, tensor, SambaTensor(**given)):
        assert equal(one, VALUES)
        assert one.sn_name == "table"
    assert all(type(one) is nn.Parameter and one.is_leaf for one in parameters)
    assert [one.requires_grad for one in (*model.parameters(), *copied.parameters(), single)] == [True, False] * 2 + [
        True
    ]


def test_a_materializer_that_cannot_be_is_refused() -> None:
    for materializer, what in (
        (lambda: None, "a tensor is needed, not NoneType"),
        (lambda this: [1.0], "a tensor is needed, not float"),
    ):
        with refused(DataError, what):
            SambaParameter(shape=(3, 2), materializer=materializer)  # type: ignore[arg-type]  # the mistake
        with samba.lazy_param():
            lazy = SambaParameter(shape=(3, 2), materializer=materializer)  # type: ignore[arg-type]  # the mistake
        with refused(DataError, what):
            samba.materialize(lazy)
    with pytest.raises(DataError, match="needs a tensor or a shape"):
        SambaParameter(materializer=lambda this: this)
    with samba.lazy_param():
        plain = nn.Parameter(torch.ones(2))
    with refused(WeightsError, "was made in lazy_param, and has no data"):
        samba.materialize(plain)


def test_a_parameter_is_a_samba_parameter_once_its_model_is_converted() -> None:
    model = nn.Linear(2, 2)
    model.scale = SambaParameter(torch.ones(2))
    converted = [isinstance(one, SambaParameter) for one in (model.weight, model.bias, model.scale, torch.ones(2))]
    assert converted == [False, False, True, False]
    samba.from_torch_model_(model)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(isinstance(parameter, SambaParameter) for parameter in one.parameters())
    assert names_in(copy.deepcopy(model)) == names_in(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 4, bias=False)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.Embedding(5, 3, padding_idx=1),
        lambda: nn.Sequential(type("Applied", (nn.Linear,), {"apply": nn.Linear.forward})(2, 3)),
    ],
    ids=["layers", "encoder", "lstm", "embedding", "a method named apply"],
)
def test_a_lazy_model_begins_as_when_it_is_made(make: Callable[[], nn.Module]) -> None:
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


def test_shared_parameters_stay_shared() -> None:
    with samba.lazy_param():
        table, shared = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        shared.weight = table.weight
    samba.materialize(nn.Sequential(table, shared))
    assert table.weight is shared.weight
    assert not table.weight.is_meta


def test_what_a_reset_fills_has_memory_of_its_type() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float32, torch.int64, torch.bool):
                self.register_buffer(str(dtype).replace(".", "_"), torch.empty(3, dtype=dtype))

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


def test_what_a_constructor_computes_has_its_values_in_lazy_param() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
            self.register_buffer("position_ids", torch.arange(4).expand(1, -1), persistent=False)
            waves = torch.zeros(4, 2)
            waves[:, 0] = torch.arange(4) / torch.ones(4)
            self.register_buffer("waves", waves)
            self.constant = samba.from_torch_tensor(torch.eye(2), name="constant")
            self.gamma, self.slopes = nn.Parameter(1e-4 * torch.ones(2)), nn.Parameter(waves)
            prior = torch.tensor([0.7, 0.3])
            self.prior = SambaParameter(shape=(2,), materializer=lambda this: this.copy_(prior))
            self.norm, self.out = nn.BatchNorm1d(2), nn.Linear(2, 2)

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.init.normal_(nn.Parameter(torch.zeros(1, 2)))

    gold, new = Block(), nn.Parameter.__new__
    with samba.lazy_param():
        model, token = Block(), Token()
    assert nn.Parameter.__new__ is new
    assert [model.prior.is_meta, model.out.weight.is_meta, model.norm.weight.is_meta, token.token.is_meta] == [True] * 4
    samba.materialize(model)
    values, expected = model.state_dict(), gold.state_dict()
    names = ("waves", "gamma", "slopes", "prior", "norm.running_var")
    assert all(equal(values[name], expected[name]) for name in names)
    assert (model.rates, model.constant.tolist()) == (gold.rates, [[1, 0], [0, 1]])
    with refused(ModelError, "Token is a lazy Token, which has no reset_parameters"):
        samba.materialize(token)  # its constructor draws, which is not repeated


def test_a_whole_resets_its_parts_after_they_have_begun_unless_some_are_loaded() -> None:
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
