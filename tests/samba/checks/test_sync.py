"""Flags of sync and accumulation against what is run."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from sambasim.errors import LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.runtime.stepwise import Mode
from sambasim.samba.checks import sync as module
from sambasim.samba.checks.sync import Accumulation, mode_of
from sambasim.samba.checks.telling import Telling

BACKWARD = {SectionKind.FWD, SectionKind.BCKWD}


@pytest.mark.parametrize(
    ("typed", "backwards", "words"),
    [
        (1, 4, None),
        (4, 4, None),
        (4, 1, "--grad-accumulation-steps 4 was typed, but 1 backward makes an optimizer step"),
        (4, 3, "--grad-accumulation-steps 4 was typed, but 3 backwards make an optimizer step"),
        (4, 5, "--grad-accumulation-steps 4 was typed, but 5 backwards make an optimizer step"),
    ],
)
def test_another_number_of_backwards_than_was_typed_is_found(
    monkeypatch: pytest.MonkeyPatch, typed: int, backwards: int, words: str | None
) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(module, "telling", told)
    accumulation = Accumulation(Namespace(grad_accumulation_steps=typed))
    for _ in range(backwards):
        accumulation.note({SectionKind.FWD})
        accumulation.note(BACKWARD)
    accumulation.note({SectionKind.OPT})
    accumulation.note({*BACKWARD, SectionKind.OPT})
    assert [finding.what for finding in told.findings] == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("typed", "words", "remedy"),
    [
        (False, "--data-parallel was not typed", "mpirun -np 2 python app.py run --data-parallel"),
        (True, "session.run is not told", "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu="),
    ],
)
def test_who_forgot_to_sync_is_told(monkeypatch: pytest.MonkeyPatch, typed: bool, words: str, remedy: str) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(module, "telling", told)
    program: Any = SimpleNamespace(data_parallel=object(), world_size=2)
    arguments = Namespace(data_parallel=typed)
    command = ["python", "app.py", "run"]
    assert mode_of(program, 2, arguments, command, data_parallel=False, reduce_on_rdu=False) is Mode.HOST
    (finding,) = told.findings
    assert finding.code == "DP01"
    assert finding.what.endswith(words)
    assert finding.remedy.startswith(remedy)


def test_a_pef_that_cannot_sync_is_not_told_to() -> None:
    program: Any = SimpleNamespace(data_parallel=None, world_size=1)
    command = ["python", "app.py", "run", "--data-parallel"]
    with pytest.raises(LaunchError, match="this PEF has no REDUCE and GATHER sections"):
        mode_of(program, 2, Namespace(data_parallel=True), command, data_parallel=False, reduce_on_rdu=False)
