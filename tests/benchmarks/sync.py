"""Gradient sync alone, of 64 KiB to 64 MiB on two ranks: device sync against gloo, MPI's Allreduce, and copying."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from sambasim.records.collectives import CollectivesRecord, SizeRecord
from sambasim.units import KIB, MIB, format_bytes
from tests.benchmarks.measure import Figure
from tests.support.mpi import ROOT, mpirun

_TIMEOUT_S = 900.0
_COPY = "copying as many bytes"

_SIZES_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_GOALS = (
    (64 * KIB, "mpi", "ratio at most 1"),
    (64 * KIB, "mpi-in-place", "none: what an MPI saves by one buffer"),
    *((size_bytes, "gloo", "ratio at most 0.1") for size_bytes in _SIZES_BYTES),
    *((size_bytes, "mpi", "ratio at most 0.2") for size_bytes in _SIZES_BYTES),
    *((size_bytes, "mpi-in-place", "none: what an MPI saves by one buffer") for size_bytes in _SIZES_BYTES),
    *((size_bytes, _COPY, "ratio at most 1.1") for size_bytes in (16 * MIB, 64 * MIB)),
)
"""The size, whom device sync is measured against, and what is to hold."""


def figures() -> Iterator[Figure]:
    """One run of `sambasim bench collectives` at np 2, and from it a figure for each goal."""
    sizes = {size.size_bytes: size for size in _measured().sizes}
    for size_bytes, peer, goal in _GOALS:
        times_s = _times_s(sizes[size_bytes])
        medians = {"device": times_s["device"], peer: times_s[peer]}
        yield Figure(f"sync of {format_bytes(size_bytes)}", "device", peer, goal, medians)


def _measured() -> CollectivesRecord:
    choices = ["--min-bytes", "64KiB", "--max-bytes", "64MiB", "--paths", "device,mpi,mpi-in-place,gloo", "--json"]
    command = [mpirun(), "-np", "2", sys.executable, "-m", "sambasim", "bench", "collectives", *choices]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    return CollectivesRecord.model_validate_json(result.stdout)


def _times_s(size: SizeRecord) -> Mapping[str, float]:
    """By name, the medians of the paths and of the copy."""
    return {path.path: path.measured_s for path in size.paths} | {_COPY: size.copy_bound_s}
