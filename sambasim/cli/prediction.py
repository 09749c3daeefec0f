"""From what was typed after `simulate` or `report` to predictions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sambasim.cli.progress import phases
from sambasim.cli.subject import Subject, is_model, level_of, refuse_script, subject_of_model, subject_of_pef
from sambasim.errors import OptionError, PefError
from sambasim.hardware.spec import ALIASES, ClusterSpec, DeviceSpec, load_cluster, load_device
from sambasim.pef.rules import COMPILE_AGAIN
from sambasim.simulation.prediction import Prediction, predict
from sambasim.simulation.sync import SyncPath


@dataclass(frozen=True, slots=True)
class Question:
    """What was typed. None and no batch sizes are for those of the subject, no replicas for the usual ones."""

    subject: str
    output_folder: Path
    overrides: Sequence[str] = ()
    arch: str | None = None
    num_tiles: int | None = None
    level: str | None = None
    batch_sizes: Sequence[int] = ()
    replicas: Sequence[int] = ()
    cluster: str | None = None


def predictions(question: Question, *, quiet: bool) -> list[Prediction]:
    """The answers, one for each batch size. Raises OptionError for what cannot be asked, before a model is captured
    where that is possible."""
    device = load_device(question.arch) if question.arch else None
    cluster = load_cluster(question.cluster) if question.cluster else None
    subject = _subject(question, quiet=quiet)
    device = device or load_device(subject.arch)
    with _blaming(question.subject):
        return _priced(question, subject, device, cluster)


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    """Around pricing: arguments of nodes that an operator does not take are the PEF's, and not a mistake of ours.

    Reading looks at their form alone, as rule 25 needs PyTorch, and a prediction does without.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if is_model(name):
            raise
        what = f"{name} holds a node that its operator does not take: {type(error).__name__}: {error}"
        raise PefError(what, where="pef.json", remedy=COMPILE_AGAIN) from error


def _priced(question: Question, subject: Subject, device: DeviceSpec, cluster: ClusterSpec | None) -> list[Prediction]:
    return [
        predict(
            program,
            device,
            _tiles(question, subject),
            level_of(question.level or subject.level),
            cluster or load_cluster(device.cluster),
            question.replicas,
            batch_size=size,
            micro_steps=subject.micro_steps,
        )
        for size, program in subject.programs
    ]


def _subject(question: Question, *, quiet: bool) -> Subject:
    name, sizes = question.subject, question.batch_sizes
    if is_model(name):
        with phases(quiet=quiet) as hear:
            return subject_of_model(name, question.overrides, sizes, hear)
    refuse_script(name)
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
