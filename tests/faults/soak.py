"""Whether the memory of ranks stays flat: a job of two ranks for minutes, with each thing that it may do beside
training, and with all of them. Prints the slope of each rank after the first minute, in kB an hour.

python -m tests.faults.soak [--minutes 10] [--kind workers …]
"""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import click
import numpy as np

from tests.faults.command import sambasim
from tests.faults.strikes import COMPILE, MODEL
from tests.support.mpi import ROOT, SAMBASIM, job_environ, mpirun, processes_of

KINDS = {
    "training": (),
    "workers": ("--workers", "1"),
    "checkpoints": ("--checkpoint-dir", "saved", "--checkpoint-every", "50"),
    "metrics": ("--metrics", "m.jsonl"),
    "evaluation": ("--evaluate",),
}
MOST_KB = 200
"""How much a rank may grow after the first minute."""


def slopes(folder: Path, kind: str, seconds: float) -> list[tuple[float, float]]:
    """For each rank, how much it grows after the first minute: kB in all, and kB an hour."""
    flags = [flag for name, own in KINDS.items() if kind in (name, "all") for flag in own]
    quiet = [] if "--evaluate" in flags else ["--no-evaluate"]
    run = [*SAMBASIM, "run", "--pef", "net", "--threads", "1", "--epochs", "10000000", *flags, *quiet]
    job, used = f"soak{time.time_ns():028}", defaultdict[int, list[tuple[float, int]]](list)
    command, environ = (
        [mpirun(), "-np", "2", *run],
        job_environ(job, {"PYTHONPATH": str(ROOT)}),
    )  # with usual collections
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        began_s = time.monotonic()
        try:
            while time.monotonic() - began_s < seconds:
                time.sleep(2)
                for pid in processes_of(job):
                    try:
                        status = Path(f"/proc/{pid}/status").read_text()
                    except OSError:
                        continue
                    if "RssAnon" in status and (now_s := time.monotonic() - began_s) > min(60, seconds / 3):
                        used[pid].append((now_s, int(status.split("RssAnon:")[1].split()[0])))
        finally:
            process.terminate()
    lasting = [points for points in used.values() if len(points) > seconds / 4 and points[0][1] > 50_000]
    lines = [float(np.polyfit([at for at, _ in points], [kb for _, kb in points], 1)[0]) for points in lasting]
    return [
        (slope * (points[-1][0] - points[0][0]), slope * 3600) for slope, points in zip(lines, lasting, strict=True)
    ]


def prepare(folder: Path) -> None:
    (folder / "net.py").write_text(MODEL.replace("time.sleep(0.002)", "pass"))
    assert sambasim(COMPILE.split(), folder).returncode == 0


@click.command()
@click.option("--minutes", default=10.0)
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*KINDS, "all"]), default=[*KINDS, "all"])
def main(minutes: float, kinds: tuple[str, ...]) -> None:
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for kind in kinds:
            found = slopes(Path(name), kind, minutes * 60)
            worst = max(worst, *(grown for grown, _ in found))
            print(f"{kind}: {', '.join(f'{per_hour:,.0f} kB an hour' for _, per_hour in found)}", flush=True)
    sys.exit(worst > MOST_KB)


if __name__ == "__main__":
    main()
