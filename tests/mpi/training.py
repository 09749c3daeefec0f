"""Many trainings in one MPI job, and what they came to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.machine.communicator import single_rank
from tests.mpi.bodies.train import Run
from tests.mpi.bodies.train import train as train_one
from tests.support.mpi import body_command, run_mpi

TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}
EACH_ALONE = {"MPIR_CVAR_NOLOCAL": "1"}
"""Environments in which MPICH makes several nodes of one machine: two, or one for each rank."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "device": {"reduce_on_rdu": True},
    "mpi": {},
    "gloo": {"host_sync": "gloo"},
    "server": {"host_sync": "parameter-server"},
    "servers": {"host_sync": "parameter-server", "parameter_servers": 1},
}
"""By name of a way to sync: its options."""

EXACT = ("device", "mpi", "server")


class Trained(BaseModel):
    """What a run said on rank 0 or on the emulating one, and what it came to."""

    name: str
    sync: str
    notices: Sequence[str]
    notes: Sequence[str]
    summary: SummaryRecord

    @property
    def outcome(self) -> tuple[object, ...]:
        """What two runs have in common that have the same bits."""
        evaluation, one = self.summary.evaluation, self.summary
        judged = evaluation and (evaluation.samples, evaluation.loss, evaluation.accuracy)
        return one.weights_sha256, one.state_sha256, one.loss_last, one.samples, judged


def run_of(
    name: str,
    pef: Path,
    *,
    steps: int,
    accumulation: int = 1,
    evaluate: bool = False,
    schedule: Mapping[str, object] | None = None,
    data: Mapping[str, object] | None = None,
    emulate: int | None = None,
    round_elements: int | None = None,
    short_bytes: int | None = None,
    late_s: float = 0.0,
    **options: object,
) -> Run:
    """A run of `steps` steps at one thread. `emulate`: alone, with so many replicas."""
    training: dict[str, Any] = {"steps": steps, "accumulation_steps": accumulation}
    overrides = {"training": training | ({"schedule": schedule} if schedule else {})} | ({"data": data} if data else {})
    overrides["evaluation"] = {"enabled": evaluate}
    given = {"pef": str(pef), "threads": 1, "overrides": overrides, **options}
    if emulate is not None:
        given["emulate_replicas"] = emulate
    return Run(name, str(pef), given, emulate is not None, round_elements, short_bytes, late_s)


def runs_of(name: str, pef: Path, ways: Mapping[str, Mapping[str, Any]], **asked: Any) -> list[Run]:
    """A run by each of `ways`, called `NAME WAY`."""
    return [run_of(f"{name} {way}", pef, **asked, **how) for way, how in ways.items()]


def train(
    np: int, runs: Sequence[Run], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, hosts: int = 1
) -> dict[str, Trained]:
    """Train `runs` in one job of `np` ranks; what each came to, by name."""
    argv = [*body_command("train"), json.dumps([asdict(run) for run in runs], default=str)]
    lines = run_mpi(np, argv, timeout=280, env=env, cwd=cwd, hosts=hosts).check().stdout.splitlines()
    found = [Trained.model_validate_json(line) for line in lines if line.startswith("{")]
    assert sorted(one.name for one in found) == sorted(run.name for run in runs)
    return {one.name: one for one in found}


def train_here(runs: Sequence[Run]) -> dict[str, Trained]:
    """As `train` by one rank, but in this process, which need not be started."""
    found = [Trained.model_validate(train_one(run, single_rank("here"))) for run in runs]
    return {one.name: one for one in found}


def of_pef(found: Mapping[str, Trained], path: Path) -> dict[str, Trained]:
    """Of runs that are called `PEF WAY`, those of the PEF at `path`, by way."""
    start = f"{path.stem} "
    return {name.removeprefix(start): one for name, one in found.items() if name.startswith(start)}
