"""What is predicted for a PEF, or for a model, which is captured without memory, also beside published figures."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from sambasim.costs.cut import Level
from sambasim.errors import LARGEST_COUNT, MOST_MICRO_STEPS, MOST_REPLICAS, MachineError, OptionError, PefError
from sambasim.hardware.placement import inventory_of, place
from sambasim.hardware.spec import cluster_names, device_names, load_cluster, load_device
from sambasim.ir.mesh import copy_mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.options.given import read_toml
from sambasim.pef import locate, read
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.published import Row, published_rows
from sambasim.report.devices import Placed, row_record, validation
from sambasim.report.tables import Row as Record
from sambasim.simulation.advice import what_fits
from sambasim.simulation.prediction import Prediction, predict
from sambasim.simulation.sync import SyncPath

OnPhase: TypeAlias = Callable[[str], None]


def is_model(name: str) -> bool:
    """Whether `name` is a config or a model, and no PEF. Raises OptionError for a Python file alone."""
    if name.endswith(".py"):
        what = f"{name} is a Python file, and the name of a model in it is missing"
        remedy = f"{name}:NAME, for a class or function of that file; for an app, the PEF that it compiles"
        raise OptionError(what, remedy=remedy)
    return name.endswith(".toml") or ":" in name


def options_of_estimate(subject: str, overrides: Sequence[str], batch_size: int | None) -> CompileOptions:
    """Raises OptionError for a PEF, for inference, and for a replica of several ranks."""
    if not is_model(subject):
        remedy = f"file.py:NAME, module:NAME or FILE.toml; for a PEF: sambasim inspect {subject}"
        raise OptionError(f"{subject} is neither a model nor a config", remedy=remedy)
    in_config = subject.endswith(".toml") and "optimizer" in read_toml(Path(subject))
    is_named = in_config or any(override.startswith("optimizer.name") for override in overrides)
    flags = {"batch_size": batch_size, "optimizer": None if is_named else "adamw"}
    if compile_options(None, subject, [*overrides, "parallel.zero=1"], flags).inference:
        what = "the estimate is for training, and compile.inference is true"
        raise OptionError(what, remedy="--set compile.inference=false")
    options = compile_options(None, subject, overrides, {**flags, "data_parallel": True})
    for field, others in (("n_chips", "tensor_parallel="), ("pipeline_stages", "micro_batches=1")):
        if (count := getattr(options, field)) > 1:
            what = f"parallel.{field} = {count}: the estimate is for a replica of one rank"
            raise OptionError(what, remedy=f"--set parallel.{field}=1 --set parallel.{others}")
    return options


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments of a command that predicts. None or empty means: as compiled, and the default replicas."""

    subject: str
    output_folder: Path = Path("out")
    overrides: Sequence[str] = ()
    arch: str | None = None
    num_tiles: int | None = None
    level: str | None = None
    batch_sizes: Sequence[int] = ()
    replicas: Sequence[int] = ()
    sync: Sequence[SyncPath] = tuple(SyncPath)
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class _Subject:
    """A program for each graph and asked batch size, and the options that it was compiled with. `recomputed`: captures
    a model anew."""

    programs: Sequence[tuple[int, Program]]
    compiled: Mapping[str, object]
    micro_steps: int
    recomputed: Callable[[int], Program] | None = None


def predicted(question: Question, on_phase: OnPhase, *, one_device: bool = False) -> list[Prediction]:
    """For each batch size. With `one_device`, a copy of the model must have one rank. Raises OptionError for invalid
    arguments, if possible before the capture of a model; MachineError for what does not fit, with what would; PefError
    for arguments that its operators do not take: reading a PEF checks only their form, as rule 25 needs PyTorch."""
    inventory_of({}, arch=question.arch, cluster=question.cluster)  # raises for unknown names before a capture
    name, predictions = question.subject, list[Prediction]()
    if is_model(name):
        subject = _of_model(question, on_phase)
    elif question.overrides:
        raise OptionError(f"--set changes a config, and {name} is a PEF", remedy=f"sambasim simulate {name}")
    else:
        subject = _of_pef(question)
    inventory = inventory_of(subject.compiled, arch=question.arch, tiles=question.num_tiles, cluster=question.cluster)
    for _, program in subject.programs:
        mesh = copy_mesh(program.mesh)
        if one_device and mesh.world_size > 1:
            ranks = f"a replica of {program.name} has {mesh.world_size} ranks ({mesh})"
            remedy = f"sambasim simulate {shlex.quote(name)} predicts all of its ranks"
            raise OptionError(f"this is a prediction for one device, and {ranks}", remedy=remedy)
        if not one_device and program.ranks_of_replica > 1:
            _check_as_compiled(question, program)
    device, tiles, steps = inventory.device, inventory.tiles, subject.micro_steps
    level = _level_of(question.level or subject.compiled.get("opt_level"))
    try:
        for size, program in subject.programs:
            replicas, samples = question.replicas, size
            if program.ranks_of_replica > 1:  # a model was captured for its batch size, and a PEF has one
                samples = program.batch_size
                replicas = replicas if several_replicas(program, replicas) else (1,)
            try:
                of_size = partial(predict, program, device, tiles, level, inventory.cluster, replicas)
                predictions.append(of_size(batch_size=samples, micro_steps=steps))
            except MachineError as error:
                if program.ranks_of_replica == 1:
                    from sambasim.report.analysis import fitting_text

                    recomputed = None if subject.recomputed is None else subject.recomputed(size)
                    fits = what_fits(program, device, tiles, level, size, steps, recomputed)
                    error.remedy = fitting_text(fits) or error.remedy
                raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if is_model(name):
            raise
        what = f"{name} has a node with arguments that its operator does not take: {type(error).__name__}: {error}"
        raise PefError(what, where="pef.json", remedy=COMPILE_AGAIN) from error
    return predictions


def predicted_alone(question: Question, on_phase: OnPhase, *, one_device: bool = False) -> Prediction:
    """For one batch size. Raises as `predicted`, and OptionError for a PEF of several graphs."""
    prediction, *others = predicted(question, on_phase, one_device=one_device)
    if others:
        subject = question.subject
        what = f"{subject} has several graphs, and this command predicts one"
        raise OptionError(what, remedy=f"sambasim simulate {shlex.quote(subject)} predicts each of them")
    return prediction


def _check_as_compiled(question: Question, program: Program) -> None:
    """Raises OptionError for what is predicted of replicas of one rank only."""
    name, level = question.subject, question.level
    what = f"a replica of {program.name} has {program.ranks_of_replica} ranks, and is predicted"
    if level:
        remedy = f"--set compile.opt_level={level}" if is_model(name) else f"compile it with --{level}"
        raise OptionError(f"{what} with its sections as compiled", remedy=remedy)
    if question.batch_sizes and not is_model(name):
        sizes = ",".join(map(str, question.batch_sizes))
        remedy = f"sambasim simulate CONFIG.toml -b {sizes}, which captures the model for each batch size"
        raise OptionError(f"{what} from a PEF at the batch size of the PEF", remedy=remedy)
    if program.training is None:
        what = f"the PEF {program.name} is for inference, and only training is predicted on several ranks"
        raise OptionError(what, remedy="compile it for training, or without --tensor-parallel")


def several_replicas(program: Program, asked: Sequence[int]) -> bool:
    """Whether a run of `program` may have several replicas. Raises OptionError if it may not, and some are `asked`."""
    several = program.chooses_replicas
    if not several and set(asked) - {1}:
        what = f"the PEF {program.name} has one replica: it has no REDUCE and GATHER sections"
        raise OptionError(what, remedy="compile it with --data-parallel, or leave out --replicas")
    return several


def _of_pef(question: Question) -> _Subject:
    document = read(locate(question.subject, question.output_folder))
    program, compiled = document.program, document.compile_options
    graphs = [program]
    if document.has_several:
        named = ((name, graph.program) for name, graph in document.graphs.items())
        graphs = [replace(graph, name=f"{program.name}, graph {name}") for name, graph in named]
    programs = [(size, graph) for graph in graphs for size in question.batch_sizes or (graph.batch_size,)]
    training = document.training_defaults.get("training")
    stored = training.get("accumulation_steps") if program.training and isinstance(training, dict) else None
    steps = 1 if stored is None else stored
    if type(steps) is not int or not 1 <= steps <= MOST_MICRO_STEPS:
        what = f"the PEF accumulates {steps!a} micro-steps in a step; the most is {MOST_MICRO_STEPS:,}"
        raise PefError(what, where="training.accumulation_steps of the PEF", remedy=COMPILE_AGAIN)
    return _Subject(programs, compiled, steps)


def _of_model(question: Question, on_phase: OnPhase) -> _Subject:
    def options_at(size: int | None) -> CompileOptions:
        flags = {"batch_size": size, "data_parallel": True}
        return compile_options(None, question.subject, question.overrides, flags)

    options = [options_at(size) for size in question.batch_sizes or (None,)]
    first = options[0]

    from sambasim.compiler.front import shapes_from_options  # torch

    def recomputed(size: int) -> Program:
        on_phase("capture it again with recomputation")
        return shapes_from_options(options_at(size).model_copy(update={"recompute": "full"}))

    programs = [(each.training.batch_size, shapes_from_options(each, on_phase)) for each in options]
    again = recomputed if first.recompute == "none" and not first.inference else None
    return _Subject(programs, first.model_dump(), first.training.accumulation_steps, again)


def _level_of(stored: object) -> Level:
    match stored:
        case "o0" | "o1":
            return stored
    return "o3"


_Numbers: TypeAlias = str | int | Sequence[int] | None


def question_of(
    subject: str,
    *,
    replicas: _Numbers = None,
    batch_sizes: _Numbers = None,
    sync: str = "host,rdu",
    names: Sequence[str] = ("--replicas", "--batch-size"),
    **others: Any,
) -> Question:
    """What is asked about `subject`, by a user who calls the numbers `names`. Raises OptionError."""
    sizes, numbers = _counts(batch_sizes, names[1], LARGEST_COUNT), _counts(replicas, names[0], MOST_REPLICAS)
    known = {path.value: path for path in SyncPath}
    asked = [part.strip() for part in sync.split(",")]
    if unknown := [part for part in asked if part not in known]:
        raise OptionError(f"--sync {sync}: there is no path {unknown[0]!r}", remedy="--sync host, rdu, or host,rdu")
    paths = tuple(dict.fromkeys(known[part] for part in asked))
    return Question(subject, replicas=numbers, batch_sizes=sizes, sync=paths, **others)


def _counts(asked: _Numbers, name: str, most: int) -> tuple[int, ...]:
    """The numbers in `1,2,4`; none for None. Raises OptionError."""
    if asked is None:
        return ()
    text = asked if isinstance(asked, str) else ",".join(map(str, [asked] if isinstance(asked, int) else asked))
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > most:
        raise OptionError(f"{name} {text}: must be whole numbers from 1 to {most:,}", remedy=f"{name} 1,2,4")
    return numbers


def placed(
    pef: Path | None, arch: str | None, num_tiles: int | None, cluster: str | None, replicas: int | None
) -> Placed:
    """By default as many replicas as fit on one node. Raises OptionError for those that do not fit."""
    document = None if pef is None else read(pef)
    compiled, program = ({}, None) if document is None else (document.compile_options, document.program)
    inventory = inventory_of(compiled, arch=arch, tiles=num_tiles, cluster=cluster)
    place_all = partial(place, device=inventory.device, tiles=inventory.tiles, cluster=inventory.cluster)
    of_a_node, mesh = place_all(1).per_full_node, None
    if program is None or program.ranks_of_replica == 1:
        placement = place_all(replicas or min(of_a_node, MOST_REPLICAS))
    else:
        ranks = program.ranks_of_replica
        several = several_replicas(program, [replicas] if replicas else [])
        count = ranks * (replicas or (max(1, of_a_node // ranks) if several else 1))
        placement, mesh = place_all(count, noun="rank"), mesh_of(program.mesh, count)
    devices, clusters = [inventory.device], [inventory.cluster]
    if arch is None and pef is None:
        devices = [load_device(name) for name in device_names()]
        clusters = clusters if cluster else [load_cluster(name) for name in cluster_names()]
    return Placed(devices, clusters, inventory, placement, mesh)


def validated(words: str | None, on_phase: OnPhase) -> Record:
    """Predictions for all published rows, or those with `words` in their name. Raises OptionError if there are none."""
    rows = [row for row in published_rows() if words is None or words.lower() in row.name.lower()]
    if not rows:
        names = ", ".join(dict.fromkeys(f'"{row.name}"' for row in published_rows()))
        raise OptionError(f"no published row has {words!r} in its name", remedy=f"one of {names}")
    programs: dict[tuple[str, str, int], Program] = {}
    records = []
    for row in rows:
        key = (row.model, repr(sorted(row.args.items())), row.batch_size)
        if key not in programs:
            on_phase(f"capture {row.name}")
            programs[key] = capture_row(row)
        on_phase(f"predict {row.name}, {row.level}")
        device = load_device(row.device)
        cluster = load_cluster(device.cluster)
        of_row = predict(programs[key], device, row.tiles, row.level, cluster, (row.replicas,), mapped_by=row.mapped_by)
        (step,) = of_row.steps[SyncPath.RDU]
        records.append(row_record(row, row.figure_of(of_row.alone.device_s, step.predicted_s), of_row.alone))
    return validation(records)


def capture_row(row: Row) -> Program:
    """The model of `row`, on tensors without memory."""
    from sambasim.compiler.capture.step import Example
    from sambasim.compiler.front import compile_shapes  # torch, which `devices` does without
    from sambasim.published.models import MODELS

    (make, batch), args = MODELS[row.model], row.args
    fields = {"pef_name": row.model, "arch": row.device, "num_tiles": row.tiles, "optimizer": {"name": "adamw"}}
    options = CompileOptions.model_validate({**fields, "training": {"batch_size": row.batch_size}})
    return compile_shapes(lambda: make(**args), lambda model: Example(batch(row.batch_size, **args), True), options)
