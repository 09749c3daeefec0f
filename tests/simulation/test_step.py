"""The predicted step: its parts are its total, and what it is cut for changes nothing but time."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sambasim.cli.main import sambasim
from sambasim.costs.cut import Level
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.pef import read
from sambasim.simulation.step import PredictedStep, predict_step


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    arguments = ["compile", "--data-parallel", "-b", "32", "--output-folder", str(folder), "--json"]
    result = CliRunner().invoke(sambasim, arguments, catch_exceptions=False)
    return Path(json.loads(result.stdout)["pef"])


@pytest.fixture(scope="module")
def program(pef: Path) -> Program:
    return read(pef).program


def _step(
    program: Program, tiles: int | None = None, level: Level = "o3", batch_size: int | None = None
) -> PredictedStep:
    budget = budget_of(load_device("sn30"), load_calibration(), tiles)
    return predict_step(program, budget, level, load_calibration(), batch_size)


def test_the_parts_are_the_total(program: Program) -> None:
    step = _step(program)
    total = step.device_s
    assert sum(section.price.predicted_s for section in step.sections) == pytest.approx(total)
    assert sum(step.device_s_by_kind.values()) == pytest.approx(total)
    assert sum(step.device_s_by_bound.values()) == pytest.approx(total)
    assert step.predicted_s == pytest.approx(total + step.host_s)
    assert step.samples_per_s == pytest.approx(program.batch_size / step.predicted_s)


def test_the_sections_are_those_of_the_compiler(program: Program) -> None:
    assert program.training is not None
    compiled = [
        (section.kind, section.name)
        for section in program.training.sections
        if section.kind in (SectionKind.FWD, SectionKind.BCKWD)
    ]
    step = _step(program)
    assert [
        (one.kind, one.name) for one in step.sections if one.kind in (SectionKind.FWD, SectionKind.BCKWD)
    ] == compiled


@pytest.mark.parametrize("level", ["o0", "o1"])
def test_no_level_is_predicted_faster_than_o3(program: Program, level: Level) -> None:
    assert _step(program).predicted_s <= _step(program, level=level).predicted_s


def test_more_tiles_are_never_slower(program: Program) -> None:
    seconds = [_step(program, tiles=tiles).predicted_s for tiles in range(1, 9)]
    assert seconds == sorted(seconds, reverse=True)


def test_another_batch_size_is_scaled_to(program: Program, tmp_path: Path) -> None:
    arguments = ["compile", "--data-parallel", "-b", "64", "--output-folder", str(tmp_path), "--json"]
    result = CliRunner().invoke(sambasim, arguments, catch_exceptions=False)
    compiled = _step(read(Path(json.loads(result.stdout)["pef"])).program)
    scaled = _step(program, batch_size=64)
    assert scaled.batch_size == compiled.batch_size == 64
    assert scaled.predicted_s == pytest.approx(compiled.predicted_s, rel=0.01)
    traffic = [sum(section.load.traffic_bytes for section in step.sections) for step in (scaled, compiled)]
    assert traffic[0] == pytest.approx(traffic[1], rel=0.01)


def test_an_update_reads_and_writes_each_tensor_once(program: Program) -> None:
    step = _step(program)
    updates = [section for section in step.sections if section.kind is SectionKind.OPT]
    assert len(updates) == len(program.groups)
    for section, group in zip(updates, program.groups, strict=True):
        states = len(program.optimizers[group.optimizer].states)
        assert section.load.traffic_bytes == 4 * group.numel * (3 + 2 * states)
