"""AP06 and AP07: weights that host and device do not exchange, in one process."""

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
from torch.func import functional_call, vmap

from sambasim import samba
from sambasim.samba import context
from sambasim.samba.checks import unfetched
from sambasim.samba.checks.findings import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import BATCH, Whole, loaded_linear

(X,) = BATCH


def _uses(reporter: Reporter) -> list[str]:
    """How the app uses the weights, by the findings."""
    return [finding.words.split(" the weights")[0].removeprefix("AP06: the app ") for finding in reporter.findings]


def _train_on_host(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(*BATCH).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_prediction_with_old_weights_is_found_once(linear_pef: str, reporter: Reporter) -> None:
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


def test_a_checkpoint_of_old_weights_is_found_once(linear_pef: str, reporter: Reporter) -> None:
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


def test_weights_that_the_app_has_loaded_are_no_finding(linear_pef: str, reporter: Reporter) -> None:
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
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"foo": torch.ones(1)})
    model.state_dict()
    assert len(reporter.findings) == 1


def test_weights_as_new_as_those_of_the_device_are_no_finding(linear_pef: str, reporter: Reporter) -> None:
    model, optimizer = loaded_linear(linear_pef)
    model.state_dict()
    session.run(BATCH, section_types=["FWD", "BCKWD"])
    model.state_dict()
    session.run(BATCH)
    copy.deepcopy(model).state_dict()  # another model
    session.to_cpu(model)
    model.state_dict()
    session.run(BATCH)
    _train_on_host(model, optimizer)
    model.state_dict()
    assert reporter.findings == ()


@pytest.mark.parametrize(
    ("read", "use"),
    [
        (lambda model: torch.no_grad()(model.head)(torch.ones(2, 4)), "computes with"),
        (lambda model: torch.save({"epoch": 1, "model": model}, io.BytesIO()), "saves"),
        (lambda model: torch.save(model.head, io.BytesIO(), _use_new_zipfile_serialization=False), "saves"),
    ],
    ids=["head", "save-a-dict", "save-legacy"],
)
def test_uses_of_parts_of_the_model_are_found(
    whole: Whole, reporter: Reporter, read: Callable[[Whole], object], use: str
) -> None:
    for _ in range(2):
        read(whole)
    assert _uses(reporter) == [use]
    session.to_cpu(whole)
    read(whole)
    assert len(reporter.findings) == 1


def test_a_compile_or_a_test_of_the_app_is_no_finding(
    whole: Whole, reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole.eval()
    session.compile(whole, BATCH, None, "net", config_dict={"output_folder": str(tmp_path), "inference": True})
    with monkeypatch.context() as patch:
        patch.setattr(context.current(), "command", "test")
        whole(*BATCH)
    assert reporter.findings == ()
    whole(*BATCH)
    assert len(reporter.findings) == 1


class Tuned(nn.Module):
    """The encoder is frozen; the device changes the head, and the statistics of the batch norm."""

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


def test_only_modules_that_the_device_changes_are_watched(tmp_path: Path, reporter: Reporter) -> None:
    model, batch = Tuned(), [torch.randn(4, 3), torch.tensor([0, 1, 0, 1])]
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.head.parameters(), lr=0.1)
    pef = session.compile(model, batch, optimizer, "tuned", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, batch, optimizer, pef=pef)
    outputs = session.run(batch)
    assert isinstance(outputs, tuple)
    with torch.no_grad():
        model.criterion(samba.to_torch(outputs[1]), batch[1])
        model.encoder(torch.ones(4, 3))
        torch.save({"encoder": model.encoder, "criterion": model.criterion}, io.BytesIO())
        assert reporter.findings == ()
        model.norm(torch.ones(4, 4))
    torch.save(model.head, io.BytesIO())
    assert _uses(reporter) == ["computes with", "saves"]


@pytest.mark.parametrize(
    "end",
    [
        lambda _: session.run(BATCH),
        session.to_cpu,
        lambda _: unfetched._settle_all(),
    ],
)
def test_a_call_in_training_mode_is_found_once_no_backward_has_followed(
    whole: Whole, reporter: Reporter, end: Callable[[nn.Module], object]
) -> None:
    whole(*BATCH)
    assert not reporter.findings, "a backward may follow"
    end(whole)
    finding = reporter.findings[0]
    assert finding.words == (
        "AP06: the app computes with the weights on the host, and the device has trained for 2 steps since"
    )
    assert str(finding.where).endswith(": whole(*BATCH)")


def _loads(model: nn.Module) -> None:
    model(*BATCH)
    model.load_state_dict(copy.deepcopy(model).state_dict())


@pytest.mark.parametrize("train", [lambda model: model(*BATCH).mean().backward(), _loads])
def test_a_call_that_starts_a_training_step_is_no_finding(
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


WITHOUT_SAMBASIM = """
import sys
sys.modules["sambasim"] = None
import torch
for path in sys.argv[1:]:
    print(torch.load(path, weights_only=False))
"""


def test_a_saved_module_is_read_without_sambasim(whole: Whole, tmp_path: Path) -> None:
    modules = (whole.head, copy.deepcopy(whole.head), copy.copy(whole.encoder))
    files = [str(tmp_path / f"{number}.pt") for number in range(3)]
    for file, module in zip(files, modules, strict=True):
        torch.save(module, file)
    read = subprocess.run(
        [sys.executable, "-c", WITHOUT_SAMBASIM, *files], capture_output=True, text=True, timeout=120, check=False
    )
    assert (read.returncode, read.stdout.strip()) == (0, "\n".join(map(repr, modules))), read.stderr


def _vmap(model: nn.Module) -> Any:
    return vmap(lambda p: functional_call(model, p, X))({k: v[None] for k, v in model.named_parameters()})[0]


def _compile(model: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("compute", [_vmap, _compile], ids=lambda one: one.__name__)
def test_torch_can_transform_a_watched_model(
    whole: Whole, reporter: Reporter, compute: Callable[[nn.Module], Any]
) -> None:
    expected = copy.deepcopy(whole)(X)
    for training in (True, False):
        whole.train(training)
        assert torch.allclose(compute(whole), expected)
    session.run(BATCH)
    reporter._found.clear()
    session._loaded(whole).checks._unfetched._reported.clear()
    whole(X)
    assert len(reporter.findings) == 1, "the model is watched as before"


def test_backwards_without_an_optimizer_step_are_found_once(linear_pef: str, reporter: Reporter) -> None:
    model, optimizer = loaded_linear(linear_pef)
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
        optimizer.step()
        session.to_cpu(model)
    (finding,) = reporter.findings
    assert finding.words == "AP07: the device has run 1 backward and no optimizer step, so nothing is trained"
    assert "session.to_cpu(model)" in str(finding.where)


def test_a_fetch_that_overwrites_weights_trained_on_the_host_is_found(linear_pef: str, reporter: Reporter) -> None:
    model, optimizer = loaded_linear(linear_pef)
    for _ in range(2):
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    session.run(section_types=["OPT"])
    session.to_cpu(model)
    session.run(BATCH)
    _train_on_host(model, optimizer)  # beside the device
    session.to_cpu(model)
    assert not reporter.findings
    _train_on_host(model, optimizer)
    session.to_cpu(model)
    (finding,) = reporter.findings
    assert finding.words.startswith(
        "AP07: to_cpu overwrites weights that the app has trained on the host, and the device"
    )
