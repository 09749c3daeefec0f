"""The trained state of every example and layout as a SHA-256: 20 steps, one thread, every sync path, 1 to 3 replicas.

    python -m tests.golden.states                              # compare this installation with states.json
    python -m tests.golden.states --update                     # write states.json
    python -m tests.golden.states --against PYTHON CHECKOUT    # compare this installation with another one

A config has the `state_sha256` of its run's summary. A SambaFlow app prints no digest: what is hashed is the file of
trained weights that it saves. Another CPU model, torch or Python gives other bits; compare two installations there.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.installation import THIS, Installation

GOLDEN = Path(__file__).with_suffix(".json")
STEPS = 20
REPLICAS = (1, 2, 3)
_IMAGES = 1437
"""The training images of the digits. An app that counts epochs gets the batch size at which one has STEPS steps."""

SYNCS: Mapping[str, Sequence[str]] = {
    "device": ("--data-parallel", "--reduce-on-rdu"),
    "host": ("--data-parallel",),
    "gloo": ("--data-parallel", "--host-sync", "gloo"),
    "parameter-server": ("--data-parallel", "--host-sync", "parameter-server"),
    "emulated": ("--emulate-replicas", "{np}"),
}
APP_SYNCS = ("device", "host")  # apps have no flags for the others; nor do layouts have all
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Config:
    """A file of configs, how it is compiled, its ways to sync, and the ranks of a replica."""

    title: str
    file: str
    pef: str
    syncs: Sequence[str]
    compile: Sequence[str] = ()
    ranks: int = 1


def _layout(name: str, ranks: int = 1, *compile_: str, file: str | None = None) -> Config:
    pef = name.replace(" ", "_")
    flags = (*compile_, "-ws", "1", "--pef-name", pef)
    return Config(f"layout {name}", f"parallelism/{file or pef}.toml", pef, APP_SYNCS, flags, ranks)


CONFIGS = (
    *(_layout(name, 2) for name in ("pipeline", "tensor", "batch")),
    _layout("recompute"),
    _layout("three axes", 4),
    *(_layout(f"zero {stage}", 1, "--zero", str(stage), file="zero") for stage in (1, 2, 3)),
    *(
        Config(f"config {name}", f"{name}.toml", name, tuple(SYNCS))
        for name in ("digits", "logistic_regression", "char_gpt", "lstm_classifier", "resnet")
    ),
)


@dataclass(frozen=True, slots=True)
class App:
    """A script of examples/sambaflow. `batch_size` None: see _IMAGES. `save` makes a run write the file `saved`."""

    name: str
    save: Sequence[str] = ("--checkpoint", "weights.pt")
    saved: str = "weights.pt"
    batch_size: int | None = None
    train: Sequence[str] = ("--num-epochs", "1")
    every: Sequence[str] = ()


APPS = (
    App("logistic_regression"),
    App("feed_forward"),
    App("lenet", save=("--save-folder", "."), saved="epoch_1.pt"),
    App("lstm"),
    App("gpt", batch_size=4, train=("--steps", str(STEPS), "--warmup-steps", "5"),
        every=("--grad-accumulation-steps", "2", "--length", "32")),
    App("bert_mlm", ("--output_dir", "."), "checkpoint.pt", batch_size=8,
        train=("--max_steps", str(STEPS), "--warmup_steps", "5", "--overwrite_output_dir"),
        every=("--max_seq_length", "32", "--max_predictions_per_seq", "6")),
)  # fmt: skip


def states(installation: Installation, only: str) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of each row whose name the regular expression `only` finds."""
    with tempfile.TemporaryDirectory() as folder:
        for config in CONFIGS:
            yield from _states_of_config(installation, config, Path(folder), only)
        for app in APPS:
            yield from _states_of_app(installation, app, Path(folder), only)


def _states_of_config(installation: Installation, config: Config, folder: Path, only: str) -> Iterator[tuple[str, str]]:
    rows = _rows(config.title, config.syncs, only)
    if rows:
        file = str(installation.checkout / "configs" / config.file)
        installation.call("compile", "--config", file, *config.compile, "--data-parallel", folder=folder)
    for row, (replicas, sync) in rows.items():
        flags = [flag.format(np=replicas) for flag in SYNCS.get(sync, ())]
        ranks = config.ranks * (1 if sync == "emulated" else replicas)
        if ranks <= MOST_RANKS:
            yield row, _trained(installation, config.pef, flags, ranks, folder)


def _trained(installation: Installation, pef: str, flags: Sequence[str], ranks: int, folder: Path) -> str:
    common = ("--pef", pef, "--steps", str(STEPS), "--threads", "1", "--no-evaluate", "--json")
    summary = json.loads(installation.call("run", *common, *flags, folder=folder, np=ranks))
    if summary["steps"] != STEPS:
        raise RuntimeError(f"{pef} on {ranks} ranks: {summary['steps']} steps instead of {STEPS}")
    return str(summary["state_sha256"])


def _states_of_app(installation: Installation, app: App, folder: Path, only: str) -> Iterator[tuple[str, str]]:
    script = str(installation.checkout / "examples" / "sambaflow" / f"{app.name}.py")
    compiled = set()
    for row, (np, sync) in _rows(f"app {app.name}", APP_SYNCS, only).items():
        batch_size = app.batch_size or _IMAGES // np // STEPS
        pef = f"{app.name}_{batch_size}"
        common = ("-b", str(batch_size), *app.every)
        if pef not in compiled:
            installation.call("app", script, "compile", *common, "--data-parallel", "--pef-name", pef, folder=folder)
            compiled.add(pef)
        saved = folder / app.saved
        saved.unlink(missing_ok=True)
        flags = (*common, "--pef", pef, "--threads", "1", *app.train, *app.save, *SYNCS.get(sync, ()))
        installation.call("app", script, "run", *flags, folder=folder, np=np)
        yield row, _sha256_of(torch.load(saved))


def _rows(name: str, syncs: Sequence[str], only: str) -> dict[str, tuple[int, str]]:
    """By the name of each row of an example that `only` finds, its number of replicas and its sync path, which is empty
    for one replica."""
    of_counts = ((np, sync) for np in REPLICAS for sync in (syncs if np > 1 else ("",)))
    rows = {f"{name} np {np} {sync}".rstrip(): (np, sync) for np, sync in of_counts}
    return {row: how for row, how in rows.items() if re.search(only, row)}


def _sha256_of(saved: Any) -> str:
    """Over all tensors and numbers of nested dicts and lists, with their paths."""
    digest = hashlib.sha256()
    for path, leaf in sorted(_leaves(saved, ""), key=lambda pair: pair[0]):
        if isinstance(leaf, Tensor):
            digest.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
            digest.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{path} {leaf!r}\n".encode())
    return digest.hexdigest()


def _leaves(saved: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(saved, (dict, list, tuple)):
        for key, value in saved.items() if isinstance(saved, dict) else enumerate(saved):
            yield from _leaves(value, f"{path}/{key}")
    else:
        yield path, saved


def origin(installation: Installation) -> dict[str, str]:
    """What its bits depend on. Python is part of it because two examples train on the text of its documentation."""
    git = ["git", "-C", str(installation.checkout), "rev-parse", "--short", "HEAD"]
    versions_of = "torch.__version__, sys.version.split()[0], torch.backends.cpu.get_cpu_capability()"
    body = f"import sys, torch; print({versions_of})"
    commit, versions = (
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
        for argv in (git, [str(installation.python), "-c", body])
    )
    torch_version, python, torch_cpu = versions.split(maxsplit=2)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = sorted(flag for flag in cpu.get("flags", "").split() if flag.startswith(("avx", "amx", "fma")))
    facts = {"commit": commit, "torch": torch_version, "python": python, "torch_cpu_capability": torch_cpu}
    return {**facts, "cpu": cpu.get("model name", ""), "cpu_vector_flags": " ".join(flags)}


def not_comparable(golden: Mapping[str, Any], installation: Installation) -> str:
    """Why its bits cannot be compared with those of the golden file; empty if they can."""
    recorded, here = golden["recorded_with"], origin(installation)
    different = [key for key in here if key != "commit" and here[key] != recorded[key]]
    return "; ".join(f"{key} is {here[key]}, the golden file has {recorded[key]}" for key in different)


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    return [
        f"{row}: {actual.get(row, 'missing')[:16]}, expected {expected.get(row, 'no such row')[:16]}"
        for row in {**expected, **actual}
        if expected.get(row) != actual.get(row)
    ]


def _recorded(installation: Installation, only: str) -> dict[str, str]:
    rows = {}
    for row, digest in states(installation, only):
        print(f"{digest[:16]}  {row}", flush=True)
        rows[row] = digest
    return rows


def main() -> int:
    """Returns the exit code: 1 if rows differ, 2 if they cannot be compared."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.states", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="Only rows whose name has this: 'np 2 device'.")
    parser.add_argument("--update", action="store_true", help="Write the golden file.")
    parser.add_argument("--against", nargs=2, type=Path, metavar=("PYTHON", "CHECKOUT"), help="Compare with this one.")
    args = parser.parse_args()
    if args.update and args.only:
        parser.error("--update writes all rows: leave out --only")
    if args.update:
        golden = {"recorded_with": origin(THIS), "states": _recorded(THIS, args.only)}
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
        return 0
    if args.against:
        print(f"of {args.against[1]}:")
        expected = _recorded(Installation(*(path.absolute() for path in args.against)), args.only)
        print(f"of {THIS.checkout}:")
    else:
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
        if reason := not_comparable(golden, THIS):
            print(f"The bits cannot be compared: {reason}\nInstead compare with an installation on this machine:")
            print("  python -m tests.golden.states --against OTHER/.venv/bin/python OTHER")
            return 2
        expected = {row: digest for row, digest in golden["states"].items() if re.search(args.only, row)}
    actual = _recorded(THIS, args.only)
    different = differences(expected, actual)
    print("\n".join([*different, f"{len(actual)} rows, {len(different)} differ"]))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
