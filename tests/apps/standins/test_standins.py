"""Apps as public repositories write them: each one compiles, trains and is measured unchanged.

By default one of them is compiled and trained, on one replica and on two with each sync; `make test-whole` runs all of
them, the other commands, and four replicas.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.mpi import ROOT, Result, mpirun, run_job
from tests.support.whole import whole, whole_case

SCRIPTS = ROOT / "tests" / "apps" / "standins"
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class StandIn:
    """SCRIPTS/`name`.py, and how it is called.

    printed: a regular expression that one line of what `run` prints must match
    flags: of every command
    first: what follows the command `run` itself
    train: further flags of `run`
    saves: files that `run` writes
    shards: whether the replicas train on different samples, so that weights depend on their number
    notice: a regular expression that the stderr of two replicas must match
    """

    name: str
    printed: str
    flags: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    shards: bool = False
    notice: str = ""


LOSS = r"[Ll]oss:? \d+\.\d{4}"
SAME_SAMPLES = r"DP04: .*same samples"
DEFAULT = "old_names"

STAND_INS = (
    StandIn(
        "bert",
        rf"step 6 {LOSS}",
        flags=("-b", "4"),
        train=("--output_dir", "hf"),
        saves=("hf/config.json",),
        notice=SAME_SAMPLES,
    ),
    StandIn("llm_dp", rf"step 6: {LOSS}", flags=("-b", "2"), first=("training.steps=6",), shards=True),
    StandIn("old_names", rf"Epoch: 1 {LOSS}", notice=SAME_SAMPLES),
)


@dataclass(frozen=True, slots=True)
class App:
    """A stand-in that was compiled in a folder of its own."""

    stand_in: StandIn
    folder: Path

    def call(self, command: str, *flags: str, np: int = 1) -> Result:
        """One command of it, on `np` replicas. Fails the test unless it exits with 0 and without a traceback."""
        of = self.stand_in
        launcher = [mpirun(), "-np", str(np)] if np > 1 else []
        words = [command, *(of.first if command == "run" else ()), *of.flags, *flags]
        script = str(SCRIPTS / f"{of.name}.py")
        result = run_job(
            [*launcher, sys.executable, "-m", "sambasim", script, *words], timeout=TIMEOUT_S, cwd=self.folder
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result.check()

    def with_pef(self, command: str, *flags: str, np: int = 1) -> Result:
        name = self.stand_in.name
        return self.call(command, "--pef", f"out/{name}/{name}.pef", *flags, np=np)

    def run(self, *flags: str, np: int = 1) -> Result:
        return self.with_pef("run", *self.stand_in.train, *flags, np=np)

    def by_either_sync(self, np: int) -> tuple[Result, Result]:
        """Trained on `np` replicas: with sync through the host, and on the device."""
        return self.run("--data-parallel", np=np), self.run("--data-parallel", "--reduce-on-rdu", np=np)


@pytest.fixture(
    scope="module",
    params=[pytest.param(of, id=of.name, marks=() if of.name == DEFAULT else whole) for of in STAND_INS],
)
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> App:
    """Each stand-in, compiled for two replicas and more."""
    app = App(request.param, tmp_path_factory.mktemp(request.param.name))
    compiled = app.call("compile", "--data-parallel", "-ws", "2", "--pef-name", request.param.name)
    assert "Compilation succeeded" in compiled.stdout
    return app


@pytest.fixture(scope="module")
def alone(app: App) -> Result:
    """What a `run` on one replica printed."""
    return app.run()


def test_one_replica_trains_and_saves(app: App, alone: Result) -> None:
    assert re.search(app.stand_in.printed, alone.stdout, re.MULTILINE), alone.stdout
    assert [name for name in app.stand_in.saves if not (app.folder / name).stat().st_size] == []


@pytest.mark.parametrize("np", [2, whole_case(4)])
def test_replicas_train_equally_by_either_sync(app: App, alone: Result, np: int) -> None:
    """Replicas that get the same samples end where one replica does: the mean of equal gradients is exact."""
    host, device = app.by_either_sync(np)
    assert re.search(app.stand_in.notice, host.stderr), host.stderr
    assert weights(host) == weights(device)
    assert (weights(host) != weights(alone)) == app.stand_in.shards


@whole
def test_device_and_host_agree(app: App) -> None:
    assert app.with_pef("test").stdout.endswith("test passed\n")


@whole
def test_steps_and_sections_are_measured(app: App) -> None:
    assert "samples/s" in app.with_pef("measure-performance").stdout
    assert " BCKWD " in app.with_pef("measure-sections").stdout


def weights(result: Result) -> str:
    """The digest of the weights that rank 0 printed."""
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("weights "))
    return line
