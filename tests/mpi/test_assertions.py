"""An assertion of the model ends a run in the step in which it does not hold, with its line, on every path."""

from pathlib import Path

import pytest

from tests.faults.command import sambasim
from tests.support.mpi import SAMBASIM, run_mpi
from tests.support.whole import whole_case

MODEL = """\
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.first(x).relu()).relu()
        assert h.abs().max() < 50, "activations are too large"
        return self.last(h)

def samples(large: int = 37) -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    x[large:] *= 1e4
    return TensorDataset(x, torch.arange(64) % 5)
"""
COMPILED = (
    *("net.py:Net", "--set", "data.source=net.py:samples", "--set", "loss.name=cross_entropy"),
    *("--set", "optimizer.name=sgd", "--set", "data.shuffle=false", "-b", "4", "--pef-name", "net"),
)
ASSERTING = """\
        assert h.abs().max() < 50, "activations are too large"
"""
RAISING = """\
        if h.abs().max() >= 50:
            raise ValueError("activations are too large")
"""
ASSERTED = (
    "an assertion of the model does not hold: activations are too large",
    'where: net.py:14: assert h.abs().max() < 50, "activations are too large"',
)
RAISED = ("raise ValueError('activations are too large')", "where: net.py:14: if h.abs().max() >= 50:")
PATHS = {
    "plain": ("", ""),
    "raising": ("", ""),
    "inductor": ("", "--engine inductor"),
    "emulated": ("--data-parallel", "--emulate-replicas 2"),
    "pipeline": ("--pipeline-stages 2 --micro-batches 2", "2 ranks"),
    "tensor": ("--tensor-parallel weight --n-chips 2", "2 ranks"),
}


@pytest.mark.parametrize("path", [path if path == "pipeline" else whole_case(path) for path in PATHS])
def test_an_assertion_that_does_not_hold_ends_the_run(path: str, tmp_path: Path) -> None:
    raises = path == "raising"  # in a branch, which is an assertion too
    (tmp_path / "net.py").write_text(MODEL.replace(ASSERTING, RAISING) if raises else MODEL)
    compiled, ran = PATHS[path]
    sambasim(["compile", *COMPILED, *compiled.split()], tmp_path).check()
    run = ["run", "--pef", "net", "--no-evaluate"]
    sambasim([*run, *ran.replace("2 ranks", "").split(), "--set", "data.args.large=64"], tmp_path).check()
    if ran == "2 ranks":
        ended = run_mpi(2, [*SAMBASIM, *run], cwd=tmp_path, timeout=120)
    else:
        ended = sambasim([*run, *ran.split()], tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "error[assertion]" in ended.stderr
    assert all(words in ended.stderr for words in (RAISED if raises else ASSERTED))
