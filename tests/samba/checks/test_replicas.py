"""The checks of a loaded PEF, alone and with another replica that the test makes up."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from torch.utils.data.distributed import DistributedSampler

from sambasim.ir.types import SymbolKind
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.transports.connect import Way
from sambasim.samba import process
from sambasim.samba.checks import job, replicas
from sambasim.samba.checks.data import Division, Iteration
from sambasim.samba.checks.job import Check, Point
from sambasim.samba.checks.replicas import (
    Checks,
    Predicted,
    Snapshot,
    Trained,
    different_hyperparameters,
    different_start,
    different_weights,
    wrong_shards,
)
from sambasim.samba.ending import leave
from sambasim.samba.process import Finding, Reporter
from sambasim.samba.session import session
from tests.samba.checks.conftest import BATCH, made_linear
from tests.samba.harness import Load

OPTIONS = {"lr": 0.1, "momentum": 0.9}
REPLICA = Trained({"a": "1", "b": "2"}, 4, [OPTIONS, {"lr": 0.3}])


START = "DP03: replica 2 starts from other weights than replica 0: {} differs; all continue from those of replica 0"


@pytest.mark.parametrize(
    ("change", "start", "course"),
    [
        ({"weights": {"a": "1", "b": "3"}}, START.format("b"), "has other weights than replica 0: b differs"),
        ({"steps": 0}, START.format("the number of optimizer steps"), None),
        ({"hyperparameters": [OPTIONS, {"lr": 0.2}]}, None, "trains with lr 0.2, and replica 0 with 0.3"),
        ({}, None, None),
        ({"weights": {}}, None, None),  # it leaves them out
        ({"weights": {**REPLICA.weights, "c": ""}}, START.format("c"), "has other weights than replica 0: c differs"),
    ],
)
def test_a_different_replica_is_found(change: dict[str, Any], start: str | None, course: str | None) -> None:
    replicas = [REPLICA, REPLICA, replace(REPLICA, **change)]
    at_start = different_start(replicas, "app.py:1: run()")
    later = [compare(replicas, "at the end", None) for compare in (different_hyperparameters, different_weights)]
    assert (at_start and (at_start.words, at_start.where)) == (start and (start, "app.py:1: run()"))
    words = [f"DP07: at the end replica 2 {course}"] if course else []
    assert [finding.words for finding in later if finding] == words


DIVIDED = [Division(2, rank, 8, None, False) for rank in range(2)]


@pytest.mark.parametrize(
    ("divisions", "second", "words"),
    [
        (DIVIDED, "cd", None),
        (DIVIDED, "ab", "DP04: replicas 0 and 1 get the same samples, again in step 2"),
        ([None, None], "ad", None),  # once, which may be chance
        ([None, None], "a", None),  # with fewer batches
        ([DIVIDED[0], DIVIDED[0]], "cd", "DP04: replicas 0 and 1 get the same samples: both samplers have rank 0"),
        ([DIVIDED[0], replace(DIVIDED[1], length=9)], "cd", "DP05: the samplers of replicas 0 and 1 differ in the"),
    ],
)
def test_replicas_that_predict_the_same_samples_are_found(
    divisions: list[Division | None], second: str, words: str | None
) -> None:
    shards = [
        Predicted(division, None, [(b,) for b in fed]) for division, fed in zip(divisions, ("ab", second), strict=True)
    ]
    found = wrong_shards(shards)
    assert (found and found.words.startswith(words or "none")) == (words and True)


@pytest.mark.parametrize(
    ("command", "typed", "backwards", "made"),
    [
        ("run", 1, 4, None),
        (None, 4, 4, None),
        (None, 4, 1, "1 backward"),
        ("run", 4, 5, "5 backwards"),
        ("measure-performance", 2, 1, None),
    ],
)
def test_another_number_of_backwards_is_found_unless_whole_steps_are_measured(
    load: Load, reporter: Reporter, command: str | None, typed: int, backwards: int, made: str | None
) -> None:
    process.current().command = command
    process.current().arguments = Namespace(command=command, grad_accumulation_steps=typed)
    load(made_linear, BATCH)
    for _ in range(backwards):
        session.run(BATCH, section_types=["FWD"])
        session.run(BATCH, section_types=["FWD", "BCKWD"])
    session.run(section_types=["OPT"])
    session.run(BATCH)
    words = [f"DP02: --grad-accumulation-steps is 4, but the optimizer step follows {made}"] if made else []
    assert [finding.words for finding in reporter.findings] == words


def test_the_hyperparameters_of_the_device_are_compared(load: Load) -> None:
    load(made_linear, BATCH)
    machine = session.machine
    assert machine is not None
    compared = []
    for hyperparameters in ({"lr": 0.1, "momentum": 0.5}, {"lr": 0.2}, None, {"momentum": 0.5}):
        session.run(BATCH, hyperparam_dict=hyperparameters)
        machine.optimizers[0].param_groups[0]["lr"] = 0.3  # which the device does not see
        of_one, rates = replicas.trained(machine, {"p": 0.5}).hyperparameters
        assert rates == {"p": 0.5}
        compared.append((of_one["lr"], of_one["momentum"]))
    assert compared == [(0.1, 0.5), (0.2, 0.5), (0.2, 0.5), (0.2, 0.5)]


def test_states_that_have_begun_are_compared(load: Load) -> None:
    """At the start also their values, of which a replica may have loaded others."""
    load(made_linear, BATCH)
    machine = session.machine
    assert machine is not None
    before = replicas.trained(machine, {}, starts=True).weights
    session.run(BATCH, hyperparam_dict={"momentum": 0.5})
    at_start, later, left_out = (
        replicas.trained(machine, {}, starts=starts, read=read).weights.keys() - before.keys()
        for starts, read in ((True, True), (False, True), (False, False))
    )
    states = {*machine.program.names_of(SymbolKind.OPTIMIZER_STATE)}
    assert (at_start, later, left_out) == ({*states, "the state of sgd0"}, {"the state of sgd0"}, set())


LINE = "app.py:1: sampler = DistributedSampler(data)"
OWN = Division(2, 0, 8, (0, 1), False, where=LINE)
OTHER = replace(OWN, rank=1)

Change: TypeAlias = Callable[[Snapshot], Snapshot]
Compare: TypeAlias = Callable[[int, Change], Reporter]


def _begin_job(all_gather: Callable[[Any], Sequence[object]], ranks: int) -> job.Job:
    """A job of this rank, alone on its node, and of others that exist in `all_gather` only."""
    communicator: Any = SimpleNamespace(
        world_size=ranks, node_of=[0] * ranks, local_ranks=[0], local_size=1, local_rank=0,
        all_gather_object=all_gather, allocate_shared=single_rank("here").allocate_shared,
    )  # fmt: skip
    watched = process.current().parts[job.Job] = job.Job(communicator, leave)
    return watched


@pytest.fixture
def compare(load: Load, reporter: Reporter) -> Compare:
    """Compares with a replica that shows a changed snapshot before a step; returns the reporter."""
    load(made_linear, BATCH)
    assert session.machine is not None
    change: list[Change] = []
    watched = _begin_job(lambda own: [own, (own[0], change[-1](own[1]))], 2)
    reporter.on_demand = True  # collects DP09 too
    sampler = DistributedSampler[int](range(8), 2, 0)  # type: ignore[arg-type]  # it has all that a data set needs
    watched.samplers._last, watched.samplers.passes = Iteration(sampler, OWN, "app.py:2: for batch in loader", 3), 1
    checks = Checks(session.machine, watched.communicator, session.loaded().hyperparameters)

    def comparing(step: int, other: Change) -> Reporter:
        change.append(other)
        checks._step, checks._fed = step, (f"batch of step {step}",)
        checks._compare(Way.HOST_REPLICATED, process.current().part(job.Job))
        return reporter

    return comparing


def _right(shown: Snapshot, **changes: Any) -> Snapshot:
    return replace(shown, **{"division": OTHER, "fed": ("another batch",), **changes})


def _later(shown: Snapshot, **changes: Any) -> Snapshot:
    """In another epoch, with another rate, other weights, and another order."""
    trained = replace(
        shown.trained,
        hyperparameters=[{**options, "lr": 0.5} for options in shown.trained.hyperparameters],
        weights=dict.fromkeys(shown.trained.weights, "others"),
    )
    other = {"trained": trained, "division": replace(OTHER, order=(0, 2)), "place": (2, 1)}
    return _right(shown, **{**other, **changes})


def _set_fed(fed: bool) -> job.Job:
    watched = process.current().part(job.Job)
    assert watched is not None
    watched.samplers.passes = int(fed)
    return watched


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (_right, []),
        (lambda shown: _later(shown, place=(1, 3), division=OTHER), ["DP07", "DP07"]),
        (lambda shown: _right(shown, place=(1, 3), division=replace(OTHER, order=(0, 2))), ["DP05"]),
        (lambda shown: _right(shown, place=(2, 1), division=replace(OTHER, order=(0, 2))), ["DP09"]),
        (lambda shown: _right(shown, place=(2, 1), division=replace(OTHER, order=(9, 2))), ["DP05", "DP09"]),
        (_later, ["DP09"]),
    ],
    ids=["right", "rates-in-one-epoch", "epochs-set-apart", "orders-in-two-epochs", "seeds", "epochs-of-other-length"],
)
def test_a_cause_is_reported_in_place_of_its_effects(compare: Compare, change: Change, codes: list[str]) -> None:
    findings = compare(8, change).findings
    assert sorted(finding.code for finding in findings) == codes
    words = "replica 0 takes step 3 of epoch 1, and replica 1 step 1 of epoch 2"
    assert all(words in finding.what for finding in findings if finding.code == "DP09")


def test_what_trains_as_the_app_exits_is_compared_without_its_samplers(compare: Compare) -> None:
    del process.current().parts[job.Job]  # as the end of the job does
    assert [finding.code for finding in compare(8, _later).findings] == ["DP07", "DP07"]


@pytest.mark.parametrize(("fed", "step"), [(False, 8), (True, 2)])
def test_equal_batches_are_reported_with_the_line_of_the_sampler(compare: Compare, fed: bool, step: int) -> None:
    """At step 8, if no sampler has fed one."""
    _set_fed(fed)
    reported = {n: list(compare(n, lambda shown: replace(shown, division=None)).findings) for n in (1, 2, 8)}
    assert next(n for n, findings in reported.items() if findings) == step
    assert [(finding.code, finding.where) for finding in reported[8]] == [("DP04", LINE)]


@pytest.mark.parametrize(("fed", "codes"), [(False, ["DP04"]), (True, [])])
def test_a_supposed_warm_up_is_reported_at_the_end_if_no_sampler_has_fed_a_step(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, fed: bool, codes: list[str]
) -> None:
    _set_fed(False)
    for step in (1, 2):
        reporter = compare(step, lambda shown: replace(shown, division=None))
    assert not reporter.findings
    monkeypatch.setattr(_set_fed(fed).communicator, "all_gather_object", lambda own: [own, own])
    job.finish()
    assert [finding.code for finding in reporter.findings] == codes


def test_a_summary_is_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    both, alone = (Finding("AP06", f"the app {verb}", None, "to_cpu") for verb in ("computes", "saves"))
    reporter = process.current().reporter = Reporter()
    reporter.report(both)
    all_shown: list[object] = [(Point(0, ended=True), ({}, found)) for found in ([both], [both, alone], [alone])]
    _begin_job(lambda own: all_shown if own else [own] * 3, 3)
    assert capsys.readouterr().err == "notice: AP06: the app computes\n  try:   to_cpu\n"
    job.finish()
    reporter.summarize()
    assert capsys.readouterr().err == (
        "summary: 2 findings; sambasim app --check checks every step\n"
        "  AP06: the app computes\n  AP06 (rank 1): the app saves\n  try:   to_cpu\n"
    )


def test_a_check_reports_that_it_cut_epochs() -> None:
    check = Check(4)
    whole = list(check.short_epoch(2, 1, iter(range(5))))
    assert (whole, check.epochs_cut) == ([0, 1, 2, 3, 4], False)
    cut = list(check.short_epoch(2, 1, iter(range(9))))
    assert (cut, check.epochs_cut) == ([0, 1, 2, 3, 8], True)
