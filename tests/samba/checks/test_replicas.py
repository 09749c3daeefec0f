"""The checks of a loaded PEF, alone and with another replica that the test makes up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from torch.utils.data.distributed import DistributedSampler

from sambasim.runtime.single_rank import private_window
from sambasim.runtime.stepwise import Mode
from sambasim.samba.checks import job
from sambasim.samba.checks.data import Division, Pass, Place
from sambasim.samba.checks.findings import Finding, Reporter
from sambasim.samba.checks.job import Check, Point
from sambasim.samba.checks.replicas import Checks, Snapshot
from sambasim.samba.session import session
from tests.samba.checks.conftest import loaded_linear

LINE = "app.py:1: sampler = DistributedSampler(data)"
OWN = Division(2, 0, 8, (0, 1), False, LINE)
ALONE = SimpleNamespace(local_ranks=[0], local_size=1, local_rank=0)
"""The topology of a rank that is alone on its node."""

Change: TypeAlias = Callable[[Snapshot], Snapshot]


@pytest.fixture
def compare(linear_pef: str, reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Change], Reporter]:
    """Compares with a replica that shows a changed snapshot before a step; returns the reporter."""
    model, _ = loaded_linear(linear_pef)
    change: list[Change] = []

    def gather(own: tuple[object, Snapshot]) -> Sequence[object]:
        return [own, (own[0], change[-1](own[1]))]

    communicator: Any = SimpleNamespace(
        world_size=2,
        node_of=[0, 0],
        all_gather_object=gather,
        topology=ALONE,
        allocate_shared=private_window,
    )
    watched = job.Job(communicator)
    monkeypatch.setattr(job, "_job", watched)
    sampler = DistributedSampler[int](range(8), 2, 0)  # type: ignore[arg-type]  # it has all that a data set needs
    watched.samplers._last, watched.samplers._passes = Pass(sampler, OWN, "app.py:2: for batch in loader", 3), 1
    checks = Checks(session._loaded(model).machine, communicator)

    def comparing(step: int, other: Change) -> Reporter:
        change.append(other)
        checks._step, checks._fed = step, (f"batch of step {step}",)
        checks._compare(Mode.HOST)
        return reporter

    return comparing


def _right(shown: Snapshot) -> Snapshot:
    return replace(shown, division=replace(OWN, rank=1), fed=("another batch",))


def _later(shown: Snapshot) -> Snapshot:
    """In another epoch, with another rate, other weights, and another order."""
    trained = replace(
        shown.trained,
        hyperparameters=[{**one, "lr": 0.5} for one in shown.trained.hyperparameters],
        weights=dict.fromkeys(shown.trained.weights, "others"),
    )
    return replace(_right(shown), trained=trained, division=replace(OWN, rank=1, order=(0, 2)), place=Place(2, 1))


def _codes(reporter: Reporter) -> list[str]:
    return [finding.code for finding in reporter.findings]


def test_replicas_that_train_equally_are_no_finding(compare: Callable[[int, Change], Reporter]) -> None:
    assert _codes(compare(2, _right)) == []


def test_epochs_of_different_length_are_reported_in_place_of_their_effects(
    compare: Callable[[int, Change], Reporter],
) -> None:
    (finding,) = compare(8, _later).findings
    assert finding.words == (
        "DP09: the epochs of replicas differ in length: replica 0 takes step 3 of epoch 1, and replica 1 step 1 of "
        "epoch 2"
    )


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda shown: replace(_later(shown), place=Place(1, 3), division=replace(OWN, rank=1)), "DP07 DP07"),
        (lambda shown: replace(_right(shown), place=Place(1, 3), division=replace(OWN, rank=1, order=(0, 2))), "DP05"),
        (lambda shown: replace(_right(shown), place=Place(2, 1), division=replace(OWN, rank=1, order=(0, 2))), "DP09"),
        (
            lambda shown: replace(_right(shown), place=Place(2, 1), division=replace(OWN, rank=1, order=(9, 2))),
            "DP05 DP09",
        ),
    ],
    ids=["rates-in-one-epoch", "epochs-set-apart", "orders-in-two-epochs", "seeds"],
)
def test_mistakes_of_any_epoch_are_reported_as_such(
    compare: Callable[[int, Change], Reporter], change: Change, codes: str
) -> None:
    assert sorted(_codes(compare(8, change))) == codes.split()


def test_equal_samples_are_reported_with_the_line_of_the_sampler(
    compare: Callable[[int, Change], Reporter],
) -> None:
    def same_samples(shown: Snapshot) -> Snapshot:
        return replace(shown, division=None)

    assert _codes(compare(1, same_samples)) == []
    assert [(one.code, one.where) for one in compare(2, same_samples).findings] == [("DP04", LINE)]


def test_findings_of_another_rank_are_in_the_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, alone = (Finding("AP06", f"the app {verb}", None, "to_cpu") for verb in ("computes", "saves"))
    reporter = Reporter()
    reporter.report(both)
    monkeypatch.setattr(job, "reporter", reporter)
    all_shown: list[object] = [(Point(0, ended=True), ({}, found)) for found in ([both], [both, alone], [alone])]
    communicator: Any = SimpleNamespace(
        node_of=[0] * 3,
        all_gather_object=lambda own: all_shown if own else [own] * 3,
        topology=ALONE,
        allocate_shared=private_window,
    )
    monkeypatch.setattr(job, "_job", job.Job(communicator))
    assert capsys.readouterr().err == "notice: AP06: the app computes\n  try:   to_cpu\n"
    job.finish()
    reporter.summarize()
    assert capsys.readouterr().err == (
        "summary: 2 findings; sambasim app --check checks every step\n"
        "  AP06: the app computes\n  AP06 (rank 1): the app saves\n  try:   to_cpu\n"
    )


def test_a_check_reports_that_it_cut_epochs() -> None:
    check = Check(4)
    whole = list(check.short_epoch(2, 1)(iter(range(5))))
    assert (whole, check.own_report().epochs_cut) == ([0, 1, 2, 3, 4], False)
    cut = list(check.short_epoch(2, 1)(iter(range(9))))
    assert (cut, check.own_report().epochs_cut) == ([0, 1, 2, 3, 8], True)
