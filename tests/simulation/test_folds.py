"""Folds: every section in one fold, and only equal ones together; layers that repeat are folded."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.costs.cut import Level
from sambasim.ir.graph import SectionKind
from sambasim.report.analysis import Analysis, Run, runs_of
from sambasim.report.simulation import simulation_json, simulation_report
from sambasim.report.tables import Tables
from sambasim.simulation.prediction import Prediction, predict
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.simulation.test_advice import predicted
from tests.simulation.test_laws import _perceptron


@given(st.text("abc", max_size=40))
def test_runs_are_the_sections_in_order(keys: str) -> None:
    runs = runs_of(keys)
    assert "".join(keys[run.start : run.start + run.period] * run.count for run in runs) == keys
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert all(run.period == 1 for run in runs if run.count == 1)


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ("", []),
        ("abc", [Run(0, 1, 1), Run(1, 1, 1), Run(2, 1, 1)]),
        ("xababaz", [Run(0, 1, 1), Run(1, 2, 2), Run(5, 1, 1), Run(6, 1, 1)]),
        ("aabaabaab", [Run(0, 3, 3)]),
        ("aaaa", [Run(0, 1, 4)]),
        ("e" + "pqr" * 36 + "h" + "rqp" * 36, [Run(0, 1, 1), Run(1, 3, 36), Run(109, 1, 1), Run(110, 3, 36)]),
    ],
)
def test_the_longest_run_with_the_shortest_period(keys: str, runs: list[Run]) -> None:
    assert runs_of(keys) == runs


@pytest.fixture(scope="module", params=["o0", "o1"])
def deep(request: pytest.FixtureRequest) -> Prediction:
    level: Level = request.param
    return predicted(_perceptron(width=1024, depth=30), level=level, tiles=1)


def test_layers_are_folded_and_only_equal_sections_are_together(deep: Prediction) -> None:
    step, folds = deep.alone, Analysis(deep).folds
    assert sorted(number for fold in folds for number in fold) == list(range(len(step.sections)))
    assert len(folds) < len(step.sections)
    for fold in folds:
        sections = [step.sections[number] for number in fold]
        assert len({(one.kind, one.price, one.load) for one in sections}) == 1
    slower = tuple(replace(one, price=replace(one.price, fill_s=number)) for number, one in enumerate(step.sections))
    other = Analysis(deep)
    other.step = replace(step, sections=slower)
    assert len(other.folds) == len(slower), "of other times"


def test_the_table_ranks_by_the_sum_and_json_keeps_every_section(
    deep: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    program, level = deep.program, deep.level
    prediction = predict(program, deep.device, deep.tiles, level, deep.cluster, (1,), micro_steps=3)
    found = Analysis(prediction)
    (line,) = simulation_json(prediction, [SyncPath.RDU])
    record = json.loads(line)
    assert len(record["sections"]) == len(found.step.sections)
    sums: dict[int, float] = {}
    for section in record["sections"]:
        runs = 3 if section["kind"] in (SectionKind.FWD, SectionKind.BCKWD) else 1
        sums[section["fold"]] = sums.get(section["fold"], 0.0) + runs * section["predicted_s"]
    assert sum(sums.values()) == pytest.approx(found.step.device_s)
    assert [found.fold_s(fold) for fold in found.folds] == pytest.approx([sums[number] for number in range(len(sums))])
    largest = max(found.folds, key=found.fold_s)
    printed = str(Tables(simulation_report([prediction], [SyncPath.RDU], 3), None))
    first = printed.partition("slowest sections")[2].splitlines()[4].split()
    count = len(largest)
    assert first[: 1 + (count > 1)] == [str(largest[0]), f"x{count}"][: 1 + (count > 1)]
    total, each = (format_seconds(one) for one in (found.fold_s(largest), found.fold_s(largest) / 3 / count))
    assert f"{total} {found.runs_in_step(largest)} {each}" in " ".join(first)
    assert found.runs_in_step(largest) == 3 * count
    section = found.step.sections[largest[0]]
    assert f" {section.unit_share:.0%} {section.chip_share:.0%} " in " ".join(first)
    assert record["sections"][largest[0]]["unit_share"] == section.unit_share
    assert record["sections"][largest[0]]["chip_share"] == section.chip_share
