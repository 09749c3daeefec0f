"""What `report` writes of a run, a PEF or a model, and `compare` of two of a kind, each with its own imports."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sambasim.errors import OptionError
from sambasim.files import check_output_files, check_output_folder, in_memory
from sambasim.options.grammar import step_range
from sambasim.options.problem import Refused, show
from sambasim.pef import locate, read
from sambasim.records.digests import is_recording, read_recording
from sambasim.records.metrics import read_run
from sambasim.report.compare import compare_metrics
from sambasim.report.compare.recordings import compare_runs
from sambasim.report.tables import Row
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE, checkpoints_in

if TYPE_CHECKING:
    from torch import Tensor

    from sambasim.commands.question import OnPhase, Question


def _check_outputs(subject: str, page: Path | None, tables: Path | None, *inputs: Path | None) -> None:
    """Raises OptionError if there are none, or they cannot be written, or would overwrite one of `inputs`."""
    if page is None and tables is None:
        raise OptionError("no output is named", remedy=f"sambasim report {subject} --html FILE.html")
    check_output_files({"--html": ("the page", page)}, *inputs)
    if tables is not None:
        check_output_folder(tables, "the tables", "another place: --tables FOLDER")


def measured(subject: str, page: Path | None, flags: Sequence[str]) -> dict[Path, str]:
    """The page about a run. Raises OptionError for `flags`, which are for predictions."""
    from sambasim.report.page import measured_page

    run = Path(subject)
    if flags:
        what = f"{subject} is a run, and {', '.join(flags)} is for predictions about a PEF"
        remedy = f"sambasim report NAME.pef --run {shlex.quote(subject)} --html {page or 'FILE.html'}"
        raise OptionError(what, remedy=remedy)
    _check_outputs(subject, page, None, run)
    return {page: measured_page(read_run(run), run.name)} if page else {}


def predicted_texts(
    question: "Question", page: Path | None, tables: Path | None, run: Path | None, on_phase: "OnPhase"
) -> dict[Path, str]:
    """What is predicted, with the measurements of a `run` of the PEF, by file."""
    from sambasim.commands.question import is_model, predicted_alone
    from sambasim.report.formats import section_report_csv, summary_json
    from sambasim.report.page import predicted_page
    from sambasim.simulation.sync import SyncPath

    subject = question.subject
    _check_outputs(subject, page, tables)
    pef = None if is_model(subject) else locate(subject, question.output_folder)
    if pef is None and run is not None:
        what = f"{run} is a run of a PEF, and {subject} is a model"
        raise OptionError(what, remedy=f"sambasim compile {subject}, and name its PEF")
    _check_outputs(subject, page, tables, pef, run)
    document = None if pef is None else read(pef)
    digest, checked = (None, None) if document is None else (document.digest, document.first.checked)
    records = None if run is None else (read_run(run), run.name)
    summary = records and records[0].summary
    if digest and summary and summary.pef_digest != digest:
        what = f"{run} is a run of another PEF, {summary.pef_digest[:12]}; this one is {digest[:12]}"
        remedy = f"give the PEF that was run, or a page of the run alone: sambasim report {run} --html FILE"
        raise OptionError(what, remedy=remedy)
    name = str(pef or subject)
    prediction = predicted_alone(replace(question, subject=name, replicas=sorted(question.replicas)), on_phase)
    step = prediction.steps[SyncPath.RDU][0]
    if tables is not None and step.several_ranks:
        what = f"--tables is for replicas of one rank, and those of {name} have several"
        raise OptionError(what, remedy=f"sambasim report {name} --html FILE.html")
    texts = {} if page is None else {page: predicted_page(prediction, digest, records, checked)}
    if tables is not None:
        texts[tables / "section_report.csv"] = section_report_csv(prediction.alone)
        texts[tables / "summary.json"] = summary_json(step)
    return texts


class _Kind(StrEnum):
    RUN = "the digests of a run"
    PEF = "a PEF"
    CHECKPOINT = "a checkpoint"
    WEIGHTS = "a file of weights"
    METRICS = "the metrics of a run"
    SAVED = "a file of torch.save"


def compare(a: str, b: str, steps: str | None, output_folder: Path) -> Row:
    """The differences of `a` and `b`, in `steps` alone. Raises OptionError if they are not two of one kind."""
    try:
        asked = None if steps is None else step_range(steps)
    except Refused as error:
        (problem,) = error.problems
        raise OptionError(f"--steps {show(steps)}: {problem.what}", remedy=f"--steps {problem.remedy}") from None
    kind, other = _kind(a, output_folder), _kind(b, output_folder)
    if kind != other:
        what = f"{a} is {kind}, and {b} is {other}: only two of one kind can be compared"
        raise OptionError(what, remedy=f"sambasim compare {a} OTHER, where OTHER is {kind} too")
    if steps is not None and kind not in (_Kind.RUN, _Kind.METRICS):
        raise OptionError(f"--steps is for runs, and {a} is {kind}", remedy=f"sambasim compare {a} {b}")
    left, right = (locate(name, output_folder) if kind is _Kind.PEF else Path(name) for name in (a, b))
    with in_memory(left, right):
        return _compared(kind, left, right, asked)


def _compared(kind: _Kind, a: Path, b: Path, asked: range | None) -> Row:
    if kind is _Kind.RUN:
        return compare_runs(read_recording(a), read_recording(b), asked)
    if kind is _Kind.METRICS:
        return compare_metrics((str(a), read_run(a)), (str(b), read_run(b)), asked)

    from sambasim.commands.difference import compare_pefs  # torch
    from sambasim.report.compare.tensors import compare_files

    names = str(a), str(b)
    if kind in (_Kind.WEIGHTS, _Kind.SAVED):
        (saved, values), (others, their_values) = _saved(a), _saved(b)
        pairs = [(name, values.get(name), their_values.get(name)) for name in sorted({**values, **their_values})]
        facts = [Row(name=name, a=show(one), b=show(two)) for name, one, two in pairs if repr(one) != repr(two)]
        return compare_files("weights" if kind is _Kind.WEIGHTS else "files", *names, (saved, others), facts)
    if kind is _Kind.CHECKPOINT:
        from sambasim.runtime.checkpoint.choose import differences
        from sambasim.runtime.checkpoint.content import Checkpoint

        ours, theirs = Checkpoint(a), Checkpoint(b)
        changes = differences(ours.manifest, theirs.manifest)
        facts = [Row(name=change.name, a=change.before, b=change.now) for change in changes]
        return compare_files("checkpoints", *names, (ours.tensors(), theirs.tensors()), facts)
    return compare_pefs(a, b)


def _kind(name: str, output_folder: Path) -> _Kind:
    """Raises OptionError if there is nothing called `name`, or nothing that can be compared."""
    path = Path(name)
    if not path.exists():
        try:
            locate(name, output_folder)
        except OptionError:
            what = f"there is nothing called {name}: no folder, no file and no PEF"
            raise OptionError(what, where=f"seen from {Path.cwd()}", remedy="sambasim compare --help") from None
    if path.suffix in (".py", ".toml"):
        remedy = f"with a PEF: sambasim verify PEF --against {path.with_suffix('.py')}:NAME"
        raise OptionError(f"{name} is the source of a model, and only results are compared", remedy=remedy)
    if not path.is_dir():
        named = dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _Kind.SAVED)
        named |= dict.fromkeys((".jsonl", ".csv"), _Kind.METRICS)
        return {".safetensors": _Kind.WEIGHTS, **named}.get(path.suffix, _Kind.PEF)
    if is_recording(path):
        return _Kind.RUN
    if (path / MANIFEST_FILE).exists():
        return _Kind.CHECKPOINT
    if there := checkpoints_in(path):
        what = f"{name} is a folder of {len(there)} checkpoints"
        raise OptionError(what, remedy=f"name one of them: {path / there[0].name}")
    what = f"{name} is a folder without the digests of a run, and not a checkpoint"
    raise OptionError(what, where=str(path / "run.json"), remedy=f"sambasim run --pef … --record-digests {name}")


def _saved(path: Path) -> "tuple[dict[str, Tensor], dict[str, object]]":
    """The tensors of a file of weights by their place in it, as `model.head.weight`, and what else is in it."""
    import torch
    from torch.utils._pytree import tree_leaves_with_path

    from sambasim.runtime.values.memory import read_saved

    remedy = "a file of sambasim run --save FILE.safetensors, or of torch.save(model.state_dict(), FILE)"
    tensors, others = dict[str, torch.Tensor](), dict[str, object]()
    for keys, leaf in tree_leaves_with_path(read_saved(path, remedy)):
        place = ".".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in keys)
        if isinstance(leaf, torch.Tensor):
            tensors[place] = leaf
        else:
            others[place] = leaf
    return tensors, others
