"""What the app reads on the host while the device is ahead, in one process."""

import copy
import io
import pickle
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

BATCH = [torch.ones(2, 3)]


def _made() -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


class Whole(nn.Module):
    """A model of two modules, called by a third way: `forward` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.head(self.encoder(x))
        return value


@pytest.fixture
def whole(tmp_path: Path) -> Whole:
    """Loaded, and trained for two steps."""
    model = Whole()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = session.compile(model, BATCH, optimizer, "whole", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, BATCH, optimizer, pef=pef)
    session.run(BATCH)
    session.run(BATCH)
    return model


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
    optimizer = session._loaded()[0].optimizers[0]
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
    _, checks = session._loaded(whole)

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
def test_torch_can_script_and_trace_and_compile_the_model(whole: Whole, telling: Telling) -> None:
    session.to_cpu(whole)
    whole.eval()
    expected = whole(*BATCH)
    (x,) = BATCH
    made = [
        torch.jit.script(whole),
        torch.jit.script(nn.Sequential(whole)),
        torch.jit.trace(whole, x),  # type: ignore[no-untyped-call]  # torch's, untyped
        torch.export.export(whole, (x,), strict=True).module(),
        torch.export.export(whole, (x,), strict=False).module(),
        torch.compile(whole, backend="eager", fullgraph=True),
        torch.fx.symbolic_trace(whole),
    ]
    assert all(torch.equal(one(x), expected) for one in made)
    session.run(BATCH)
    whole(x)
    assert len(telling.findings) == 1, "the model is watched as before"


def test_the_model_can_still_be_pickled(pef: str) -> None:
    model = _loaded(pef)
    session.run(BATCH)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again[0].weight, model.get_parameter("0.weight"))
