"""The checks of a loaded PEF, alone and with another replica that the test makes up."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.stepwise import Mode
from sambasim.samba import process
from sambasim.samba.checks import job, replicas
from sambasim.samba.checks.data import Division, Iteration
from sambasim.samba.checks.job import Check, Point
from sambasim.samba.checks.replicas import (
    Checks,
    Snapshot,
    Trained,
    different_hyperparameters,
    different_start,
    different_weights,
)
from sambasim.samba.ending import leave
from sambasim.samba.process import Finding, Reporter
from sambasim.samba.session import session
from tests.samba.harness import Load, Made, with_sgd

BATCH = [torch.ones(2, 3)]
OPTIONS = {"lr": 0.1, "momentum": 0.9}
REPLICA = Trained({"a": "1", "b": "2"}, 4, [OPTIONS, {"lr": 0.3}])


def test_equal_replicas_are_no_finding() -> None:
    assert different_start([REPLICA, REPLICA, REPLICA], None) is None
    replicas = [REPLICA, REPLICA, replace(REPLICA, weights={})]
    assert different_hyperparameters(replicas, "at the end", None) is None
    assert different_weights(replicas, "at the end", None) is None


@pytest.mark.parametrize(
    ("change", "different"), [({"weights": {"a": "1", "b": "3"}}, "b"), ({"steps": 0}, "the number of optimizer steps")]
)
def test_a_different_start_is_found(change: dict[str, object], different: str) -> None:
    other = replace(REPLICA, **change)  # type: ignore[arg-type]
    finding = different_start([REPLICA, REPLICA, other], "app.py:1: run()")
    assert finding is not None
    words = f"DP03: replica 2 starts from other weights than replica 0: {different} differs"
    assert finding.words == f"{words}; all continue from those of replica 0"
    assert finding.where == "app.py:1: run()"


@pytest.mark.parametrize(
    ("compare", "change", "words"),
    [
        (different_weights, {"weights": {"a": "3", "b": "3"}}, "has other weights than replica 0: a differs"),
        (
            different_hyperparameters, {"hyperparameters": [OPTIONS, {"lr": 0.2}]},
            "trains with lr 0.2, and replica 0 with 0.3",
        ),
    ],
)  # fmt: skip
def test_a_different_course_is_found(compare: Any, change: dict[str, Any], words: str) -> None:
    finding = compare([REPLICA, replace(REPLICA, **change)], "at the end", None)
    assert finding.words == f"DP07: at the end replica 1 {words}"


def _made() -> Made:
    return with_sgd(lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), momentum=0.9)


@pytest.mark.parametrize(("command", "codes"), [("run", ["DP02"]), (None, ["DP02"]), ("measure-performance", [])])
def test_accumulation_is_not_checked_when_whole_steps_are_measured(
    load: Load, reporter: Reporter, command: str | None, codes: list[str]
) -> None:
    process.current().command = command
    process.current().arguments = Namespace(command=command, grad_accumulation_steps=2)
    load(_made, BATCH)
    session.run(BATCH)
    assert [finding.code for finding in reporter.findings] == codes


def test_the_hyperparameters_of_the_device_are_compared(load: Load) -> None:
    load(_made, BATCH)
    machine = session.machine
    assert machine is not None
    compared = []
    for hyperparameters in ({"lr": 0.1, "momentum": 0.5}, {"lr": 0.2}, None, {"momentum": 0.5}):
        session.run(BATCH, hyperparam_dict=hyperparameters)
        machine.optimizers[0].param_groups[0]["lr"] = 0.3  # which the device does not see
        (of_one,) = replicas.trained(machine).hyperparameters
        compared.append((of_one["lr"], of_one["momentum"]))
    assert compared == [(0.1, 0.5), (0.2, 0.5), (0.2, 0.5), (0.2, 0.5)]


LINE = "app.py:1: sampler = DistributedSampler(data)"
OWN = Division(2, 0, 8, (0, 1), False, LINE)
ALONE: Mapping[str, Any] = {"local_ranks": [0], "local_size": 1, "local_rank": 0}
"""A rank that is alone on its node."""

Change: TypeAlias = Callable[[Snapshot], Snapshot]


@pytest.fixture
def compare(load: Load, reporter: Reporter) -> Callable[[int, Change], Reporter]:
    """Compares with a replica that shows a changed snapshot before a step; returns the reporter."""
    load(_made, BATCH)
    assert session.machine is not None
    change: list[Change] = []

    def gather(own: tuple[object, Snapshot]) -> Sequence[object]:
        return [own, (own[0], change[-1](own[1]))]

    communicator: Any = SimpleNamespace(
        world_size=2,
        node_of=[0, 0],
        all_gather_object=gather,
        **ALONE,
        allocate_shared=single_rank("here").allocate_shared,
    )
    watched = job.Job(communicator, leave)
    process.current().parts[job.Job] = watched
    reporter.on_demand = True  # collects DP09 too
    sampler = DistributedSampler[int](range(8), 2, 0)  # type: ignore[arg-type]  # it has all that a data set needs
    watched.samplers._last, watched.samplers._passes = Iteration(sampler, OWN, "app.py:2: for batch in loader", 3), 1
    checks = Checks(session.machine, communicator)

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
    return replace(_right(shown), trained=trained, division=replace(OWN, rank=1, order=(0, 2)), place=(2, 1))


def _codes(reporter: Reporter) -> list[str]:
    return [finding.code for finding in reporter.findings]


def test_replicas_that_train_equally_are_no_finding(compare: Callable[[int, Change], Reporter]) -> None:
    assert _codes(compare(2, _right)) == []


def test_epochs_of_other_length_are_reported_in_place_of_effects(compare: Callable[[int, Change], Reporter]) -> None:
    (finding,) = compare(8, _later).findings
    assert finding.words == (
        "DP09: the epochs of replicas differ in length: replica 0 takes step 3 of epoch 1, and replica 1 step 1 of "
        "epoch 2"
    )


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda shown: replace(_later(shown), place=(1, 3), division=replace(OWN, rank=1)), "DP07 DP07"),
        (lambda shown: replace(_right(shown), place=(1, 3), division=replace(OWN, rank=1, order=(0, 2))), "DP05"),
        (lambda shown: replace(_right(shown), place=(2, 1), division=replace(OWN, rank=1, order=(0, 2))), "DP09"),
        (lambda shown: replace(_right(shown), place=(2, 1), division=replace(OWN, rank=1, order=(9, 2))), "DP05 DP09"),
    ],
    ids=["rates-in-one-epoch", "epochs-set-apart", "orders-in-two-epochs", "seeds"],
)
def test_mistakes_of_any_epoch_are_found(
    compare: Callable[[int, Change], Reporter], change: Change, codes: str
) -> None:
    assert sorted(_codes(compare(8, change))) == codes.split()


def test_a_wrong_sampler_is_reported_with_its_own_line(compare: Callable[[int, Change], Reporter]) -> None:
    other = "app.py:1: sampler = DistributedSampler(data, seed=rank)"
    reporter = compare(
        1, lambda shown: replace(_right(shown), division=replace(OWN, rank=1, order=(1, 1), where=other))
    )
    assert [(finding.code, finding.where) for finding in reporter.findings] == [("DP05", other)]


def test_equal_samples_are_reported_with_the_line_of_the_sampler(compare: Callable[[int, Change], Reporter]) -> None:
    def same_samples(shown: Snapshot) -> Snapshot:
        return replace(shown, division=None)

    watched = job.current()
    assert watched is not None
    watched.samplers.has_fed = True
    assert _codes(compare(1, same_samples)) == []
    assert [(one.code, one.where) for one in compare(2, same_samples).findings] == [("DP04", LINE)]


@pytest.mark.parametrize(("fed", "step"), [(False, 8), (True, 2)])
def test_equal_batches_that_no_sampler_has_fed_are_reported_at_step_8(
    compare: Callable[[int, Change], Reporter], fed: bool, step: int
) -> None:
    watched = job.current()
    assert watched is not None
    watched.samplers.has_fed = fed
    found = {n: len(_codes(compare(n, lambda shown: replace(shown, division=None)))) for n in (1, 2, 8)}
    assert next(n for n, number in found.items() if number) == step


@pytest.mark.parametrize(("fed", "codes"), [(False, ["DP04"]), (True, [])])
def test_a_supposed_warm_up_is_reported_at_the_end_if_no_sampler_has_fed_a_step(
    compare: Callable[[int, Change], Reporter], monkeypatch: pytest.MonkeyPatch, fed: bool, codes: list[str]
) -> None:
    for step in (1, 2):
        reporter = compare(step, lambda shown: replace(shown, division=None))
    assert _codes(reporter) == []
    watched = job.current()
    assert watched is not None
    watched.samplers.has_fed = fed
    monkeypatch.setattr(watched.communicator, "all_gather_object", lambda own: [own, own])
    job.finish()
    assert _codes(reporter) == codes


def test_a_summary_is_of_all_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    both, alone = (Finding("AP06", f"the app {verb}", None, "to_cpu") for verb in ("computes", "saves"))
    reporter = Reporter()
    reporter.report(both)
    process.current().reporter = reporter
    all_shown: list[object] = [(Point(0, ended=True), ({}, found)) for found in ([both], [both, alone], [alone])]
    communicator: Any = SimpleNamespace(
        node_of=[0] * 3,
        all_gather_object=lambda own: all_shown if own else [own] * 3,
        **ALONE,
        allocate_shared=single_rank("here").allocate_shared,
    )
    process.current().parts[job.Job] = job.Job(communicator, leave)
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
