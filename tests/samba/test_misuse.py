"""Runs that are called in another way than they are meant, in one process."""

import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.errors import DataError, LaunchError, MachineError, OptionError
from sambasim.samba.door.translation import translated
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


def _made() -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _made()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, BATCH, optimizer, "net", config_dict=config)


def _loaded(pef: str) -> tuple[nn.Module, samba.optim.SGD]:
    model, optimizer = _made()
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model, optimizer


def test_autocast_around_a_run_changes_no_bit_and_is_noticed(
    pef: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sambasim.samba.notices._SAID", set())
    losses = []
    for autocast in (False, True):
        _loaded(pef)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append([session.run(BATCH)[0] for _ in range(2)])
    assert all(torch.equal(plain, other) for plain, other in zip(*losses, strict=True))
    notice, _ = capsys.readouterr().err.splitlines()
    assert notice.startswith("notice: torch.autocast is taken, and without effect here")


def test_outputs_of_a_model_that_was_traced_before_are_refused(pef: str) -> None:
    (first, optimizer), (second, other) = _made(), _made()
    of_first = trace_graph(first, BATCH, optimizer, pef=pef)
    of_second = trace_graph(second, BATCH, other, pef=pef)
    session.run(BATCH, of_second)
    with pytest.raises(OptionError, match="are of another model than the Sequential that was traced last"):
        session.run(BATCH, of_first)
    session.run(BATCH, trace_graph(first, BATCH, optimizer, pef=pef))


def test_words_are_no_lists_of_words(pef: str) -> None:
    model, optimizer = _loaded(pef)
    with pytest.raises(OptionError, match="section_types is the word 'FWD'"):
        session.run(BATCH, section_types="FWD")
    with pytest.raises(OptionError, match="names is the word 'x'"):
        session.get_tensors_by_name("x")
    with pytest.raises(AttributeError, match=r"samba\.session has no tocpu; near it there is to_cpu"):
        session.tocpu(model)  # type: ignore[operator]  # what is not there
    with pytest.raises(OptionError, match="trace_graph was given no PEF"):
        trace_graph(model, BATCH, optimizer)


def test_a_batch_on_a_device_of_torch_is_refused(pef: str) -> None:
    model, optimizer = _loaded(pef)
    elsewhere = torch.ones(2, 3, device="meta")  # which every machine has
    for call in (
        lambda: session.run([elsewhere]),
        lambda: trace_graph(model, [elsewhere], optimizer, pef=pef),
        lambda: session.compile(model, [elsewhere], optimizer),
    ):
        with pytest.raises(
            DataError, match="is on the device meta, and a session is given tensors of the CPU"
        ) as caught:
            call()
        assert str(caught.value.where).startswith(f"{__file__}:")
        assert str(caught.value.remedy).startswith("input.cpu()")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("trying to initialize the default process group twice!"), LaunchError),
        (AssertionError("Torch not compiled with CUDA enabled"), MachineError),
        (RuntimeError("Found no NVIDIA driver on your system. Please check …"), MachineError),
        (RuntimeError("No CUDA GPUs are available"), MachineError),
        (ValueError("No CUDA GPUs are available"), ValueError),
        (RuntimeError("another"), RuntimeError),
    ],
)
def test_errors_of_torch_that_ask_for_another_machine_are_told_as_such(error: Exception, told: type[Exception]) -> None:
    try:
        raise error
    except Exception as caught:
        again = translated(caught)
    assert type(again) is told
    assert again is error or str(getattr(again, "where", None)).endswith(": raise error")


def test_a_pef_that_trains_wants_its_optimizers(pef: str) -> None:
    with pytest.raises(OptionError, match=r"net\.pef trains, and trace_graph was given no optimizer") as refused:
        trace_graph(_made()[0], BATCH, None, pef=pef)
    assert "compile with --inference" in str(refused.value.remedy)
    assert "test_misuse.py:" in str(refused.value.where)
