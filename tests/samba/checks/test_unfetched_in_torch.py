"""What watches a model on the host beside what torch makes of it: copies, pickles, transforms and traces."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from sambasim import samba
from sambasim.samba.checks import unfetched
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import BATCH, Whole

(X,) = BATCH

ELSEWHERE = """
import sys
sys.modules["sambasim"] = None
import torch
print(torch.load(sys.argv[1], weights_only=False))
"""


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    telling = Telling(on_demand=True)
    monkeypatch.setattr(unfetched, "telling", telling)
    return telling


def _hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) for module in model.modules()]


def _counted(*_: object) -> None:
    """A hook of the app's."""


def test_a_pickle_is_read_where_there_is_no_sambasim(whole: Whole, tmp_path: Path) -> None:
    for number, saved in enumerate((whole.head, copy.deepcopy(whole.head), copy.copy(whole.encoder))):
        file = tmp_path / f"{number}.pt"
        torch.save(saved, file)
        read = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(file)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (read.returncode, read.stdout.strip()) == (0, repr(saved)), read.stderr


def test_a_pickle_is_read_with_weights_only(whole: Whole, tmp_path: Path) -> None:
    torch.save(whole.head, tmp_path / "head.pt")
    with torch.serialization.safe_globals([nn.Linear]):
        head = torch.load(tmp_path / "head.pt", weights_only=True)
    assert torch.equal(head.weight, whole.head.weight)


def test_copies_keep_the_hooks_of_the_app_alone(whole: Whole) -> None:
    handle = whole.head.register_forward_pre_hook(_counted)
    for copied in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert list(copied.head._forward_pre_hooks.values()) == [_counted]
        assert sum(_hooks(copied)) == 1
        assert torch.equal(copied(X), whole(X))
    handle.remove()
    assert _hooks(whole) == [1, 1, 1, 0, 1], "those of the model stay: itself, encoder, two of it, head"


class Counting:
    """What an app mixes in to pickle its modules in its own way."""

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        return (Counting, ())


def test_what_an_app_mixes_in_to_pickle_by_is_asked_as_before(whole: Whole) -> None:
    assert whole is not None, "modules are watched"

    class Mixed(nn.Linear, Counting):
        pass

    assert type(copy.deepcopy(Mixed(1, 1))) is Counting


def test_a_model_that_is_loaded_again_has_no_more_hooks(whole: Whole, tmp_path: Path) -> None:
    expected = _hooks(whole)
    optimizer = samba.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        trace_graph(whole, BATCH, optimizer, pef=str(tmp_path / "whole" / "whole.pef"))
    assert _hooks(whole) == expected


def _vmap(model: nn.Module) -> Any:
    return vmap(lambda p: functional_call(model, p, X))({k: v[None] for k, v in model.named_parameters()})[0]


def _grad(model: nn.Module) -> Any:
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    assert grad(lambda p: functional_call(model, p, X).mean())(parameters).keys() == parameters.keys()
    return functional_call(model, parameters, X)


def _jvp(model: nn.Module) -> Any:
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    return jvp(lambda p: functional_call(model, p, X), (parameters,), (parameters,))[0]


def _make_fx(model: nn.Module) -> Any:
    graph = make_fx(model)(X)
    assert len(graph.graph.nodes) == len(make_fx(copy.deepcopy(model))(X).graph.nodes)
    return graph(X)


def _jit_trace(model: nn.Module) -> Any:
    trace: Any = torch.jit.trace
    traced, alone = (trace(one, X) for one in (model, copy.deepcopy(model)))
    assert str(traced.inlined_graph).count("aten::") == str(alone.inlined_graph).count("aten::")
    return traced(X)


def _script(model: nn.Module) -> Any:
    return torch.jit.script(model)(X) + 0 * torch.jit.script(nn.Sequential(model))(X)


def _export(model: nn.Module) -> Any:
    strict = torch.export.export(model, (X,), strict=True).module()(X)
    return strict + 0 * torch.export.export(model, (X,), strict=False).module()(X)


def _compile(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)(X)


def _symbolic_trace(model: nn.Module) -> Any:
    return torch.fx.symbolic_trace(model)(X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "compute",
    [_vmap, _grad, _jvp, _make_fx, _jit_trace, _script, _export, _compile, _symbolic_trace],
    ids=lambda one: one.__name__,
)
def test_torch_transforms_a_model_that_the_device_is_ahead_of(
    whole: Whole, telling: Telling, compute: Callable[[nn.Module], Any], training: bool
) -> None:
    whole.train(training)
    expected = copy.deepcopy(whole)(X)
    assert torch.allclose(compute(whole), expected)
    session.run(BATCH)
    telling._found.clear()
    session._loaded(whole).checks._unfetched._told.clear()
    whole.eval()(X)
    assert len(telling.findings) == 1, "the model is watched as before"


def test_other_weights_in_place_of_those_of_the_model_are_no_finding(whole: Whole, telling: Telling) -> None:
    whole.eval()
    mode = FakeTensorMode()
    for convert in (mode.from_tensor, lambda tensor: tensor.to("meta"), lambda tensor: 2 * tensor):
        others = {name: convert(one.detach()) for name, one in whole.named_parameters()}
        assert functional_call(whole, others, convert(X)).shape == (2, 1)
        session.run(BATCH)
    assert telling.findings == ()


class Attending(nn.Module):
    """Encoder layers, for which torch has a fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.encoder(x)
        return value


def test_encoder_layers_keep_their_fast_path(tmp_path: Path, telling: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Attending(), [torch.ones(2, 3, 4)]
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = session.compile(model, batch, optimizer, "attending", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, batch, optimizer, pef=pef)
    session.run(batch)
    fast: Any = torch._transformer_encoder_layer_fwd
    taken: list[object] = []

    def counted(*given: object, **keywords: object) -> object:
        taken.append(given)
        return fast(*given, **keywords)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    with torch.no_grad():
        model.eval().encoder(*batch)
    assert taken
    assert len(telling.findings) == 1, "and the encoder is watched"
