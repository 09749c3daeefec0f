"""Losses that are NaN or infinite on one replica alone: all ranks stop alike, or leave the same steps out."""

import json
import sys
from pathlib import Path

import pytest

from tests.faults.command import sambasim
from tests.support.damaged import compiled
from tests.support.mpi import run_mpi
from tests.support.whole import whole, whole_case

_RUN = ["run", "--threads", "1"]
_SAMBASIM = [sys.executable, "-m", "sambasim", *_RUN]
_ONE_NAN = 'data.args={inputs={9="nan"}}'
"""Of two replicas that take samples in turns, replica 1 has it in its second batch."""

_LAST_NAN = 'data.args={inputs={47="nan"}}'
EACH_ALONE = {"MPIR_CVAR_NOLOCAL": "1"}
WAYS = {
    "device": ["--reduce-on-rdu"],
    "host": [],
    "gloo": ["--host-sync", "gloo"],
    "server": ["--host-sync", "parameter-server"],
}


@pytest.fixture(scope="module", params=[16, 256], ids=["small", "large"])
def pef(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of few parameters, which each replica updates itself; and of many, which lie once in the node's memory."""
    folder = tmp_path_factory.mktemp("nonfinite")
    return compiled(folder, "optimizer.name=adamw", "optimizer.lr=0.01", width=request.param)


def _run(pef: Path, *flags: str, np: int = 2, env: dict[str, str] | None = None) -> dict[str, object]:
    rest = ["--pef", str(pef), "--no-evaluate", "--json", *flags]
    result = run_mpi(np, [*_SAMBASIM, *rest], env=env).check() if np > 1 else sambasim([*_RUN, *rest], pef.parent)
    assert result.stderr == ""
    summary: dict[str, object] = json.loads(result.stdout)
    return summary


_EVERY_WAY = {**WAYS, "own server": [*WAYS["server"], "--parameter-servers", "1"], "several nodes": ["--reduce-on-rdu"]}
_BY_DEFAULT = ("device", "several nodes")


@pytest.fixture(scope="module")
def emulated(pef: Path) -> dict[str, dict[str, object]]:
    """By damage, none included: what one process comes to that plays both replicas."""
    alone = ["--emulate-replicas", "2", "--on-nonfinite", "skip"]
    return {damage: _run(pef, *alone, *_damaged(damage), np=1) for damage in ("", _ONE_NAN, _LAST_NAN)}


def _damaged(damage: str) -> list[str]:
    return ["--set", damage] if damage else []


def test_a_skipped_step_makes_a_difference(emulated: dict[str, dict[str, object]]) -> None:
    assert [one["skipped_steps"] for one in emulated.values()] == [0, 1, 1]
    assert len({one["state_sha256"] for one in emulated.values()}) == 3


@pytest.mark.parametrize(
    "damage", [whole_case(""), _ONE_NAN, whole_case(_LAST_NAN)], ids=["none", "second step", "last step"]
)
@pytest.mark.parametrize("way", [way if way in _BY_DEFAULT else whole_case(way) for way in _EVERY_WAY])
def test_all_ways_of_syncing_skip_alike(
    way: str, damage: str, pef: Path, emulated: dict[str, dict[str, object]]
) -> None:
    np, env = 3 if way == "own server" else 2, EACH_ALONE if way == "several nodes" else {}
    found = _run(pef, "--on-nonfinite", "skip", *_damaged(damage), *_EVERY_WAY[way], np=np, env=env)
    assert (found["steps"], found["skipped_steps"]) == (6, int(bool(damage)))
    assert found["state_sha256"] == emulated[damage]["state_sha256"]


@whole
def test_skipping_has_the_bits_of_stopping_where_all_is_finite(pef: Path) -> None:
    summaries = [_run(pef, "--reduce-on-rdu", "--on-nonfinite", choice) for choice in ("skip", "stop")]
    assert len({one["state_sha256"] for one in summaries}) == 1


@pytest.mark.parametrize("way", [way if way in _BY_DEFAULT else whole_case(way) for way in WAYS])
def test_all_ranks_stop_alike_and_it_is_told_once(way: str, pef: Path, tmp_path: Path) -> None:
    saved = tmp_path / "w.safetensors"
    command = [*_SAMBASIM, "--pef", str(pef), "--set", _ONE_NAN, "--save", str(saved), *WAYS[way]]
    result = run_mpi(2, command)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error[") == 1
    assert "error[numerics] (every rank): the loss of step 2 is not finite: nan on replica 1 of 2" in result.stderr
    assert f"try:   mpirun -np 2 sambasim run --threads 1 --pef {pef} " in result.stderr
    assert not saved.exists()
