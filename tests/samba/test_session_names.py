"""Names of the session, of parameters and of their gradients, as apps use them."""

import copy
import json
from pathlib import Path
from typing import Any

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
from tests.samba.harness import LogReg, Made, Plainly, batch_of, equal, parsed, refused, same_weights, seeded

RUNS = {
    "session.run(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h, **parallel)": 0.5,
    "session.run(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h)": 0.5,
    "session.run(input_tensors=[a, b], output_tensors=X, data_parallel=False, data_parallel_mode='normal')": 0.1,
    "session.run((a, b), X)": 0.1,
    "model.run([a, b], hyperparam_dict=h)": 0.5,
    "model.run(a, b)": 0.1,
    "model.run([a, b])": 0.1,
}
"""Call shapes of the census, and the learning rate of each."""


@pytest.mark.parametrize("call", RUNS)
def test_a_whole_step(call: str, samba: Any, logreg: Made, logreg_pef: str) -> None:
    args = parsed("run", f"--pef={logreg_pef}")
    model, _ = logreg
    plainly = Plainly(model)
    for number in range(2):
        a, b = batch_of(samba, number)
        parallel = {"data_parallel": args.data_parallel, "reduce_on_rdu": args.reduce_on_rdu}
        names = {"a": a, "b": b, "X": model.output_tensors, "h": {"lr": 0.5}, "parallel": parallel}
        outputs = eval(call, {"session": samba.session, "model": model, **names})
        assert all(map(equal, outputs, plainly.step((a, b), lr=RUNS[call])))
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


@pytest.mark.parametrize("method", ["session.to_cpu", "model.cpu", "model.write_host_params"])
def test_weights_come_to_the_host(method: str, samba: Any, batch: list[Any], logreg: Made) -> None:
    model, optimizer = logreg
    plainly = Plainly(model)
    samba.session.run(batch, model.output_tensors)
    plainly.step(batch)
    if method == "session.to_cpu":
        samba.session.to_cpu(model, [optimizer])
    else:
        getattr(model, method.partition(".")[2])()
    assert same_weights(model, plainly.model)


def test_session_setup_and_reset(samba: Any, batch: list[Any]) -> None:
    cfg = parsed("compile", "--pef-name=by_setup", "--output-folder=pefs")
    samba.session.setup(cfg)
    model = samba.from_torch_model_(seeded(LogReg))
    pef = samba.session.compile(model, batch, samba.optim.SGD(model.parameters(), lr=0.1), name="net")
    assert pef.endswith("pefs/by_setup/by_setup.pef")
    samba.session.setup(vars(cfg))
    samba.session.reset()
    with refused("no PEF is loaded"):
        samba.session.run(batch)


WITHOUT_EFFECT = [
    *(f"session.{name}" for name in ("enable_pinned_memory", "disable_graphamp", "use_static_functional")),
    *(f"env.{name}" for name in ("enable_conv_grad_accum_stoc", "enable_addbias_grad_accum_stoc", "disable_sgd_stoc")),
    *(f"utils.{name}" for name in ("fix_rdu_affinity", "create_mac_resource_report")),
]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_names_without_an_effect(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    owner, _, function = name.partition(".")
    getattr(getattr(samba, owner), function)()
    assert f"{name} has no effect" in capsys.readouterr().err


def test_patched_torch_and_is_internal(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, _ = logreg
    with samba.patched_torch():
        gold = model(*map(samba.to_torch, batch))
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])
    args = parsed("compile")
    assert samba.is_internal() is False
    assert not (samba.is_internal() and args.resource_report_path)


def test_sn_grad_of_parameters_and_inputs(samba: Any) -> None:
    model = samba.from_torch_model_(seeded(LogReg))
    inputs = batch_of(samba)
    inputs[0].requires_grad = True
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    samba.utils.trace_graph(model, inputs, optimizer, pef=samba.session.compile(model, inputs, optimizer, name="net"))
    gold = copy.deepcopy(model)
    image = samba.to_torch(inputs[0]).detach().requires_grad_()
    gold(image, samba.to_torch(inputs[1]))[0].mean().backward()
    samba.session.run(inputs, model.output_tensors, section_types=["fwd", "bckwd"])
    for (name, param), gold_param in zip(model.named_parameters(), gold.parameters(), strict=True):
        samba.utils.assert_close(param.sn_grad, gold_param.grad, f"{name}__grad", threshold=1e-6)
        samba.utils.assert_close(param, gold_param, name, threshold=0.0)
        assert equal(param.sn_grad, gold_param.grad)
    assert equal(model.lin_layer.weight.sn_grad, gold.lin_layer.weight.grad)
    assert equal(inputs[0].sn_grad, image.grad)


def test_sn_data_of_weights_after_one_run(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, _ = logreg
    samba.session.run(batch, model.output_tensors)
    on_device = {name: param.sn_data for name, param in model.named_parameters()}
    assert not equal(on_device["lin_layer.weight"], model.lin_layer.weight)
    samba.session.to_cpu(model)
    assert equal(on_device["lin_layer.weight"], model.lin_layer.weight)


def test_profiles_of_a_session(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, _ = logreg
    for args, keywords in (((), {"filename": "profile.json"}), (("profile2.json",), {})):
        samba.session.start_samba_profile()
        samba.session.run(batch, model.output_tensors)
        samba.session.end_samba_profile(*args, **keywords)
    names = [event["name"] for event in json.loads(Path("profile2.json").read_text())]
    assert names.count("samba_profile") >= 2
    samba.session.start_runtime_profile()
    samba.session.end_runtime_profile("file.log")
    assert Path("file.log").is_file()


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
    return {path: parameter.sn_name for path, parameter in model.named_parameters()}  # type: ignore[attr-defined]  # samba sets it


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
        samba.from_torch_model_(torch.ones(2))  # type: ignore[type-var]  # the mistake
    assert caught.value.remedy == "samba.from_torch_tensor(tensor, name=…)"


def test_nn_has_what_torch_nn_has() -> None:
    for name in ("Module", "functional", "init", "Parameter"):
        assert getattr(samba.nn, name) is getattr(nn, name)
    with pytest.raises(AttributeError, match=r"^sambasim\.samba\.nn has no Linaer; similar names: Linear, "):
        samba.nn.Linaer  # noqa: B018  # the mistake


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
