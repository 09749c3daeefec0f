"""An example app in a test: compiled once, started in several ways, and compared with a plain PyTorch loop.

A class that derives from ExampleTests has an `example` and a plain loop; the tests come with the class. Its fixture
`app` is the App, compiled in its own folder; `in_bf16` is it in bf16. `App.call` starts an app so:

    app       sambasim app SCRIPT.py run …
    check     sambasim app --check SCRIPT.py run …
    module    python -m sambasim SCRIPT.py run …
    env       eval "$(sambasim env)", and then python SCRIPT.py run …
    direct    python COPY.py run …, of a copy that imports `sambasim` where the script imports `sambaflow`
"""

import re
import shlex
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

import pytest
import torch
from torch import Tensor

from tests.support.mpi import ROOT, Result, mpirun, run_job
from tests.support.whole import whole, whole_case

SCRIPTS = ROOT / "examples" / "sambaflow"
DATA_PARALLEL = ("--data-parallel", "-ws", "2")
HOST, DEVICE = ("--data-parallel",), ("--data-parallel", "--reduce-on-rdu")

STARTS = {
    "app": [str(Path(sys.executable).parent / "sambasim"), "app"],
    "check": [str(Path(sys.executable).parent / "sambasim"), "app", "--check"],
    "module": [sys.executable, "-m", "sambasim"],
    "env": [sys.executable],
    "direct": [sys.executable],
}
"""What stands before SCRIPT.py."""

_IMPORT = re.compile(r"^(\s*(?:from|import) )sambaflow( import samba\b|\.samba\b)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """`name` is that of SCRIPTS/NAME.py, and of its PEF.

    printed: a regular expression for what `run` prints in one line, of one rank
    every, train: further flags of every command, and of `run`
    rounds: how many epochs, or steps, a `run` trains, by `rounds_flag`
    save: flags of `run` that make it write weights
    saved: the file with them: a state_dict of the model, or a dict with one as "model"
    """

    name: str
    printed: str
    batch_size: int = 32
    rounds: int = 2
    save: tuple[str, ...] = ("--checkpoint", "weights.pt")
    saved: str = "weights.pt"
    every: tuple[str, ...] = ()
    rounds_flag: str = "-e"
    train: tuple[str, ...] = ()

    @property
    def training(self) -> tuple[str, ...]:
        return self.rounds_flag, str(self.rounds), *self.train


@dataclass(frozen=True, slots=True)
class App:
    """An example, and the folder in which its commands are called."""

    example: Example
    folder: Path

    def compile(self, *flags: str, pef: str | None = None) -> Result:
        """Compile it, by default for two replicas and more."""
        return self.call("compile", *(flags or DATA_PARALLEL), "--pef-name", pef or self.example.name)

    def weights(self, np: int, *flags: str, way: str = "module") -> dict[str, Tensor]:
        """Train on `np` replicas; the weights that the app has written. Fails the test if it warns of anything."""
        path = self.folder / self.example.saved
        path.unlink(missing_ok=True)
        result = self.call("run", *self.example.training, *self.example.save, *flags, np=np, way=way)
        printed = [line for line in result.stdout.splitlines() if re.search(self.example.printed, line)]
        assert len(printed) == 1, result.stdout
        assert result.stderr == ""
        saved = torch.load(path)
        weights: dict[str, Tensor] = saved.get("model", saved)
        return weights

    def call(
        self, command: str, *flags: str, np: int = 1, way: str = "module", pef: str | None = None, check: bool = True
    ) -> Result:
        """One command of the app, under mpirun if `np` is above 1, by default with the PEF that all commands share.
        Fails the test unless it exits with 0, if that is to be checked."""
        words = [command, "-b", str(self.example.batch_size), *self.example.every]
        if command != "compile":
            words += ["--pef", pef or self.example.name, "--threads", "1"]
        argv = [*([mpirun(), "-np", str(np)] if np > 1 else []), *self._start(way), *words, *flags]
        if way == "env":
            argv = ["sh", "-c", f'eval "$(sambasim env)" && exec {shlex.join(argv)}']
        result = run_job(argv, timeout=180, cwd=self.folder)
        return result.check() if check else result

    def module(self) -> Namespace:
        """What the copy with the direct imports defines."""
        folder = self._copies()
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))  # a script may import others that lie beside it
            return Namespace(**run_path(str(folder / f"{self.example.name}.py"), run_name=self.example.name))

    def _start(self, way: str) -> Sequence[str]:
        folder = self._copies() if way == "direct" else SCRIPTS
        return [*STARTS[way], str(folder / f"{self.example.name}.py")]

    def _copies(self) -> Path:
        """The folder of scripts that import `sambasim` where the examples import `sambaflow`."""
        folder = self.folder / "direct"
        folder.mkdir(exist_ok=True)
        for script in SCRIPTS.glob("*.py"):
            (folder / script.name).write_text(_IMPORT.sub(r"\1sambasim\2", script.read_text()))
        return folder


class ExampleTests(ABC):
    """What holds for every example. A class that derives from it gives `example` and `plainly`."""

    example: Example

    @abstractmethod
    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        """The weights of a plain PyTorch loop in fp32 that trains as long as `app.example` says."""

    @whole
    def test_one_replica_trains_as_a_plain_loop_does(self, app: App) -> None:
        assert differences(app.weights(1, way="direct"), self.plainly(app, 1)) == []

    @pytest.mark.parametrize(
        ("np", "host_way", "device_way"), [(2, "direct", "env"), whole_case(4, "module", "app")], ids=["2", "4"]
    )
    def test_replicas_train_as_a_plain_loop_does_by_either_sync(
        self, np: int, host_way: str, device_way: str, app: App
    ) -> None:
        expected = self.plainly(app, np)
        assert differences(app.weights(np, *HOST, way=host_way), expected) == []
        assert differences(app.weights(np, *DEVICE, way=device_way), expected) == []

    @whole
    @pytest.mark.parametrize("compiled", ["app", "in_bf16"])
    def test_device_and_host_agree(self, compiled: str, request: pytest.FixtureRequest) -> None:
        """The loss, the outputs and the gradients of one step, within the tolerances of the app."""
        result = request.getfixturevalue(compiled).call("test", way="app")
        assert (result.stdout, result.stderr) == ("device and host agree\n", "")

    @whole
    def test_a_check_finds_nothing(self, app: App) -> None:
        result = app.call("run", *app.example.training, "--data-parallel", np=2, way="check")
        assert result.stdout.splitlines()[-1].endswith(": no finding")
        assert result.stderr == ""

    @whole
    def test_the_step_is_measured(self, app: App) -> None:
        result = app.call("measure-performance", "--num-iterations", "5", "--json", way="direct")
        assert result.stdout.count("\n") == 1
        assert f'"replicas": 1, "batch_size": {app.example.batch_size}, "steps": 5' in result.stdout
        assert result.stderr == ""


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that are not equal bit for bit. Fails the test if there are other names in one."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
