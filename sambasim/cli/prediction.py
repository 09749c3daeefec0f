"""From what was typed after `simulate` to predictions, one for each batch size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sambasim.cli.progress import phases
from sambasim.cli.subject import Subject, is_model, level_of, subject_of_model, subject_of_pef
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.calibration import load_calibration
from sambasim.hardware.cluster import load_cluster
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ALIASES, load_device
from sambasim.report.scaling import scaling_record
from sambasim.report.simulation import Simulated
from sambasim.simulation.scaling import scale
from sambasim.simulation.step import predict_step
from sambasim.simulation.sync import SyncPath


@dataclass(frozen=True, slots=True)
class Question:
    """What was typed. None and no batch sizes are for those of the subject."""

    subject: str
    overrides: Sequence[str]
    output_folder: Path
    arch: str | None
    num_tiles: int | None
    level: str | None
    batch_sizes: Sequence[int]
    replicas: Sequence[int]
    paths: Sequence[SyncPath]
    cluster: str | None


def predictions(question: Question, *, quiet: bool) -> list[Simulated]:
    """The answers. Raises OptionError for what cannot be asked, before a model is captured where that is possible."""
    device = load_device(question.arch) if question.arch else None
    if question.cluster:
        load_cluster(question.cluster)
    subject = _subject(question, quiet=quiet)
    device = device or load_device(subject.arch)
    tiles = _tiles(question, subject)
    budget, cluster = budget_of(device, load_calibration(), tiles), load_cluster(question.cluster or device.cluster)
    level = level_of(question.level or subject.level)
    found = []
    for size, program in subject.programs:
        alone = predict_step(program, budget, level, load_calibration(), size, subject.micro_steps)
        scaled = [
            scale(program, alone, place(replicas, device, tiles, cluster), path)
            for replicas in question.replicas
            for path in question.paths[: None if replicas > 1 and program.training else 1]
        ]
        records = tuple(scaling_record(alone, each) for each in scaled)
        found.append(Simulated(program, device, tiles, level, alone, cluster, records))
    return found


def _subject(question: Question, *, quiet: bool) -> Subject:
    name, sizes = question.subject, question.batch_sizes
    if is_model(name):
        with phases(quiet=quiet) as hear:
            return subject_of_model(name, question.overrides, sizes, hear)
    if question.overrides:
        raise OptionError(f"--set changes a config, and {name} is a PEF", remedy=f"sambasim simulate {name}")
    return subject_of_pef(name, question.output_folder, sizes)


def _tiles(question: Question, subject: Subject) -> int | None:
    """Those that are asked for, or else those of the subject, if the device is its own."""
    if question.num_tiles is not None:
        return question.num_tiles
    asked, own = (ALIASES.get(name, name) for name in (question.arch or subject.arch, subject.arch))
    return subject.tiles if asked == own else None


def counts(text: str | None, flag: str) -> tuple[int, ...]:
    """`"1,2,4"` as numbers, each once. Raises OptionError for anything else."""
    if text is None:
        return ()
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise OptionError(f"{flag} {text}: whole numbers of 1 or more are wanted", remedy=f"{flag} 1,2,4")
    return numbers


def paths(text: str) -> tuple[SyncPath, ...]:
    """`"host,rdu"` as ways to sync. Raises OptionError for anything else."""
    known = {path.value: path for path in SyncPath}
    asked = [part.strip() for part in text.split(",")]
    if unknown := [part for part in asked if part not in known]:
        raise OptionError(f"--sync {text}: there is no way {unknown[0]!r}", remedy="--sync host, rdu, or host,rdu")
    return tuple(dict.fromkeys(known[part] for part in asked))
