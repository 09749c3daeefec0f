"""What `compare` compares: two runs, PEFs, checkpoints or files of weights or metrics. Each kind imports only what it
needs: runs and metrics are compared without torch."""

from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sambasim.errors import OptionError, WeightsError
from sambasim.options.base import Refused
from sambasim.options.grammar import step_range
from sambasim.pef import check as check_pef
from sambasim.pef import locate, map_weights
from sambasim.records.digests import is_recording, read_recording
from sambasim.records.metrics import read_run
from sambasim.report.compare.runs import compare_metrics, compare_runs
from sambasim.report.tables import Row
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE, checkpoints_in

if TYPE_CHECKING:
    from torch import Tensor


class _Kind(StrEnum):
    RUN = "the digests of a run"
    PEF = "a PEF"
    CHECKPOINT = "a checkpoint"
    WEIGHTS = "a file of weights"
    METRICS = "the metrics of a run"


def compare(a: str, b: str, steps: str | None, output_folder: Path) -> Row:
    """The differences of `a` and `b`, in `steps` alone. Raises OptionError if they are not two of one kind."""
    try:
        wanted = step_range(steps).__contains__
    except Refused as error:
        (problem,) = error.problems
        raise OptionError(f"--steps {problem.given}: {problem.what}", remedy=f"--steps {problem.remedy}") from None
    kind, other = _kind(a, output_folder), _kind(b, output_folder)
    if kind != other:
        raise OptionError(
            f"{a} is {kind}, and {b} is {other}: only two of one kind can be compared",
            remedy=f"sambasim compare {a} OTHER, where OTHER is {kind} too",
        )
    if steps is not None and kind not in (_Kind.RUN, _Kind.METRICS):
        raise OptionError(f"--steps is for runs, and {a} is {kind}", remedy=f"sambasim compare {a} {b}")
    if kind is _Kind.RUN:
        return compare_runs(read_recording(Path(a)), read_recording(Path(b)), wanted)
    if kind is _Kind.METRICS:
        return compare_metrics((a, read_run(Path(a))), (b, read_run(Path(b))), wanted)
    return _tensors_compared(kind, a, b, output_folder)


def _kind(name: str, output_folder: Path) -> _Kind:
    """Raises OptionError if there is nothing called `name`, or nothing that can be compared."""
    path = Path(name)
    if not path.exists():
        try:
            locate(name, output_folder)
        except OptionError:
            what = f"there is nothing called {name}: no folder, no file and no PEF"
            raise OptionError(what, where=f"seen from {Path.cwd()}", remedy="sambasim compare --help") from None
    if not path.is_dir():
        return {".safetensors": _Kind.WEIGHTS, ".jsonl": _Kind.METRICS}.get(path.suffix, _Kind.PEF)
    if is_recording(path):
        return _Kind.RUN
    if (path / MANIFEST_FILE).exists():
        return _Kind.CHECKPOINT
    if there := checkpoints_in(path):
        what = f"{name} is a folder of {len(there)} checkpoints"
        raise OptionError(what, remedy=f"name one of them: {path / there[0].name}")
    raise OptionError(
        f"{name} is a folder without the digests of a run, and not a checkpoint",
        where=str(path / "run.json"),
        remedy=f"sambasim run --pef … --record-digests {name}",
    )


def _tensors_compared(kind: _Kind, a: str, b: str, output_folder: Path) -> Row:
    from sambasim.report.compare.tensors import compare_files, compare_pefs

    if kind is _Kind.WEIGHTS:
        return compare_files("weights", a, b, (_weights(Path(a)), _weights(Path(b))))
    if kind is _Kind.CHECKPOINT:
        from sambasim.runtime.checkpoint.changes import differences
        from sambasim.runtime.checkpoint.content import check

        ours, theirs = check(Path(a)), check(Path(b))
        changes = differences(ours.manifest, theirs.manifest)
        facts = [Row(name=change.name, a=change.before, b=change.now) for change in changes]
        return compare_files("checkpoints", a, b, (ours.tensors(), theirs.tensors()), facts)
    paths = locate(a, output_folder), locate(b, output_folder)
    left, right = ((str(path), check_pef(path)) for path in paths)
    read_left, read_right = (partial(map_weights, path, check=False) for path in paths)
    return compare_pefs(left, right, (read_left, read_right))


def _weights(path: Path) -> "Mapping[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    remedy = "a file of sambasim run --save FILE.safetensors"
    if not path.is_file():
        raise WeightsError(f"the weights file {path} is not there", remedy=remedy)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}", remedy=remedy) from error
