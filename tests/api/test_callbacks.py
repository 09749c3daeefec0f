"""Functions of the user that are called at each event of a run, in one process; under mpirun see `tests/mpi`."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sambasim as ss
from sambasim.errors import CallbackError, OptionError, SambasimError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.callbacks import Event
from tests.api.conftest import HELD_OUT, STEPS, TRAIN, trained

PAIR = TRAIN, HELD_OUT


def meddling(event: Event) -> None:
    """Changes all that a run could depend on."""
    for tensor in event.weights().values():
        tensor.zero_()
    torch.rand(3), random.random(), np.random.rand()
    torch.set_num_threads(torch.get_num_threads() + 1)


def test_events_come_in_order_with_their_records_and_change_nothing(pef: ss.Pef, tmp_path: Path) -> None:
    seen: list[Event] = []
    weights = []

    def watch(event: Event) -> None:
        seen.append(event)
        weights.append(event.weights())

    kept: dict[str, Any] = {"checkpoint_dir": tmp_path / "saved", "checkpoint_every": "3steps"}
    plain, watched = trained(pef, PAIR), trained(pef, PAIR, callback=[meddling, watch], **kept)
    kinds = ["step", "step", "step", "checkpoint", "step", "evaluation", "checkpoint", "end"]
    assert [event.kind for event in seen] == kinds
    assert watched.summary.state_sha256 == plain.summary.state_sha256
    assert watched.losses == plain.losses == [e.record.loss for e in seen if e.record.kind == "step"]
    assert seen[5].record == watched.evaluations[0]
    assert seen[-1].record == watched.summary
    second = trained(pef, steps=2).weights
    assert all(torch.equal(weights[1][name], one) for name, one in second.items())
    with pytest.raises(CallbackError, match="the event is over"):
        seen[0].weights()


@pytest.mark.parametrize(("kind", "step"), [("step", 2), ("evaluation", 5), ("checkpoint", 3)])
def test_a_callback_ends_the_run_as_if_it_had_been_planned_so(
    pef: ss.Pef, tmp_path: Path, kind: str, step: int
) -> None:
    def stop(event: Event) -> None:
        if event.kind == kind and event.record.kind != "summary" and event.record.step >= step:
            event.stop("it is enough")

    def run(name: str, **options: Any) -> ss.Run:
        folder = tmp_path / name
        kept: dict[str, Any] = {"checkpoint_dir": folder, "save": folder / "w.safetensors", **options}
        return ss.run(pef, PAIR, quiet=True, checkpoint_every="3steps", **kept)

    stopped, planned = run("a", epochs=3, callback=stop), run("b", steps=step)
    assert (
        stopped.summary.stopped_early
        == f"the callback {stop.__qualname__} ended the run after step {step}: it is enough"
    )
    assert stopped.summary.state_sha256 == planned.summary.state_sha256
    assert [e.loss for e in stopped.evaluations] == [e.loss for e in planned.evaluations]
    a, b = (sorted(path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")) for name in "ab")
    assert a == b
    assert planned.summary.stopped_early is None
    if kind == "step":
        on = ss.run(pef, PAIR, quiet=True, checkpoint_dir=tmp_path / "a", resume="newest", epochs=3)
        assert on.summary.state_sha256 == ss.run(pef, PAIR, quiet=True, epochs=3).summary.state_sha256


def test_random_numbers_of_a_callback_are_its_own_and_differ_by_step(pef: ss.Pef) -> None:
    drawn: list[float] = []
    trained(pef, callback=lambda event: drawn.append(torch.rand(()).item() + random.random() + np.random.rand()))
    again, drawn = drawn, []
    trained(pef, callback=lambda event: drawn.append(torch.rand(()).item() + random.random() + np.random.rand()))
    assert again == drawn
    assert len(set(drawn)) == STEPS + 1


CALLS: Counter[str] = Counter()


class Counting(Communicator):
    def all_gather_object(self, value: Any) -> tuple[Any, ...]:
        CALLS["all_gather_object"] += 1
        return super().all_gather_object(value)


def exchanges(pef: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **options: Any) -> int:
    """How often the ranks exchange something, in a run of so many steps."""
    CALLS.clear()
    monkeypatch.setattr("sambasim.api.jobs.connected", lambda: Counting(0, (0,), "here"))
    ss.run(pef, TRAIN, quiet=True, steps=steps, **options)
    return CALLS["all_gather_object"]


def test_without_a_callback_a_step_has_no_exchange(pef: ss.Pef, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanges(pef.path, monkeypatch, 4) == exchanges(pef.path, monkeypatch, 2)
    more = [exchanges(pef.path, monkeypatch, steps, callback=lambda event: None) for steps in (2, 4)]
    assert more[1] - more[0] == 2


async def later(event: Event) -> None: ...


def raising(event: Event) -> None:
    raise KeyError(event.kind)


def test_ranks_without_a_callback_are_told(pef: ss.Pef) -> None:
    with pytest.raises(OptionError, match="callback_ranks needs a callback"):
        trained(pef, callback_ranks="all")


@pytest.mark.parametrize(
    ("callback", "error", "told"),
    [
        (3, CallbackError, r"a callback is 3\n.*a plain function of one event: def watch\(event\)"),
        (dict, CallbackError, "a callback is <class 'dict'>"),
        ([raising, None], CallbackError, "a callback is None"),
        (later, CallbackError, "a callback is <function later"),
        (lambda: None, CallbackError, r"raised TypeError: .*<lambda>\(\) takes 0 positional arguments but 1 was given"),
        ("watch", OptionError, "must be package.module:name or path/file.py:name"),
        ("nowhere.py:watch", CallbackError, r'there is no file .*nowhere.py\n.*callback="path/file.py:NAME"'),
        (raising, CallbackError, r"the callback raising raised KeyError: 'step'\n  where: .*test_callbacks.py:"),
    ],
)
def test_a_wrong_callback_is_told(pef: ss.Pef, callback: Any, error: type[SambasimError], told: str) -> None:
    with pytest.raises(error) as raised:
        trained(pef, callback=callback)
    assert raised.match(told)


def test_a_flag_names_a_function_and_a_failing_one_keeps_what_was_saved(pef: ss.Pef, tmp_path: Path) -> None:
    file, metrics = tmp_path / "mine.py", tmp_path / "run.jsonl"
    file.write_text("def third(event):\n    assert event.record.step < 3, 'not further'\n")
    kept: dict[str, Any] = {"checkpoint_dir": tmp_path / "saved", "checkpoint_every": "1steps", "metrics": metrics}
    with pytest.raises(CallbackError, match="AssertionError: not further") as raised:
        trained(pef, callback=f"{file}:third", **kept)
    assert raised.value.where == f"{file}:2: assert event.record.step < 3, 'not further'"
    assert [path.name for path in sorted((tmp_path / "saved").glob("step-*"))] == ["step-0000000001", "step-0000000002"]
    assert metrics.read_text().count('"kind":"step"') == 3
