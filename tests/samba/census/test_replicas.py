"""The data-parallel rows of the census on two replicas: the weights are the same on each, and by either sync."""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.samba.harness import LogReg, OnlyOut, batch_of, imported, seeded
from tests.support.door import open_door
from tests.support.mpi import mpirun, run_job
from tests.support.whole import whole

SCRIPT = Path(__file__).with_name("replicas.py")
Digests = Mapping[str, Mapping[int, str]]


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the rows, compiled with --data-parallel -ws 2."""
    folder = tmp_path_factory.mktemp("pefs")
    config = {"output_folder": str(folder), "data_parallel": True, "world_size": 2}
    with open_door():
        samba = imported("samba")

        def compiled(name: str, model: Any, inputs: Any, split: bool = False) -> None:
            samba.from_torch_model_(model)
            parts = [[part] for part in model.parameters()] if split else [model.parameters()]
            optimizers = [samba.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
            samba.session.compile(model, inputs, optimizers, name=name, config_dict=config)

        image, label = batch_of(samba)
        compiled("logreg", seeded(LogReg), [image, label])
        compiled("onlyout", seeded(OnlyOut), [image])
        compiled("optimizers", seeded(LogReg), [image, label], split=True)
        compiled("llm", seeded(LogReg, reduction="none"), {"inputs": image, "targets": label})
    return folder


def _digests(pefs: Path, tmp_path: Path, *sync: str) -> Digests:
    """By row and rank."""
    command = [mpirun(), "-np", "2", sys.executable, "-m", "sambasim", str(SCRIPT), "run"]
    flags = [f"--pef={pefs}/logreg/logreg.pef", f"--pefs={pefs}", "--data-parallel", *sync]
    result = run_job([*command, *flags], cwd=tmp_path, timeout=120).check()
    assert result.stdout.count("world size 2\n") == 1
    told: dict[str, dict[int, str]] = {}
    for line in result.stdout.splitlines():
        if line.startswith("row "):
            _, name, rank, digest = line.split()
            told.setdefault(name, {})[int(rank)] = digest
    return told


@pytest.fixture(scope="module")
def digests(pefs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Digests, Digests]:
    """Of the sync by the host, and of that by the device."""
    with ThreadPoolExecutor(2) as pool:
        syncs: list[list[str]] = [[], ["--reduce-on-rdu"]]
        jobs = [pool.submit(_digests, pefs, tmp_path_factory.mktemp("job"), *sync) for sync in syncs]
        by_host, by_device = (job.result() for job in jobs)
    return by_host, by_device


@whole
def test_both_syncs_and_both_replicas_have_the_same_weights(digests: tuple[Digests, Digests]) -> None:
    by_host, by_device = digests
    assert len(by_host) == SCRIPT.read_text().count('(row: Row) -> None:\n    """')
    for row in by_host:
        assert by_host[row] == by_device[row], row
        assert by_host[row].keys() == {0, 1}, row
        assert len(set(by_host[row].values())) == 1, row
