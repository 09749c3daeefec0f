"""What a loaded PEF compares with another replica, which is made up here: one process, and two that meet."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from sambasim import samba
from sambasim.runtime.single_rank import private_window
from sambasim.runtime.stepwise import Mode
from sambasim.samba import context
from sambasim.samba.checks import replicas, watching
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.meeting import Point
from sambasim.samba.checks.on_demand import Check
from sambasim.samba.checks.replicas import Checks, Look
from sambasim.samba.checks.samplers import Division, Pass, Place, Samplers
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.zeros(2, 3)]
LINE = "app.py:1: sampler = DistributedSampler(data)"
OWN = Division(2, 0, 8, (0, 1), False, LINE)

ALONE = SimpleNamespace(local_ranks=[0], local_size=1, local_rank=0)
"""A rank that shares its node with nobody."""

Change: TypeAlias = Callable[[Look], Look]


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> str:
    model, optimizer = _made()
    config = {"output_folder": str(tmp_path_factory.mktemp("out"))}
    return session.compile(model, BATCH, optimizer, "net", config_dict=config)


def _made() -> tuple[nn.Module, samba.optim.SGD]:
    model = nn.Linear(3, 1)
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def compare(pef: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Change], Telling]:
    """Meets another replica, which shows what this one shows, changed, before a step; returns what is told."""
    model, optimizer = _made()
    trace_graph(model, BATCH, optimizer, pef=pef)
    told = Telling(on_demand=True)
    monkeypatch.setattr(replicas, "telling", told)
    change: list[Change] = []

    def gather(own: tuple[object, Look]) -> Sequence[object]:
        return [own, (own[0], change[-1](own[1]))]

    communicator: Any = SimpleNamespace(
        world_size=2,
        node_of=[0, 0],
        all_gather_object=gather,
        topology=ALONE,
        allocate_shared=private_window,
    )
    watched = watching.Watching(communicator)
    monkeypatch.setattr(watching, "_watching", watched)
    sampler = DistributedSampler[int](range(8), 2, 0)  # type: ignore[arg-type]  # it has all that a data set needs
    watched.samplers._last, watched.samplers._passes = Pass(sampler, OWN, "app.py:2: for batch in loader", 3), 1
    checks = Checks(session._loaded(model).machine, communicator)

    def comparing(step: int, other: Change) -> Telling:
        change.append(other)
        checks._step, checks._fed = step, (f"batch of step {step}",)
        checks._compare(Mode.HOST)
        return told

    return comparing


def _right(look: Look) -> Look:
    return replace(look, division=replace(OWN, rank=1), fed=("another batch",))


def _later(look: Look) -> Look:
    """In another epoch, with another rate, other weights, and another order."""
    trained = replace(
        look.trained,
        hyperparameters=[{**one, "lr": 0.5} for one in look.trained.hyperparameters],
        weights=dict.fromkeys(look.trained.weights, "others"),
    )
    return replace(_right(look), trained=trained, division=replace(OWN, rank=1, order=(0, 2)), place=Place(2, 1))


def _codes(told: Telling) -> list[str]:
    return [finding.code for finding in told.findings]


def test_replicas_that_train_alike_are_no_finding(compare: Callable[[int, Change], Telling]) -> None:
    assert _codes(compare(2, _right)) == []


def test_epochs_of_different_length_are_told_in_place_of_what_comes_of_them(
    compare: Callable[[int, Change], Telling],
) -> None:
    (finding,) = compare(8, _later).findings
    assert finding.words == (
        "DP09: the epochs of replicas differ in length: replica 0 takes step 3 of epoch 1, and replica 1 step 1 of "
        "epoch 2"
    )


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda look: replace(_later(look), place=Place(1, 3), division=replace(OWN, rank=1)), "DP07 DP07"),
        (lambda look: replace(_right(look), place=Place(1, 3), division=replace(OWN, rank=1, order=(0, 2))), "DP05"),
        (lambda look: replace(_right(look), place=Place(2, 1), division=replace(OWN, rank=1, order=(0, 2))), "DP09"),
        (
            lambda look: replace(_right(look), place=Place(2, 1), division=replace(OWN, rank=1, order=(9, 2))),
            "DP05 DP09",
        ),
    ],
    ids=["rates-in-one-epoch", "epochs-set-apart", "orders-in-two-epochs", "seeds"],
)
def test_what_is_a_mistake_in_any_epoch_is_told_as_such(
    compare: Callable[[int, Change], Telling], change: Change, codes: str
) -> None:
    assert sorted(_codes(compare(8, change))) == codes.split()


def test_a_wrong_sampler_is_told_of_its_own_line(compare: Callable[[int, Change], Telling]) -> None:
    other = "app.py:1: sampler = DistributedSampler(data, seed=rank)"
    told = compare(1, lambda look: replace(_right(look), division=replace(OWN, rank=1, order=(1, 1), where=other)))
    assert [(finding.code, finding.where) for finding in told.findings] == [("DP05", other)]


def test_samples_that_are_fed_twice_are_told_of_the_line_of_the_sampler(
    compare: Callable[[int, Change], Telling],
) -> None:
    def same_samples(look: Look) -> Look:
        return replace(look, division=None)

    assert _codes(compare(1, same_samples)) == []
    assert [(one.code, one.where) for one in compare(2, same_samples).findings] == [("DP04", LINE)]


@pytest.mark.parametrize(
    ("own", "other", "steps"), [(True, True, [8]), (True, False, [2]), (False, True, [2]), (False, False, [2])]
)
def test_random_batches_to_warm_up_with_are_told_if_they_do_not_end(
    compare: Callable[[int, Change], Telling], monkeypatch: pytest.MonkeyPatch, own: bool, other: bool, steps: list[int]
) -> None:
    monkeypatch.setattr(Samplers, "is_waiting", lambda _: own)
    told: dict[int, Sequence[str]] = {}
    for step in (1, 2, 8):
        before = told.get(2, ())
        codes = _codes(compare(step, lambda look: replace(look, division=None, waiting=other)))
        told[step] = codes[len(before) :]
    assert [step for step, codes in told.items() if codes] == steps


@pytest.mark.parametrize(("fed", "codes"), [(False, ["DP04"]), (True, [])])
def test_what_was_taken_for_a_warming_up_is_told_at_the_end_if_no_sampler_has_fed_a_step(
    compare: Callable[[int, Change], Telling], monkeypatch: pytest.MonkeyPatch, fed: bool, codes: list[str]
) -> None:
    monkeypatch.setattr(Samplers, "is_waiting", lambda _: True)
    for step in (1, 2):
        told = compare(step, lambda look: replace(look, division=None))
    assert _codes(told) == []
    watched = watching.current()
    assert watched is not None
    watched.samplers._passes = int(fed)
    monkeypatch.setattr(watched.communicator, "all_gather_object", lambda own: [own, own])
    watching.finish()
    assert _codes(told) == codes


def test_what_another_rank_alone_has_found_is_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both, alone = (Finding("AP06", f"the app {verb}", None, "to_cpu") for verb in ("computes", "saves"))
    told = Telling()
    told.tell(both)
    monkeypatch.setattr(watching, "telling", told)
    shown: list[object] = [(Point(0, ended=True), ({}, found)) for found in ([both], [both, alone], [alone])]
    communicator: Any = SimpleNamespace(
        node_of=[0] * 3,
        all_gather_object=lambda own: shown if own else [own] * 3,
        topology=ALONE,
        allocate_shared=private_window,
    )
    monkeypatch.setattr(watching, "_watching", watching.Watching(communicator))
    assert capsys.readouterr().err == "notice: AP06: the app computes\n  try:   to_cpu\n"
    watching.finish()
    told.summarize()
    assert capsys.readouterr().err == (
        "summary: 2 findings; sambasim app --check looks at every step\n"
        "  AP06: the app computes\n  AP06 (rank 1): the app saves\n  try:   to_cpu\n"
    )


def test_epochs_that_a_check_cuts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check(steps=4)
    whole = list(check.short_epoch(2)(iter(range(5))))
    assert (whole, check.own_report().epochs_cut) == ([0, 1, 2, 3, 4], False)
    cut = list(check.short_epoch(2)(iter(range(9))))
    assert (cut, check.own_report().epochs_cut) == ([0, 1, 2, 3, 8], True)
    list(check.short_epoch(2)(iter(range(5))))
    assert check.own_report().epochs_cut, "of one that was cut before"
    monkeypatch.setattr(context.current(), "arguments", Namespace(grad_accumulation_steps=2))
    assert list(Check(steps=4).short_epoch(2)(iter(range(11)))) == [0, 1, 2, 3, 4, 5, 6, 7, 10]
