"""Calls that cannot mean what was meant, and devices and jobs that are not there."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from sambasim.errors import DataError, LaunchError, MachineError, OptionError
from sambasim.samba.ending import translated
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import Load, Made, PefOf, with_sgd

ROWS = [torch.ones(2, 3)]


def _made_sequential() -> Made:
    # A loss of each sample.
    return with_sgd(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)))


def test_autocast_around_a_run_changes_no_bit_and_is_noticed(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for autocast in (False, True):
        load(_made_sequential, ROWS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append([session.run(ROWS)[0] for _ in range(2)])
    assert all(torch.equal(plain, other) for plain, other in zip(*losses, strict=True))
    notice, _ = capsys.readouterr().err.splitlines()
    assert notice.startswith("notice: torch.autocast has no effect")


def test_outputs_of_a_model_that_was_traced_before_are_refused(load: Load, pef_of: PefOf) -> None:
    first, optimizer = load(_made_sequential, ROWS)
    second, _ = load(_made_sequential, ROWS)
    session.run(ROWS, second.output_tensors)
    with pytest.raises(OptionError, match="are of another model than the Sequential traced last"):
        session.run(ROWS, first.output_tensors)
    session.run(ROWS, trace_graph(first, ROWS, optimizer, pef=pef_of(_made_sequential, ROWS)))


def test_words_are_no_lists_of_words(load: Load) -> None:
    model, optimizer = load(_made_sequential, ROWS)
    with pytest.raises(OptionError, match="section_types must be a list of words, not the word 'FWD'"):
        session.run(ROWS, section_types="FWD")
    with pytest.raises(DataError, match="output_tensors must be tensors, not int"):
        session.run(ROWS, 0)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(OptionError, match="names must be a list of words, not the word 'x'"):
        session.get_tensors_by_name("x")
    with pytest.raises(AttributeError, match=r"samba\.session has no tocpu; similar names: to_cpu"):
        session.tocpu(model)  # type: ignore[operator]  # what is not there
    with pytest.raises(OptionError, match="trace_graph needs a PEF"):
        trace_graph(model, ROWS, optimizer)


def test_a_batch_on_a_device_of_torch_is_refused(load: Load, pef_of: PefOf) -> None:
    (model, optimizer), pef = load(_made_sequential, ROWS), pef_of(_made_sequential, ROWS)
    elsewhere = torch.ones(2, 3, device="meta")  # which every machine has
    for call in (
        lambda: session.run([elsewhere]),
        lambda: trace_graph(model, [elsewhere], optimizer, pef=pef),
        lambda: session.compile(model, [elsewhere], optimizer),
    ):
        with pytest.raises(DataError, match="is on the device meta, and must be on the CPU") as caught:
            call()
        assert str(caught.value.where).startswith(f"{__file__}:")
        assert str(caught.value.remedy).startswith("input.cpu()")


CUDA: Any = torch.cuda
SAVED = io.BytesIO()
torch.save(torch.ones(1), SAVED)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: torch.ones(1).cuda(), "device cuda"),
        (lambda: CUDA.FloatTensor(1), "device cuda"),
        (lambda: torch.cuda.set_device(0), "device cuda"),
        (lambda: CUDA.Stream(), "device cuda"),
        (lambda: torch.load(io.BytesIO(SAVED.getvalue()), map_location="cuda"), "loads tensors to a device"),
        (lambda: torch.load(io.BytesIO(SAVED.getvalue()), map_location="rdu"), "loads tensors to a device"),
        (lambda: torch.ones(1).to(0), "that torch does not have"),
        (lambda: torch.ones(1).pin_memory(), "that torch does not have"),
        (lambda: torch.ones(1, pin_memory=True), "for pinned memory"),
        (lambda: torch.ones(1).to("rdu"), "that torch does not have"),
    ],
)
def test_a_device_that_is_not_there_is_told_as_such(call: Callable[[], object], what: str) -> None:
    told = _told(call)
    assert isinstance(told, MachineError)
    assert what in told.what


@pytest.mark.skipif(dist.is_initialized(), reason="another test has started it")
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (dist.get_rank, "calls torch.distributed, which is not initialised"),
        (dist.get_world_size, "calls torch.distributed, which is not initialised"),
        (lambda: DistributedSampler([1, 2]), "calls torch.distributed, which is not initialised"),  # type: ignore[arg-type]  # it has a length
        (lambda: dist.init_process_group("mpi"), "calls init_process_group"),
        (lambda: dist.init_process_group("gloo"), "calls init_process_group"),
    ],
)
def test_so_is_torch_distributed_if_not_up(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], what: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    told = _told(call)
    assert isinstance(told, LaunchError)
    assert what in told.what


def _told(call: Callable[[], object]) -> object:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each is an error of torch, of a type of its own
        call()
    told = translated(caught.value)
    assert str(getattr(told, "where", None)).startswith(f"{__file__}:")
    return told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("trying to initialize the default process group twice!"), LaunchError),
        (RuntimeError("Found no NVIDIA driver on your system. Please check …"), MachineError),
        (RuntimeError("No CUDA GPUs are available"), MachineError),
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
