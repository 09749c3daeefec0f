"""What the app reads on the host while the device is ahead, in one process."""

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba import context
from sambasim.samba.checks import unfetched
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.checks.conftest import BATCH, Whole


def _made() -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _made()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, BATCH, optimizer, "net", config_dict=config)


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    telling = Telling(on_demand=True)
    monkeypatch.setattr(unfetched, "telling", telling)
    return telling


def _loaded(pef: str) -> nn.Module:
    model, optimizer = _made()
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model


def test_what_the_host_predicts_with_weights_that_were_not_fetched_is_found_once(pef: str, telling: Telling) -> None:
    model = _loaded(pef).eval()
    model(*BATCH)
    assert not telling.findings
    session.run(BATCH)
    for _ in range(2):
        model(*BATCH)
    (finding,) = telling.findings
    assert finding.words == (
        "AP06: the app computes with the weights on the host, and the device has trained on for 1 step since"
    )
    assert "model(*BATCH)" in str(finding.where)


def test_weights_that_the_app_has_loaded_are_its_own(pef: str, telling: Telling) -> None:
    model = _loaded(pef).eval()
    session.run(BATCH)
    session.to_cpu(model)
    best = copy.deepcopy(model.state_dict())
    session.run(BATCH)
    model.load_state_dict(best)
    model(*BATCH)
    model.state_dict()
    assert not telling.findings
    session.to_cpu(model)
    session.run(BATCH)
    model.state_dict()
    assert len(telling.findings) == 1


def test_a_checkpoint_of_weights_that_were_not_fetched_is_found_once(pef: str, telling: Telling) -> None:
    model = _loaded(pef)
    for _ in range(3):
        session.run(BATCH)
    for _ in range(2):
        model.state_dict()
    (finding,) = telling.findings
    assert finding.words == (
        "AP06: the app reads the weights on the host, and the device has trained on for 3 steps since"
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
    pef: str, telling: Telling, read: Callable[[nn.Module], None]
) -> None:
    read(_loaded(pef))
    assert telling.findings == ()


def test_a_model_that_is_traced_again_is_not_read_by_the_app(pef: str, telling: Telling) -> None:
    model = _loaded(pef)
    session.run(BATCH)
    trace_graph(model, BATCH, samba.optim.SGD(model.parameters(), lr=0.1), pef=pef)
    assert telling.findings == ()


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
    whole: Whole, telling: Telling, read: Callable[[Whole], object], how: str
) -> None:
    for _ in range(2):
        read(whole)
    (finding,) = telling.findings
    assert finding.words == (
        f"AP06: the app {how} the weights on the host, and the device has trained on for 2 steps since"
    )
    session.to_cpu(whole)
    read(whole)
    assert len(telling.findings) == 1


def test_training_on_the_host_beside_a_frozen_part_is_no_finding(whole: Whole, telling: Telling) -> None:
    whole.encoder.eval()
    whole(*BATCH).mean().backward()
    assert telling.findings == ()


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


def test_what_sambasim_reads_the_app_does_not(whole: Whole, telling: Telling, tmp_path: Path) -> None:
    whole.eval()
    config = {"output_folder": str(tmp_path), "inference": True}
    session.compile(whole, BATCH, None, "predicts", config_dict=config)
    assert telling.findings == ()
    whole(*BATCH)
    assert len(telling.findings) == 1


def test_a_test_of_the_app_may_predict_on_the_host(
    whole: Whole, telling: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.current(), "command", "test")
    whole.eval()(*BATCH)
    assert telling.findings == ()


def _weights_that_do_not_fit(model: Whole) -> None:
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({"foo": torch.ones(1)})


def _weights_of_a_part(model: Whole) -> None:
    model.head.load_state_dict(copy.deepcopy(model.head).state_dict())


@pytest.mark.parametrize("load", [_weights_that_do_not_fit, _weights_of_a_part], ids=lambda one: one.__name__)
def test_what_leaves_the_model_as_it_was_hides_nothing(
    whole: Whole, telling: Telling, load: Callable[[Whole], None]
) -> None:
    load(whole)
    whole.state_dict()
    assert len(telling.findings) == 1


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
    tuned: tuple[Tuned, Tensor], telling: Telling
) -> None:
    model, z = tuned
    with torch.no_grad():
        model.criterion(z, torch.tensor([0, 1, 0, 1]))
        model.encoder(torch.ones(4, 3))
    torch.save(model.encoder, io.BytesIO())
    torch.save({"criterion": model.criterion}, io.BytesIO())
    assert telling.findings == ()


@pytest.mark.parametrize("name", ["head", "norm"])
def test_those_that_it_changes_are(tuned: tuple[Tuned, Tensor], telling: Telling, name: str) -> None:
    model, _ = tuned
    with torch.no_grad():
        model.get_submodule(name)(torch.ones(4, 4))
    torch.save(model.get_submodule(name), io.BytesIO())
    assert [finding.words.split(" the weights")[0] for finding in telling.findings] == [
        "AP06: the app computes with",
        "AP06: the app saves",
    ]


def test_a_call_in_training_mode_is_found_once_no_backward_has_followed(whole: Whole, telling: Telling) -> None:
    whole(*BATCH)
    assert not telling.findings, "a backward may follow"
    session.run(BATCH)
    (finding,) = telling.findings
    assert finding.words == (
        "AP06: the app computes with the weights on the host, and the device has trained on for 2 steps since"
    )
    assert str(finding.where).endswith(": whole(*BATCH)")


@pytest.mark.parametrize(
    "end", [lambda model: model.state_dict(), session.to_cpu, session.to_device, lambda _: unfetched._settle_all()]
)
def test_it_is_told_at_the_latest_when_weights_are_exchanged_or_the_app_ends(
    whole: Whole, telling: Telling, end: Callable[[nn.Module], object]
) -> None:
    whole(*BATCH)
    end(whole)
    assert "computes with" in telling.findings[0].words


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
    whole: Whole, telling: Telling, train: Callable[[nn.Module], None]
) -> None:
    train(whole)
    session.run(BATCH)
    assert telling.findings == ()


def test_the_loss_of_the_first_step_may_be_compared_with_that_of_the_host(pef: str, telling: Telling) -> None:
    model = _loaded(pef)
    session.run(BATCH)
    model(*BATCH)
    session.run(BATCH)
    assert telling.findings == ()


def test_a_module_that_has_no_hash_can_be_read_and_loaded() -> None:
    class Equal(nn.Linear):
        __hash__ = None  # type: ignore[assignment]  # as that of a dataclass

    module = Equal(2, 1)
    assert module.load_state_dict(module.state_dict())
