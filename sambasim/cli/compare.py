"""`sambasim compare`: the first difference between two runs, PEFs, checkpoints or files of weights."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli import shared
from sambasim.cli.terminal import show

if TYPE_CHECKING:
    from torch import Tensor

    from sambasim.report.compare import Compared

_WEIGHTS, _METRICS = ".safetensors", ".jsonl"


class _Kind(StrEnum):
    RUN = "the digests of a run"
    PEF = "a PEF"
    CHECKPOINT = "a checkpoint"
    WEIGHTS = "a file of weights"
    METRICS = "the metrics of a run"


@click.command("compare")
@click.argument("a")
@click.argument("b")
@click.option("--steps", metavar="FIRST-LAST", help="For runs and metrics: only these steps, such as 17, 1-40 or 100-.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line with all differences.")
@shared.output_folder
def compare_command(a: str, b: str, steps: str | None, as_json: bool, output_folder: Path) -> None:
    """Find the first difference between two runs, PEFs, checkpoints or weights.

    A and B are two folders of `run --record-digests`, two PEFs (paths or names), two checkpoints, two .safetensors
    files of weights, or two .jsonl files of `run --metrics`. For runs, it is the first step, section and tensor that
    differ. If the runs have other threads, or another engine, torch or CPU, their bits may differ; the output says so
    first.

    The exit code is 0 if all bits are equal, 1 if something differs or is missing in A or B, and 2 or more for errors.
    A run may start later than the other, as a resumed one does.

    \b
    Examples:
      mpirun -np 2 sambasim run --pef digits --steps 40 --record-digests a
      mpirun -np 2 sambasim run --pef digits --steps 40 --record-digests b --reduce-on-rdu
      sambasim compare a b
      sambasim compare digits other/digits.pef
      sambasim compare saved/step-0000000050 elsewhere/step-0000000050
      sambasim compare before.safetensors after.safetensors --json
    """
    from sambasim.errors import OptionError
    from sambasim.options.grammar import step_range
    from sambasim.options.load import Refused

    try:
        wanted = step_range(steps)
    except Refused as error:
        (problem,) = error.problems
        raise OptionError(f"--steps {problem.given}: {problem.what}", remedy=f"--steps {problem.remedy}") from None
    _check_there(a, b, output_folder)
    kinds = _kind(a), _kind(b)
    if kinds[0] != kinds[1]:
        raise OptionError(
            f"{a} is {kinds[0]}, and {b} is {kinds[1]}: only two of one kind can be compared",
            remedy=f"sambasim compare {a} OTHER, where OTHER is {kinds[0]} too",
        )
    if steps is not None and kinds[0] not in (_Kind.RUN, _Kind.METRICS):
        raise OptionError(f"--steps is for runs, and {a} is {kinds[0]}", remedy=f"sambasim compare {a} {b}")
    found = _compared(kinds[0], a, b, wanted.__contains__, output_folder)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        from sambasim.report.compare import comparison

        show(*comparison(found))
    if not found.equal:
        click.get_current_context().exit(1)


def _kind(name: str) -> _Kind:
    from sambasim.errors import OptionError
    from sambasim.records.digests import is_recording
    from sambasim.runtime.checkpoint.folder import MANIFEST_FILE, checkpoints_in

    path = Path(name)
    if path.is_dir():
        if is_recording(path):
            return _Kind.RUN
        if (path / MANIFEST_FILE).exists():
            return _Kind.CHECKPOINT
        if there := checkpoints_in(path):
            raise OptionError(
                f"{name} is a folder of {len(there)} checkpoints",
                remedy=f"name one of them: {path / there[0].name}",
            )
        raise OptionError(
            f"{name} is a folder without the digests of a run, and not a checkpoint",
            where=str(path / "run.json"),
            remedy=f"sambasim run --pef … --record-digests {name}",
        )
    return {_WEIGHTS: _Kind.WEIGHTS, _METRICS: _Kind.METRICS}.get(path.suffix, _Kind.PEF)


def _check_there(a: str, b: str, output_folder: Path) -> None:
    """Raises OptionError if A or B does not exist."""
    from sambasim.errors import OptionError
    from sambasim.pef import locate

    for name in (a, b):
        if not Path(name).exists():
            try:
                locate(name, output_folder)
            except OptionError:
                what = f"there is nothing called {name}: no folder, no file and no PEF"
                raise OptionError(what, where=f"seen from {Path.cwd()}", remedy="sambasim compare --help") from None


def _compared(kind: _Kind, a: str, b: str, wanted: Callable[[int], bool], output_folder: Path) -> "Compared":
    """Compare A and B. Each kind imports only what it needs: runs and metrics are compared without torch."""
    if kind is _Kind.RUN:
        from sambasim.records.digests import read_recording
        from sambasim.report.compare.runs import compare_runs

        return compare_runs(read_recording(Path(a)), read_recording(Path(b)), wanted)
    if kind is _Kind.METRICS:
        from sambasim.records.metrics import read_run
        from sambasim.report.compare.runs import compare_metrics

        return compare_metrics((a, read_run(Path(a))), (b, read_run(Path(b))), wanted)
    from sambasim.report.compare.tensors import compare_files, compare_pefs

    if kind is _Kind.CHECKPOINT:
        return _compared_checkpoints(a, b)
    if kind is _Kind.WEIGHTS:
        return compare_files("weights", a, b, (_weights(Path(a)), _weights(Path(b))))
    from functools import partial

    from sambasim.pef import check as check_pef
    from sambasim.pef import locate, map_weights

    paths = locate(a, output_folder), locate(b, output_folder)
    ours, theirs = ((str(path), check_pef(path)) for path in paths)
    return compare_pefs(
        ours, theirs, (partial(map_weights, paths[0], check=False), partial(map_weights, paths[1], check=False))
    )


def _compared_checkpoints(a: str, b: str) -> "Compared":
    from sambasim.report.compare import Fact
    from sambasim.report.compare.tensors import compare_files
    from sambasim.runtime.checkpoint.changes import differences
    from sambasim.runtime.checkpoint.content import check

    ours, theirs = check(Path(a)), check(Path(b))
    apart = differences(ours.manifest, theirs.manifest)
    facts = tuple(Fact(name=one.name, a=one.before, b=one.now) for one in apart)
    return compare_files("checkpoints", a, b, (ours.tensors(), theirs.tensors()), facts)


def _weights(path: Path) -> "Mapping[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from sambasim.errors import WeightsError

    remedy = "a file of sambasim run --save FILE.safetensors"
    if not path.is_file():
        raise WeightsError(f"the weights file {path} is not there", remedy=remedy)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}", remedy=remedy) from error
