"""Names by identity: what is trained, saved and loaded has the names of the model's `state_dict()`, whatever
`named_parameters()` calls it. The eager loop is the oracle."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import sambasim as ss
from sambasim.errors import ModelError, WeightsError
from sambasim.ir.types import SymbolKind
from tests.api.conftest import IN_ORDER, SMALL, STEPS, X, compiled, eager, sgd, trained
from tests.support.whole import every_second

pytestmark = pytest.mark.usefixtures("one_thread")

Entries = dict[str, Any]


def wrapped(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


class Net(nn.Module):
    def __init__(self, a: nn.Module | None = None, b: nn.Module | None = None) -> None:
        super().__init__()
        self.a = a or nn.Linear(3, 4)
        self.b = b or nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def tied_net() -> Net:
    model = Net(nn.Linear(3, 3), nn.Linear(3, 3))
    model.b.weight = model.a.weight
    return model


class Remembering(nn.Linear):
    """Its buffer is the same however often a step computes it."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(self.weight.detach().sum(1))
        return super().forward(x)


class Counting(Net):
    """Has a buffer that is saved and changes, and one that is not saved."""

    steps: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__(wrapped(Remembering()), nn.Linear(3, 2))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        return self.b(torch.tanh(self.a(x)) * self.mask)


class Hiding(nn.Module):
    """Hides itself in the names that are saved, as many wrappers do, and takes no others when they are loaded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._register_state_dict_hook(_without_inner)  # type: ignore[no-untyped-call]  # torch's, untyped

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _without_inner(module: nn.Module, entries: Entries, prefix: str, _: object) -> None:
    for name in [name for name in entries if name.startswith(f"{prefix}inner.")]:
        entries[prefix + name.removeprefix(f"{prefix}inner.")] = entries.pop(name)


class Own(Net):
    """A `state_dict` without arguments, and what loads it."""

    def state_dict(self) -> Entries:  # type: ignore[override]  # on purpose
        return {f"net/{name}": value for name, value in super().state_dict().items()}

    def load_state_dict(self, given: Mapping[str, Any]) -> Any:  # type: ignore[override]  # on purpose
        return super().load_state_dict({name.removeprefix("net/"): value for name, value in given.items()})


class Extra(Net):
    def get_extra_state(self) -> object:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        if state != {"version": 1}:
            raise ValueError(state)


def hooked(model: nn.Module, change: Callable[[Entries], object]) -> nn.Module:
    def hook(module: nn.Module, entries: Entries, prefix: str, _: object) -> None:
        change(entries)

    model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # torch's, untyped
    return model


def _rename(entries: Entries) -> None:
    entries.update({f"old.{name}": entries.pop(name) for name in list(entries)})


def _swap(entries: Entries) -> None:
    other = {"a": "b", "b": "a"}
    entries.update({f"{other[name[0]]}{name[1:]}": value for name, value in dict(entries).items()})


def _shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(wrapped(layer), nn.Tanh(), layer, nn.Linear(3, 2))


def _partly_compiled() -> nn.Module:
    part = nn.Sequential(nn.Linear(3, 4))
    part.compile(backend="eager")
    model = Net(part)
    model.b = cast(nn.Module, torch.compile(nn.Sequential(nn.Linear(4, 2)), backend="eager"))
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "wrapper of the model": lambda: wrapped(Net()),
    "wrapper, frozen": lambda: Net(wrapped(nn.Linear(3, 4)).requires_grad_(False)),
    "wrapper": lambda: Net(wrapped(nn.Linear(3, 4))),
    "wrapper of a shared module": _shared,
    "wrapper of buffers": Counting,
    "weight_norm": lambda: Net(parametrizations.weight_norm(nn.Linear(3, 4))),
    "weight_norm of old": lambda: Net(nn.utils.weight_norm(nn.Linear(3, 4))),
    "orthogonal": lambda: Net(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2)),
    "spectral_norm": lambda: Net(parametrizations.spectral_norm(nn.Linear(3, 4))),
    "tied": tied_net,
    "tied, one name": lambda: hooked(tied_net(), lambda entries: entries.pop("b.weight")),
    "tied, the other name": lambda: hooked(tied_net(), lambda entries: entries.pop("a.weight")),
    "wrapper of one's own": lambda: Net(Hiding(nn.Linear(3, 4)), Hiding(nn.Linear(4, 2))),
    "hook that renames": lambda: hooked(Net(), _rename),
    "hook that detaches": lambda: hooked(
        Net(), lambda entries: entries.update({k: v.detach() for k, v in entries.items()})
    ),
    "hook that swaps": lambda: hooked(Net(nn.Linear(3, 3), nn.Linear(3, 3)), _swap),
    "state_dict of its own": Own,
    "hook that adds": lambda: hooked(Net(), lambda entries: entries.update(version=torch.tensor(3))),
    "extra state": Extra,
    "part in torch.compile": _partly_compiled,
}

TOLD = {"hook that adds": "version", "extra state": "_extra_state"}


def _made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def _by_path(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}/{name}": tensor
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


@pytest.mark.parametrize("name", every_second(MODELS))
def test_the_names_are_those_of_the_state_dict(name: str, tmp_path: Path) -> None:
    model, other = _made(name), _made(name)
    data = (torch.cat([X, X[:, :1]], 1) if name == "orthogonal" else X), SMALL[1]
    file = tmp_path / "w.safetensors"
    pef = compiled(tmp_path, model, data, loss="cross_entropy", optimizer=sgd(model))
    run = trained(pef, data, save=file, **IN_ORDER)
    assert run.losses == eager(other, sgd(other), [data] * STEPS)
    names = {name for name, value in other.state_dict().items() if isinstance(value, Tensor)} - {"version"}
    assert run.weights.keys() == pef.weights.keys() == load_file(file).keys() == names
    lost = [notice for notice in pef.notices if "in state_dict(), and no parameter or buffer" in notice]
    assert [TOLD.get(name, "?") in notice for notice in lost] == [True] * (name in TOLD)
    assert not any("without a gradient" in notice for notice in pef.notices)

    assert run.load_into(model) is model
    expected = _by_path(other)
    for path, tensor in _by_path(model).items():
        torch.testing.assert_close(tensor, expected[path], rtol=0, atol=1e-6 if name == "orthogonal" else 0)

    outputs = other.eval()(data[0])
    for weights in (run.weights, file, model):
        predicted = ss.predict(pef, data, weights=weights).outputs[-1]
        assert torch.allclose(predicted, outputs, rtol=0, atol=1e-6)
    if name in ("wrapper", "wrapper, frozen"):
        parameters = {s.name: s.torch_names for s in pef.program.symbols.values() if s.kind is SymbolKind.PARAMETER}
        both = ("weight", "bias")
        assert parameters == {f"net__{layer}__{part}": (f"{layer}.{part}",) for layer in "ab" for part in both}
        shown = str(pef.inspect(everything=True)).partition("compile options")[0]
        assert "_checkpoint_wrapped_module" not in shown


class Failing(Net):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise KeyError("version")


class Some(Net):
    def parameters(self, recurse: bool = True) -> Any:
        return self.b.parameters(recurse)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return self.b.named_parameters(*args, **options)


def _flatten(entries: Entries) -> None:
    entries.update({name.rpartition(".")[2]: entries.pop(name) for name in list(entries)})


NO_ENTRY = r"no entry of state_dict\(\) is the parameter"
REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "left out": (lambda: hooked(Net(), lambda entries: entries.pop("a.weight")), f"{NO_ENTRY} a.weight"),
    "a copy": (
        lambda: hooked(Net(), lambda all: all.update({"a.weight": all["a.weight"].clone()})),
        f"{NO_ENTRY} a.weight.*itself under a name, not a copy",
    ),
    "another shape": (lambda: hooked(Net(), lambda all: all.update({"a.weight": all["a.weight"].t()})), NO_ENTRY),
    "one name for two": (lambda: hooked(Net(nn.Linear(3, 3), nn.Linear(3, 2)), _flatten), f"{NO_ENTRY} a.weight"),
    "nested": (lambda: hooked(Net(), lambda all: all.update(all=dict(all), **dict.fromkeys(list(all)))), NO_ENTRY),
    "an error": (Failing, r"state_dict\(\) of the model fails: KeyError: 'version'\n  where: .*raise KeyError"),
    "parameters() of its own": (Some, r"parameters\(\) of the model leaves out a.weight, which requires a gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_without_a_name_is_refused(name: str, tmp_path: Path) -> None:
    make, says = REFUSED[name]
    with pytest.raises(ModelError, match=f"(?s){says}"):
        compiled(tmp_path, make(), SMALL, loss="cross_entropy")
    if name != "parameters() of its own":
        with pytest.raises(ModelError, match=f"(?s){says}"):
            compiled(tmp_path, make(), X, inference=True)
        return
    model = Some()  # frozen, as the remedy says
    model.a.requires_grad_(False)
    before = model.a.get_parameter("weight").detach().clone()
    run = trained(compiled(tmp_path, model, SMALL, loss="cross_entropy"), SMALL)
    assert torch.equal(run.weights["a.weight"], before)
    assert not torch.equal(run.weights["b.weight"], model.b.get_parameter("weight"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> ss.Pef:
    return compiled(tmp_path_factory.mktemp("tied"), _made("tied"), SMALL, loss="cross_entropy")


def test_of_tied_names_a_file_may_have_one(tied: ss.Pef, tmp_path: Path) -> None:
    given = {name: value + 1 for name, value in tied.weights.items()}
    expected = ss.predict(tied, SMALL, weights=given).outputs[-1]
    for left_out in ("a.weight", "b.weight"):
        file = tmp_path / "one.safetensors"
        save_file({name: value for name, value in given.items() if name != left_out}, file)
        assert torch.equal(ss.predict(tied, SMALL, weights=file).outputs[-1], expected)
    assert trained(tied, SMALL, weights=file, lr=0.0, steps=1).weights["a.weight"].equal(given["a.weight"])


def test_weights_that_lack_a_parameter_or_contradict_are_refused(tied: ss.Pef, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    whole = tied.weights
    for wrong, says in (
        ({name: value for name, value in whole.items() if name != "a.bias"}, "missing a.bias; not in the model noth"),
        ({name: value for name, value in whole.items() if "weight" not in name}, "missing a.weight; not in"),
        ({**whole, "b.weight": whole["b.weight"] + 1}, "a.weight and b.weight are one tensor of the model, and differ"),
        ({**whole, "c.weight": whole["a.weight"] + 1}, "missing nothing; not in the model c.weight"),
    ):
        save_file(wrong, file)
        for given in (wrong, file):
            with pytest.raises(WeightsError, match=says):
                ss.predict(tied, SMALL, weights=given)
        with pytest.raises(WeightsError, match=says):
            trained(tied, SMALL, weights=file)


def test_weights_go_into_the_model_that_was_compiled_only(tied: ss.Pef) -> None:
    run = trained(tied, SMALL, steps=1)
    for other, name in ((_made("tied, one name"), "b.weight"), (Net(), "a.weight")):
        with pytest.raises(WeightsError, match=f"do not fit the model: {name} is in one only, or of another shape"):
            run.load_into(other)
