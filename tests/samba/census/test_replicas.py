"""The data-parallel rows of the census on two replicas: the weights are the same on each, and by either sync."""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.samba.harness import MOMENTUM, LogReg, OnlyOut, batch_of, compiled, with_sgd
from tests.support.mpi import run_mpi
from tests.support.whole import whole

SCRIPT = Path(__file__).with_name("replicas.py")


def _compile_all(folder: Path) -> None:
    """The models of the rows, with --data-parallel -ws 2."""
    image, label = batch_of()
    models: tuple[tuple[str, Any, Any], ...] = (
        ("logreg", LogReg, [image, label]),
        ("onlyout", OnlyOut, [image]),
        ("llm", partial(LogReg, reduction="none"), {"inputs": image, "targets": label}),
    )
    for name, make, inputs in models:
        compiled(with_sgd(make, momentum=MOMENTUM), inputs, folder, name, data_parallel=True, world_size=2)


def _digests(folder: Path, *sync: str) -> Mapping[str, Mapping[str, str]]:
    own = folder / f"run{''.join(sync)}"
    own.mkdir()
    flags = [f"--pef={folder}/logreg/logreg.pef", f"--pefs={folder}", "--data-parallel", *sync]
    result = run_mpi(2, [sys.executable, "-m", "sambasim", str(SCRIPT), "run", *flags], cwd=own, timeout=120).check()
    digests: dict[str, dict[str, str]] = {}
    for line in result.stdout.splitlines():
        if line.startswith("row "):
            _, name, rank, digest = line.split()
            digests.setdefault(name, {})[rank] = digest
    return digests


@whole
def test_both_syncs_and_both_replicas_have_the_same_weights(tmp_path: Path) -> None:
    _compile_all(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(partial(_digests, tmp_path, *sync)) for sync in ([], ["--reduce-on-rdu"])]
        by_host, by_device = (job.result() for job in jobs)
    assert len(by_host) == SCRIPT.read_text().count('(row: Row) -> None:\n    """'), "every row ran"
    assert by_host == by_device
    for row, digests in by_host.items():
        assert digests.keys() == {"0", "1"}, row
        assert digests["0"] == digests["1"], row
