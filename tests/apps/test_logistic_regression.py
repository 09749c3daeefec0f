"""The logistic regression app: every command, through the door, and the same weights as a plain PyTorch loop."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.quickstart.digits import DigitImages, digits
from tests.support.mpi import ROOT, Result, run_job, run_mpi

APP = ROOT / "examples" / "sambaflow" / "logistic_regression.py"
BATCH, EPOCHS, RATE, MOMENTUM = 32, 2, 0.1, 0.9


class FlatDigits(Dataset[tuple[Tensor, Tensor]]):
    """As in the app."""

    def __init__(self, images: DigitImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        return image.flatten(), label


def _argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sambasim", str(APP), *arguments, "-b", str(BATCH)]


def _run(np: int, folder: Path, *arguments: str) -> Result:
    argv = _argv("run", "--pef", "logreg", "-e", str(EPOCHS), "--threads", "1", *arguments)
    return (run_mpi(np, argv, cwd=folder, timeout=120) if np > 1 else run_job(argv, cwd=folder, timeout=120)).check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the app was compiled."""
    where = tmp_path_factory.mktemp("app")
    argv = _argv("compile", "--data-parallel", "-ws", "2", "--pef-name", "logreg")
    result = run_job(argv, cwd=where, timeout=120).check()
    assert f"PEF file {where}/out/logreg/logreg.pef created\nCompilation succeeded" in result.stdout
    return where


def _weights(folder: Path, np: int, *arguments: str) -> dict[str, Tensor]:
    result = _run(np, folder, "--checkpoint", "weights.pt", *arguments)
    assert "epoch 2: loss" in result.stdout
    assert result.stdout.count("held out: accuracy") == 1, "one rank tells"
    weights: dict[str, Tensor] = torch.load(folder / "weights.pt")
    return weights


def _plainly(replicas: int) -> dict[str, Tensor]:
    """The weights of a loop of plain PyTorch in which one process plays all replicas, two at most.

    The optimizer has all parameters in one flat tensor, padded as a group is: a fused kernel rounds otherwise in the
    tail of a tensor that it cannot go through by whole vectors.
    """
    torch.manual_seed(256)
    layer = nn.Linear(64, 10)
    flat = nn.Parameter(torch.cat([layer.weight.detach().flatten(), layer.bias.detach(), torch.zeros(54)]))
    optimizer = torch.optim.SGD([flat], lr=RATE, momentum=MOMENTUM, fused=True)
    samples = FlatDigits(digits()[0])
    for epoch in range(EPOCHS):
        loaders = []
        for rank in range(replicas):
            sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(samples, replicas, rank)
            sampler.set_epoch(epoch)
            loaders.append(DataLoader(samples, batch_size=BATCH, sampler=sampler, drop_last=True))
        for batches in zip(*loaders, strict=True):
            gradients = [_gradient(layer, image, label) for image, label in batches]
            flat.grad = sum(gradients[1:], gradients[0]) / replicas
            optimizer.step()
            layer.weight.data.copy_(flat.detach()[:640].view(10, 64))
            layer.bias.data.copy_(flat.detach()[640:650])
    return {f"lin_layer.{name}": tensor for name, tensor in layer.state_dict().items()}


def _gradient(layer: nn.Linear, image: Tensor, label: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(layer(image), label)
    weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias])
    return torch.cat([weight.flatten(), bias, torch.zeros(54)])


def _differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads are numerics."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_replica_trains_as_a_plain_loop_does(folder: Path) -> None:
    assert _differences(_weights(folder, 1), _plainly(1)) == []


def test_two_replicas_train_as_a_plain_loop_does_by_either_sync(folder: Path) -> None:
    expected = _plainly(2)
    assert _differences(_weights(folder, 2, "--data-parallel"), expected) == []
    assert _differences(_weights(folder, 2, "--data-parallel", "--reduce-on-rdu"), expected) == []


def test_four_replicas_have_the_same_bits_by_either_sync(folder: Path) -> None:
    host = _weights(folder, 4, "--data-parallel")
    assert _differences(_weights(folder, 4, "--data-parallel", "--reduce-on-rdu"), host) == []
    assert _differences(host, _plainly(2)) != [], "other shards, other weights"


def test_device_and_host_agree(folder: Path) -> None:
    result = run_job(_argv("test", "--pef", "logreg"), cwd=folder, timeout=120).check()
    assert result.stdout == "device and host agree\n"


def test_the_step_is_measured(folder: Path) -> None:
    argv = _argv("measure-performance", "--pef", "logreg", "--data-parallel", "--num-iterations", "5", "--json")
    result = run_mpi(2, argv, cwd=folder, timeout=120).check()
    assert result.stdout.count("\n") == 1
    assert '"replicas": 2, "batch_size": 32, "steps": 5' in result.stdout


def test_another_batch_size_is_another_graph(folder: Path) -> None:
    argv = [*_argv("run", "--pef", "logreg")[:-1], "16"]
    result = run_job(argv, cwd=folder, timeout=120)
    assert result.returncode == 3
    assert "error[pef]: the PEF logreg was compiled from another graph: image is input float32[32, 64]" in result.stderr
