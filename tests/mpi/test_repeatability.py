"""What a job does twice it does alike, also where data draw random numbers; ranks that cannot agree fail."""

from pathlib import Path
from typing import Any

import pytest

from sambasim.records.metrics import SummaryRecord
from tests.faults.command import sambasim
from tests.mpi.training import TWO_NODES, run_of, train
from tests.support.mpi import SAMBASIM, Result, run_job, run_mpi
from tests.support.whole import whole

pytestmark = pytest.mark.usefixtures("fresh")

APP = '''
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

class Table(nn.Module):
    """Its gradient is a scatter that adds: with several threads, in whatever order they arrive."""
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))
        self.head = nn.Linear(64, 4)
    def forward(self, index):
        return self.head(self.table[index].mean(1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x):
        return self.layer(x)

def indices():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, 64, (64, 4096), generator=generator), torch.arange(64) % 4)

def drawn():
    return TensorDataset(torch.tensor(np.random.randn(64, 8), dtype=torch.float32), torch.arange(64) % 4)

class Own(Dataset):
    """Noise from a generator of its own, whose state goes on from sample to sample."""
    def __init__(self):
        self.generator = np.random.default_rng(0)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor(self.generator.standard_normal(8), dtype=torch.float32), index % 4

def by_rank():
    rank = dist.get_rank() if dist.is_initialized() else 0
    return TensorDataset(torch.zeros(128 // (rank + 1), 8), torch.zeros(128 // (rank + 1), dtype=torch.int64))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repeat")
    (folder / "app.py").write_text(APP)
    for name, data in (("Table", "indices"), ("Net", "drawn")):
        command = [*SAMBASIM, "compile", f"app.py:{name}", "--set", f"data.source=app.py:{data}", "-b", "8"]
        choices = ["--set", "loss.name=cross_entropy", "--set", "optimizer.name=sgd", "--set", "optimizer.lr=0.5"]
        assert sambasim([*command[len(SAMBASIM) :], *choices, "--data-parallel"], folder).exit_code == 0
    return folder


def _digest(result: Result) -> str:
    return SummaryRecord.model_validate_json(result.stdout.strip().splitlines()[-1]).state_sha256


def _run(*arguments: str) -> list[str]:
    return [*SAMBASIM, "run", "--json", "--steps", "4", *arguments]


@whole
def test_a_scatter_repeats_with_two_threads(folder: Path) -> None:
    runs = [run_job(_run("--pef", "table", "--threads", "2"), cwd=folder) for _ in range(3)]
    assert len({_digest(run) for run in runs}) == 1


def test_data_that_draw_random_numbers_are_the_same_for_ranks_and_emulation(folder: Path) -> None:
    ways: dict[str, dict[str, Any]] = {"emulated": {"emulate": 2}, "host": {}, "device": {"reduce_on_rdu": True}}
    sources = {"drawn": {"source": "app.py:drawn"}, "own": {"source": "app.py:Own"}}
    path = folder / "out" / "net" / "net.pef"
    named = {f"{name} {way}": (data, how) for name, data in sources.items() for way, how in ways.items()}
    found = train(2, [run_of(name, path, steps=4, data=data, **how) for name, (data, how) in named.items()], cwd=folder)
    for name in sources:
        assert len({found[f"{name} {way}"].outcome for way in ways}) == 1, name


@whole
def test_all_ranks_take_the_same_number_of_threads(folder: Path) -> None:
    """Two nodes of unequal size would give their ranks unequal shares of the cores."""
    env = {**TWO_NODES, "OMP_NUM_THREADS": ""}
    real = run_mpi(3, _run("--pef", "net"), cwd=folder, env=env).check()
    summary = SummaryRecord.model_validate_json(real.stdout.strip().splitlines()[-1])
    fixed = run_mpi(3, _run("--pef", "net", "--threads", str(summary.threads)), cwd=folder, env=env)
    assert summary.state_sha256 == _digest(fixed)


def test_ranks_that_see_other_data_are_refused_and_do_not_wait_for_ever(folder: Path) -> None:
    result = run_mpi(2, _run("--pef", "net", "--data", "app.py:by_rank"), cwd=folder, timeout=30)
    assert result.returncode == 2
    assert "gives replica 0 128 samples to train, but replica 1 64 samples to train" in result.stderr
    assert "give every rank the whole data set" in result.stderr
