"""Weights that host and device do not exchange, in one process."""

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap

from sambasim import samba
from sambasim.samba import context
from sambasim.samba.checks import unfetched
from sambasim.samba.checks.findings import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import BATCH, Whole, loaded_linear


def test_what_the_host_predicts_with_weights_that_were_not_fetched_is_found_once(
    linear_pef: str, reporter: Reporter
) -> None:
    model = loaded_linear(linear_pef)[0].eval()
    model(*BATCH)
    assert not reporter.findings
    session.run(BATCH)
    for _ in range(2):
        model(*BATCH)
    (finding,) = reporter.findings
    assert finding.words == (
        "AP06: the app computes with the weights on the host, and the device has trained for 1 step since"
    )
    assert "model(*BATCH)" in str(finding.where)


def test_weights_that_the_app_has_loaded_are_its_own(linear_pef: str, reporter: Reporter) -> None:
    model = loaded_linear(linear_pef)[0].eval()
    session.run(BATCH)
    session.to_cpu(model)
    best = copy.deepcopy(model.state_dict())
    session.run(BATCH)
    model.load_state_dict(best)
    model(*BATCH)
    model.state_dict()
    assert not reporter.findings
    session.to_cpu(model)
    session.run(BATCH)
    model.state_dict()
    assert len(reporter.findings) == 1


def test_a_checkpoint_of_weights_that_were_not_fetched_is_found_once(linear_pef: str, reporter: Reporter) -> None:
    model = loaded_linear(linear_pef)[0]
    for _ in range(3):
        session.run(BATCH)
    for _ in range(2):
        model.state_dict()
    (finding,) = reporter.findings
    assert finding.words == (
        "AP06: the app reads the weights on the host, and the device has trained for 3 steps since"
    )
    assert "model.state_dict()" in str(finding.where)
    assert finding.remedy == "samba.session.to_cpu(model) before it"


def _before_a_step(model: nn.Module) -> None:
    model.state_dict()


def _fetched(model: nn.Module) -> None:
    session.run(BATCH)
    session.to_cpu(model)
    model.state_dict()


def _forward_alone(model: nn.Module) -> None:
    session.run(BATCH, section_types=["FWD", "BCKWD"])
    model.state_dict()


def _of_another_model(model: nn.Module) -> None:
    session.run(BATCH)
    copy.deepcopy(model).state_dict()
    model[0].state_dict()  # type: ignore[index]  # it is a Sequential


def _trained_on_the_host(model: nn.Module) -> None:
    session.run(BATCH)
    optimizer = session._loaded().machine.optimizers[0]
    model(*BATCH).mean().backward()
    optimizer.step()
    model.state_dict()


@pytest.mark.parametrize(
    "read",
    [_before_a_step, _fetched, _forward_alone, _of_another_model, _trained_on_the_host],
    ids=lambda one: one.__name__,
)
def test_what_is_no_older_than_the_device_is_no_finding(
    linear_pef: str, reporter: Reporter, read: Callable[[nn.Module], None]
) -> None:
    read(loaded_linear(linear_pef)[0])
    assert reporter.findings == ()


def test_a_model_that_is_traced_again_is_not_read_by_the_app(linear_pef: str, reporter: Reporter) -> None:
    model = loaded_linear(linear_pef)[0]
    session.run(BATCH)
    trace_graph(model, BATCH, samba.optim.SGD(model.parameters(), lr=0.1), pef=linear_pef)
    assert [finding.what.split()[0] for finding in reporter.findings] == ["trace_graph"]


@pytest.mark.parametrize(
    ("read", "how"),
    [
        (lambda model: model.eval().forward(*BATCH), "computes with"),
        (lambda model: model.eval().encoder(*BATCH), "computes with"),
        (lambda model: torch.no_grad()(model.head)(torch.ones(2, 4)), "computes with"),
        (lambda model: torch.save(model, io.BytesIO()), "saves"),
        (lambda model: torch.save({"epoch": 1, "model": model}, io.BytesIO()), "saves"),
        (lambda model: torch.save([nn.Sequential(model)], io.BytesIO()), "saves"),
        (lambda model: torch.save(model.head, io.BytesIO(), _use_new_zipfile_serialization=False), "saves"),
    ],
    ids=["forward", "encoder", "head", "save", "save-a-dict", "save-what-holds-it", "save-as-before"],
)
def test_parts_of_the_model_and_saving_it_are_seen(
    whole: Whole, reporter: Reporter, read: Callable[[Whole], object], how: str
) -> None:
    for _ in range(2):
        read(whole)
    (finding,) = reporter.findings
    assert finding.words == (
        f"AP06: the app {how} the weights on the host, and the device has trained for 2 steps since"
    )
    session.to_cpu(whole)
    read(whole)
    assert len(reporter.findings) == 1


def test_training_on_the_host_beside_a_frozen_part_is_no_finding(whole: Whole, reporter: Reporter) -> None:
    whole.encoder.eval()
    whole(*BATCH).mean().backward()
    assert reporter.findings == ()


def test_weights_of_the_host_are_looked_at_once_a_step(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    checks = session._loaded(whole).checks

    def host_is_as_exchanged() -> bool:
        looked.append(True)
        return False

    monkeypatch.setattr(checks._unfetched, "_host_is_as_exchanged", host_is_as_exchanged)
    whole.eval()
    for steps in (1, 2):
        for _ in range(3):
            whole(*BATCH)
        assert len(looked) == steps
        session.run(BATCH)


def test_what_sambasim_reads_the_app_does_not(whole: Whole, reporter: Reporter, tmp_path: Path) -> None:
    whole.eval()
    config = {"output_folder": str(tmp_path), "inference": True}
    session.compile(whole, BATCH, None, "predicts", config_dict=config)
    assert reporter.findings == ()
    whole(*BATCH)
    assert len(reporter.findings) == 1


def test_a_test_of_the_app_may_predict_on_the_host(
    whole: Whole, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.current(), "command", "test")
    whole.eval()(*BATCH)
    assert reporter.findings == ()


def _weights_that_do_not_fit(model: Whole) -> None:
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"foo": torch.ones(1)})


def _weights_of_a_part(model: Whole) -> None:
    model.head.load_state_dict(copy.deepcopy(model.head).state_dict())


@pytest.mark.parametrize("load", [_weights_that_do_not_fit, _weights_of_a_part], ids=lambda one: one.__name__)
def test_what_leaves_the_model_as_it_was_hides_nothing(
    whole: Whole, reporter: Reporter, load: Callable[[Whole], None]
) -> None:
    load(whole)
    whole.state_dict()
    assert len(reporter.findings) == 1


class Tuned(nn.Module):
    """Of its encoder, which is frozen, only the statistics of a batch norm are the device's to change."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        for frozen in (self.encoder, self.norm):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.head(self.norm(self.encoder(x)))
        return self.criterion(z, y), z


@pytest.fixture
def tuned(tmp_path: Path) -> tuple[Tuned, Tensor]:
    """Trained for a step, and the outputs of that."""
    model, batch = Tuned(), [torch.randn(4, 3), torch.tensor([0, 1, 0, 1])]
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.head.parameters(), lr=0.1)
    pef = session.compile(model, batch, optimizer, "tuned", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, batch, optimizer, pef=pef)
    outputs = session.run(batch)
    assert isinstance(outputs, tuple)
    return model, samba.to_torch(outputs[1])


def test_modules_that_the_device_leaves_as_they_are_are_no_finding(
    tuned: tuple[Tuned, Tensor], reporter: Reporter
) -> None:
    model, z = tuned
    with torch.no_grad():
        model.criterion(z, torch.tensor([0, 1, 0, 1]))
        model.encoder(torch.ones(4, 3))
    torch.save(model.encoder, io.BytesIO())
    torch.save({"criterion": model.criterion}, io.BytesIO())
    assert reporter.findings == ()


@pytest.mark.parametrize("name", ["head", "norm"])
def test_those_that_it_changes_are(tuned: tuple[Tuned, Tensor], reporter: Reporter, name: str) -> None:
    model, _ = tuned
    with torch.no_grad():
        model.get_submodule(name)(torch.ones(4, 4))
    torch.save(model.get_submodule(name), io.BytesIO())
    assert [finding.words.split(" the weights")[0] for finding in reporter.findings] == [
        "AP06: the app computes with",
        "AP06: the app saves",
    ]


def test_a_call_in_training_mode_is_found_once_no_backward_has_followed(whole: Whole, reporter: Reporter) -> None:
    whole(*BATCH)
    assert not reporter.findings, "a backward may follow"
    session.run(BATCH)
    (finding,) = reporter.findings
    assert finding.words == (
        "AP06: the app computes with the weights on the host, and the device has trained for 2 steps since"
    )
    assert str(finding.where).endswith(": whole(*BATCH)")


@pytest.mark.parametrize(
    "end", [lambda model: model.state_dict(), session.to_cpu, session.to_device, lambda _: unfetched._settle_all()]
)
def test_it_is_told_at_the_latest_when_weights_are_exchanged_or_the_app_ends(
    whole: Whole, reporter: Reporter, end: Callable[[nn.Module], object]
) -> None:
    whole(*BATCH)
    end(whole)
    assert "computes with" in reporter.findings[0].words


def _backward(model: nn.Module) -> None:
    model(*BATCH).mean().backward()


def _backward_and_step_of_its_own(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*BATCH).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _loading(model: nn.Module) -> None:
    model(*BATCH)
    model.load_state_dict(copy.deepcopy(model).state_dict())


@pytest.mark.parametrize(
    "train", [_backward, _backward_and_step_of_its_own, _loading], ids=lambda train: train.__name__
)
def test_a_call_that_begins_a_training_step_is_not(
    whole: Whole, reporter: Reporter, train: Callable[[nn.Module], None]
) -> None:
    train(whole)
    session.run(BATCH)
    assert reporter.findings == ()


def test_the_loss_of_the_first_step_may_be_compared_with_that_of_the_host(linear_pef: str, reporter: Reporter) -> None:
    model = loaded_linear(linear_pef)[0]
    session.run(BATCH)
    model(*BATCH)
    session.run(BATCH)
    assert reporter.findings == ()


(X,) = BATCH


ELSEWHERE = """
import sys
sys.modules["sambasim"] = None
import torch
print(torch.load(sys.argv[1], weights_only=False))
"""


def _hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) for module in model.modules()]


def test_a_pickle_is_read_where_there_is_no_sambasim(whole: Whole, tmp_path: Path) -> None:
    for number, saved in enumerate((whole.head, copy.deepcopy(whole.head), copy.copy(whole.encoder))):
        file = tmp_path / f"{number}.pt"
        torch.save(saved, file)
        read = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(file)], capture_output=True, text=True, timeout=120, check=False
        )
        assert (read.returncode, read.stdout.strip()) == (0, repr(saved)), read.stderr


def test_a_model_that_is_loaded_again_has_no_more_hooks(whole: Whole, whole_pef: str) -> None:
    expected = _hooks(whole)
    optimizer = samba.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        trace_graph(whole, BATCH, optimizer, pef=whole_pef)
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
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "compute",
    [_vmap, _jit_trace, _export, _compile],
    ids=lambda one: one.__name__,
)
def test_torch_transforms_a_model_that_the_device_is_ahead_of(
    whole: Whole, reporter: Reporter, compute: Callable[[nn.Module], Any], training: bool
) -> None:
    whole.train(training)
    expected = copy.deepcopy(whole)(X)
    assert torch.allclose(compute(whole), expected)
    session.run(BATCH)
    reporter._found.clear()
    session._loaded(whole).checks._unfetched._reported.clear()
    whole.eval()(X)
    assert len(reporter.findings) == 1, "the model is watched as before"


def test_other_weights_in_place_of_those_of_the_model_are_no_finding(whole: Whole, reporter: Reporter) -> None:
    whole.eval()
    mode = FakeTensorMode()
    for convert in (mode.from_tensor, lambda tensor: tensor.to("meta"), lambda tensor: 2 * tensor):
        others = {name: convert(one.detach()) for name, one in whole.named_parameters()}
        assert functional_call(whole, others, convert(X)).shape == (2, 1)
        session.run(BATCH)
    assert reporter.findings == ()


class Attending(nn.Module):
    """Encoder layers, for which torch has a fast path."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.encoder(x)
        return value


def test_encoder_layers_keep_their_fast_path(
    tmp_path: Path, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert len(reporter.findings) == 1, "and the encoder is watched"


def _train_on_host(model: nn.Module, optimizer: samba.optim.SGD) -> None:
    model(*BATCH).mean().backward()
    optimizer.step()


def test_backwards_without_an_optimizer_step_are_found_once(linear_pef: str, reporter: Reporter) -> None:
    model, optimizer = loaded_linear(linear_pef)
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
        optimizer.step()
        session.to_cpu(model)
    (finding,) = reporter.findings
    assert finding.words == "AP07: the device has run 1 backward and no optimizer step, so nothing is trained"
    assert "session.to_cpu(model)" in str(finding.where)


def test_they_are_found_without_a_fetch_after_many(linear_pef: str, reporter: Reporter) -> None:
    loaded_linear(linear_pef)
    for _ in range(256):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    assert [finding.code for finding in reporter.findings] == ["AP07"]


def test_what_the_host_has_trained_and_a_fetch_replaces_is_found(linear_pef: str, reporter: Reporter) -> None:
    model, optimizer = loaded_linear(linear_pef)
    _train_on_host(model, optimizer)
    session.to_cpu(model)
    (finding,) = reporter.findings
    assert finding.words.startswith(
        "AP07: to_cpu overwrites weights that the app has trained on the host, and the device"
    )


def test_what_is_trained_is_not(linear_pef: str, reporter: Reporter) -> None:
    model, optimizer = loaded_linear(linear_pef)
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    session.run(section_types=["OPT"])
    session.to_cpu(model)
    session.run(BATCH)
    _train_on_host(model, optimizer)  # beside the device
    session.to_cpu(model)
    session.run(BATCH, section_types=["FWD"])
    session.to_cpu(model)
    assert not reporter.findings
