"""Names of parameters, lazy ones, and what is no model."""

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.errors import DataError, ModelError
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.samba.nn import SambaParameter


class Colliding(nn.Module):
    """Names that collide: with the loss, with a gradient, and by the way dots are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(3, 3)
        self.tied = self.lin_layer
        self.loss = nn.Parameter(torch.ones(3))
        self.a = nn.Parameter(torch.ones(3))
        self.a__grad = nn.Parameter(torch.ones(3))
        self.lin_layer__bias = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tied(x)
        return (y * self.loss * self.a * self.a__grad * self.lin_layer__bias).square().mean()


def names_in(model: nn.Module) -> dict[str, str]:
    return {path: parameter.sn_name for path, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def test_the_names_are_those_of_the_symbols_in_the_pef() -> None:
    model = samba.from_torch_model_(Colliding())
    options = CompileOptions(
        model=ModelOptions(target="tests.samba.test_models:Colliding"),
        optimizer=OptimizerOptions(name="sgd"),
        training=TrainingOptions(batch_size=4),
    )
    watch = Stopwatch(lambda phase: None)
    built = capture_model(model, Example({"x": torch.randn(4, 3)}), options, watch)
    symbols = [symbol for symbol in built.program.symbols.values() if symbol.kind is SymbolKind.PARAMETER]
    assert names_in(model) == {symbol.torch_names[0]: symbol.name for symbol in symbols}
    assert len(symbols) == 6


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^an nn\.Module is needed, not Tensor") as caught:
        samba.from_torch_model_(torch.ones(2))  # type: ignore[type-var]
    assert caught.value.remedy == "samba.from_torch_tensor(tensor, name=…) for a tensor"


def test_nn_has_what_torch_nn_has() -> None:
    for name in ("Module", "functional", "init", "Parameter"):
        assert getattr(samba.nn, name) is getattr(nn, name)
    with pytest.raises(AttributeError, match=r"^sambasim\.samba\.nn has no Linaer; similar names: Linear, "):
        samba.nn.Linaer  # noqa: B018


def test_a_samba_parameter_is_made_from_a_shape_or_by_a_function() -> None:
    scale = SambaParameter(shape=(2, 3), dtype=torch.bfloat16, requires_grad=False)
    assert (scale.tolist(), scale.dtype, scale.requires_grad) == ([[0] * 3] * 2, torch.bfloat16, False)
    made = SambaParameter(shape=(2,), dtype=torch.float64, materializer=lambda: torch.full((2,), 3.0))
    assert (made.tolist(), made.dtype, type(made)) == ([3, 3], torch.float64, nn.Parameter)
    with pytest.raises(DataError, match=r"the tensor has the shape \(3,\), and shape= is \(2,\)"):
        SambaParameter(shape=(2,), materializer=lambda: torch.ones(3))
    with pytest.raises(DataError, match="needs a tensor or a shape"):
        SambaParameter(requires_grad=True)


class Table(nn.Module):
    """A parameter whose values only its materializer knows."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.table = SambaParameter(shape=(2,), materializer=lambda: values)


def test_a_lazy_samba_parameter_gets_its_values_when_it_is_materialized() -> None:
    with samba.lazy_param(quantized=True):
        model = samba.from_torch_model_(Table(torch.tensor([3.0, 4.0], device="cpu")))
    assert model.table.is_meta
    with samba.materialize(model) as same:  # type: ignore[attr-defined]  # every model has it then
        assert same is model
    assert model.table.tolist() == [3, 4]
    assert names_in(model) == {"table": "table__table"}


def test_parts_of_a_normalized_weight_have_the_names_that_apps_ask_for() -> None:
    model = Colliding()
    samba.utils.weight_norm_(model.lin_layer)
    found = names_in(samba.from_torch_model_(model))
    assert found["lin_layer.parametrizations.weight.original0"] == "colliding__lin_layer__weight_magnitude"
    assert found["lin_layer.parametrizations.weight.original1"] == "colliding__lin_layer__weight_direction"
    assert set(names_in(samba.from_torch_model_(samba.utils.weight_norm_(nn.Linear(2, 2)))).values()) >= {
        "parametrizedlinear__weight_magnitude"
    }
