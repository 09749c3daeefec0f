"""SambaFlow's names on models and parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.errors import DataError, ModelError
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.samba.nn.parameter import Parameter, SambaParameter


class LogReg(nn.Module):
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


def names(model: nn.Module) -> dict[str, str]:
    return {path: parameter.sn_name for path, parameter in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "convert", [samba.from_torch_model_, samba.from_torch_model, samba.from_torch_], ids=lambda f: f.__name__
)
def test_a_model_gets_its_names_in_place(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Linear(3, 2)
    assert convert(model) is model
    assert model.name == "linear"
    assert names(model) == {"weight": "linear__weight", "bias": "linear__bias"}


def test_a_prefix_goes_before() -> None:
    model = samba.from_torch_model_(nn.Linear(3, 2), parent_module_prefix="net")
    assert model.name == "net__linear"
    assert names(model) == {"weight": "net__linear__weight", "bias": "net__linear__bias"}


def test_the_names_are_those_of_the_symbols_in_the_pef() -> None:
    model = samba.from_torch_model_(LogReg())
    options = CompileOptions(
        model=ModelOptions(target="tests.samba.test_modules:LogReg"),
        optimizer=OptimizerOptions(name="sgd"),
        training=TrainingOptions(batch_size=4),
    )
    watch = Stopwatch(lambda phase: None)
    built = capture_model(model, {"x": torch.randn(4, 3)}, options, by_keyword=False, watch=watch)
    symbols = [symbol for symbol in built.program.symbols.values() if symbol.kind is SymbolKind.PARAMETER]
    assert names(model) == {symbol.torch_names[0]: symbol.name for symbol in symbols}
    assert len(symbols) == 6


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^this must be an nn\.Module, and it is of type Tensor") as caught:
        samba.from_torch_model_(torch.ones(2))  # type: ignore[type-var]
    assert caught.value.remedy == "samba.from_torch_tensor(tensor, name=…) for a tensor"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.name = nn.Linear(1, 1)


def test_a_model_whose_name_is_taken_is_refused() -> None:
    with pytest.raises(ModelError, match="the model Named has something called name"):
        samba.from_torch_model_(Named())


def test_nn_has_what_torch_nn_has() -> None:
    for name in (
        "Module",
        "Linear",
        "LSTM",
        "CrossEntropyLoss",
        "Sequential",
        "functional",
        "init",
        "utils",
        "Parameter",
    ):
        assert getattr(samba.nn, name) is getattr(nn, name)
    with pytest.raises(AttributeError, match=r"^sambasim\.samba\.nn has no Linaer; near it there is Linear, "):
        samba.nn.Linaer  # noqa: B018


def test_a_samba_parameter_is_a_parameter_with_a_name() -> None:
    data = samba.randn(3, name="data")
    parameter = SambaParameter(data, requires_grad=False, name="scale")
    assert type(parameter) is nn.Parameter is Parameter
    assert parameter.data_ptr() == data.data_ptr()
    assert not parameter.requires_grad
    assert parameter.sn_name == "scale"  # type: ignore[attr-defined]
    assert SambaParameter(torch.ones(2)).requires_grad


def test_every_parameter_is_a_samba_parameter() -> None:
    assert isinstance(nn.Linear(1, 1).weight, SambaParameter)
    assert not isinstance(torch.ones(1), SambaParameter)
    with pytest.raises(DataError, match="of type list"):
        SambaParameter([1.0])  # type: ignore[arg-type]
