"""AP06 and AP07: weights and gradients of the device that the app uses or overwrites without fetching them."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap

from sambasim import samba
from sambasim.samba import process
from sambasim.samba.process import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import BATCH, made_linear, train_on_host
from tests.samba.harness import Load, Made, PefOf, compiled, with_sgd

(X,) = BATCH


def _uses(reporter: Reporter) -> list[str]:
    return [finding.words.split(" the weights")[0].removeprefix("AP06: the app ") for finding in reporter.findings]


def _encoder_and_head() -> nn.Module:
    encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    return nn.Sequential(OrderedDict(encoder=encoder, head=nn.Linear(4, 1), flat=nn.Flatten(0)))


make_whole = partial(with_sgd, _encoder_and_head)


@pytest.fixture
def whole(load: Load) -> Any:
    """Loaded, and trained for two steps."""
    model = load(make_whole, BATCH)[0]
    for _ in range(2):
        session.run(BATCH)
    return model


def test_uses_of_old_weights_are_found_once(linear: Made, reporter: Reporter) -> None:
    model = linear[0].eval()
    model(*BATCH)
    assert not reporter.findings
    session.run(BATCH)
    for _ in range(2):
        model(*BATCH)
    session.run(BATCH)
    for _ in range(2):
        model.state_dict()
    assert [finding.words for finding in reporter.findings] == [
        f"AP06: the app {use} the weights on the host, and the device has trained for {steps} since"
        for use, steps in (("computes with", "1 step"), ("reads", "2 steps"))
    ]
    assert "model(*BATCH)" in str(reporter.findings[0].where)
    assert "model.state_dict()" in str(reporter.findings[1].where)
    assert reporter.findings[1].remedy == "samba.session.to_cpu(model) before it"


def test_weights_as_new_as_those_of_the_device_are_no_finding(linear: Made, reporter: Reporter) -> None:
    model, optimizer = linear
    model.eval().state_dict()
    session.run(BATCH, section_types=["FWD", "BCKWD"])
    model.state_dict()
    session.run(BATCH)
    copy.deepcopy(model).state_dict()  # another model
    session.to_cpu(model)
    best = copy.deepcopy(model.state_dict())
    session.run(BATCH)
    model.load_state_dict(best)
    model(*BATCH)
    model.state_dict()
    session.to_cpu(model)
    session.run(BATCH)
    model.train()[0].eval()
    train_on_host(model, optimizer)
    model.state_dict()
    assert reporter.findings == ()
    session.to_cpu(model)
    session.run(BATCH)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"foo": torch.ones(1)})
    model.state_dict()
    assert len(reporter.findings) == 1


def test_trace_graph_without_a_fetch_before_is_found(linear: Made, pef_of: PefOf, reporter: Reporter) -> None:
    model, optimizer = linear
    for fetches in (True, False):
        assert not reporter.findings
        session.run(BATCH)
        if fetches:
            session.to_cpu(model)
        trace_graph(model, BATCH, optimizer, pef=pef_of(made_linear, BATCH))
    assert [finding.words for finding in reporter.findings] == [
        "AP06: trace_graph loads the weights of the host, and the device has trained for 1 step since"
    ]


@pytest.mark.parametrize(
    ("read", "use"),
    [
        (lambda model: model.eval().forward(*BATCH), "computes with"),
        (lambda model: torch.no_grad()(model.head)(torch.ones(2, 4)), "computes with"),
        (lambda model: torch.save({"epoch": 1, "model": model}, io.BytesIO()), "saves"),
        (lambda model: torch.save([nn.Sequential(model)], io.BytesIO()), "saves"),
        (lambda model: torch.save(model.head, io.BytesIO(), _use_new_zipfile_serialization=False), "saves"),
    ],
    ids=["forward", "head", "save-a-dict", "save-what-holds-it", "save-legacy"],
)
def test_uses_of_parts_are_found(whole: Any, reporter: Reporter, read: Callable[[Any], object], use: str) -> None:
    for _ in range(2):
        read(whole)
    assert _uses(reporter) == [use]
    session.to_cpu(whole)
    read(whole)
    assert len(reporter.findings) == 1


def test_a_compile_or_a_test_of_the_app_is_no_finding(whole: Any, reporter: Reporter, tmp_path: Path) -> None:
    whole.eval()
    compiled((whole, None), BATCH, tmp_path, inference=True)
    process.current().command = "test"
    whole(*BATCH)
    process.current().command = None
    assert reporter.findings == ()
    whole(*BATCH)
    assert len(reporter.findings) == 1


class Tuned(nn.Module):
    """The first layer is frozen; the device changes the others, and the statistics of the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4).requires_grad_(False), nn.BatchNorm1d(4).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head, self.criterion = nn.Linear(4, 2), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(self.encoder(self.norm(self.first(x)).unsqueeze(1)).squeeze(1))
        return self.criterion(z, y), z


def test_only_modules_that_the_device_changes_are_watched(
    tmp_path: Path, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also encoder layers, for which torch keeps its fast path."""
    (model, optimizer), batch = with_sgd(Tuned), [torch.randn(4, 3), torch.tensor([0, 1, 0, 1])]
    trace_graph(model, batch, optimizer, pef=compiled((model, optimizer), batch, tmp_path))
    outputs = session.run(batch)
    assert isinstance(outputs, tuple)
    fast = Mock(wraps=torch._transformer_encoder_layer_fwd)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fast)
    with torch.no_grad():
        model.criterion(samba.to_torch(outputs[1]), batch[1])
        model.first(torch.ones(4, 3))
        torch.save({"first": model.first, "criterion": model.criterion}, io.BytesIO())
        assert reporter.findings == ()
        model.eval().encoder(torch.ones(2, 3, 4))
    assert fast.called
    torch.save(model.norm, io.BytesIO())
    assert _uses(reporter) == ["computes with", "saves"]


def test_a_saved_module_is_read_without_sambasim(whole: Any) -> None:
    for module in (whole.head, copy.deepcopy(whole.head), copy.copy(whole.encoder)):
        torch.save(module, file := io.BytesIO())
        assert b"sambasim" not in file.getvalue(), "no name of ours is pickled"
        file.seek(0)
        assert repr(torch.load(file, weights_only=False)) == repr(module)


def _hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) for module in model.modules()]


def test_a_model_that_is_loaded_again_has_no_more_hooks(whole: Any, pef_of: PefOf) -> None:
    expected, optimizer = _hooks(whole), samba.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        trace_graph(whole, BATCH, optimizer, pef=pef_of(make_whole, BATCH))
    assert _hooks(whole) == expected


def _vmap(model: nn.Module) -> Any:
    return vmap(lambda p: functional_call(model, p, X))({k: v[None] for k, v in model.named_parameters()})[0]


def _jit_trace(model: nn.Module) -> Any:
    trace: Any = torch.jit.trace
    traced, alone = (trace(one, X) for one in (model, copy.deepcopy(model)))
    assert str(traced.inlined_graph).count("aten::") == str(alone.inlined_graph).count("aten::")
    return traced(X)


def _export(model: nn.Module) -> Any:
    strict = torch.export.export(model, (X,), strict=True).module()(X)
    return strict + 0 * torch.export.export(model, (X,), strict=False).module()(X)


def _compile(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)(X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
@pytest.mark.parametrize("compute", [_vmap, _jit_trace, _export, _compile], ids=lambda one: one.__name__)
def test_torch_can_transform_a_watched_model(
    whole: Any, compute: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have imported samba.graph, whose hook torch.export does not follow.
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    expected, hooks = copy.deepcopy(whole)(X), _hooks(whole)
    for training in (True, False):
        whole.train(training)
        assert torch.allclose(compute(whole), expected)
    assert _hooks(whole) == hooks, "the model is watched as before"


def test_other_weights_in_place_of_those_of_the_model_are_no_finding(whole: Any, reporter: Reporter) -> None:
    whole.eval()
    mode = FakeTensorMode()
    for convert in (mode.from_tensor, lambda tensor: tensor.to("meta"), lambda tensor: 2 * tensor):
        others = {name: convert(one.detach()) for name, one in whole.named_parameters()}
        assert functional_call(whole, others, convert(X)).shape == (2,)
        session.run(BATCH)
    assert reporter.findings == ()


def test_backwards_without_an_optimizer_step_are_found_once(linear: Made, reporter: Reporter) -> None:
    model, optimizer = linear
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
        optimizer.step()
        session.to_cpu(model)
    (finding,) = reporter.findings
    assert finding.words == "AP07: the device has run 1 backward and no optimizer step, so nothing is trained"
    assert "session.to_cpu(model)" in str(finding.where)


def test_many_backwards_are_found_without_a_fetch(linear: Made, reporter: Reporter) -> None:
    for _ in range(256):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    assert [finding.code for finding in reporter.findings] == ["AP07"]


def test_a_fetch_that_overwrites_weights_trained_on_the_host_is_found(linear: Made, reporter: Reporter) -> None:
    model, optimizer = linear
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    session.run(section_types=["OPT"])
    session.to_cpu(model)
    session.run(BATCH)
    train_on_host(model, optimizer)  # beside the device
    session.to_cpu(model)
    assert not reporter.findings
    train_on_host(model, optimizer)
    session.to_cpu(model)
    (finding,) = reporter.findings
    words = "AP07: to_cpu overwrites weights that the app has trained on the host, and the device"
    assert finding.words.startswith(words)
