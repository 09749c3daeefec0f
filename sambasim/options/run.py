"""What `sambasim run` is asked for, and how it is laid over what the PEF carries.

A PEF remembers the loss, the optimizer, the training and the data that it was compiled with. A run may change what is
not compiled in: `overrides` holds those changes in the layout of the TOML config, so that one schema checks both. What
is compiled in (the batch size, the loss, which optimizer, whether gradients are clipped) is refused by name.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from sambasim.errors import OptionError, PefError
from sambasim.options.base import FilePath, JsonTable, Options
from sambasim.options.checkpoint import CheckpointOptions
from sambasim.options.data import DataOptions
from sambasim.options.load import absolute_names, apply_flags, apply_overrides, build, override_name, refusal
from sambasim.options.problems import Problem, Refused, show
from sambasim.options.step_range import step_range
from sambasim.options.training import LossOptions, OptimizerOptions, TrainingOptions

SAVE_SUFFIX = ".safetensors"

SYNC_TIMEOUT_S = 300.0
"""Longer than any step, batch or section should take, and short against a night."""

MOST_TRACED_STEPS = 1000
"""A trace is for looking at, and it is kept in memory until it is written."""

HostSyncName: TypeAlias = Literal["mpi", "gloo", "parameter-server"]

OnNonfinite: TypeAlias = Literal["stop", "skip", "ignore"]

_OF_TRAINING = (
    "metrics",
    "trace",
    "trace_steps",
    "record_digests",
    "record_steps",
    "save",
    "log_dir",
    "emulate_replicas",
    "host_sync",
    "parameter_servers",
    "on_nonfinite",
    "debug_numerics",
)


class RunOptions(Options):
    """Everything that `run` is asked for.

    `pef` is a path, or the name of a PEF found as `out/NAME/NAME.pef`. `data_parallel` None means: on, if the PEF is
    data parallel and there are two replicas or more. `overrides` changes what a PEF carries, in the layout of the TOML
    config: `{"optimizer": {"lr": 0.01}}`; `resolve_run` checks it. `trust` allows a PEF that another account
    compiled. `weights` replaces those of the PEF before the first step. `host_sync` says how gradients go from host to
    host, None by MPI; of a parameter server, the last `parameter_servers` ranks only serve, or rank 0 serves beside its
    work. `threads` are intra-op threads of each rank; None shares the cores of the node out.
    `metrics`, `trace`, `save` and `predictions` are files; a trace is of `trace_steps` steps, None of a few; `log_dir`
    takes one file of each rank. `sync_timeout` is for how many seconds ranks wait for one that does not move.
    `emulate_replicas` plays that many replicas in one process. `checkpoint` says where and how often a run saves where
    it is. `cluster` is the simulated machine on which replicas sit, a name or a TOML file; None is that of the device.
    `on_nonfinite` says what comes after a loss that is NaN or infinite; `debug_numerics` looks at what every operator
    makes, to say where it begins.
    """

    pef: str = Field(min_length=1)
    data_parallel: bool | None = None
    reduce_on_rdu: bool = False
    host_sync: HostSyncName | None = None
    parameter_servers: int | None = Field(default=None, ge=0)
    inference: bool = False
    trust: bool = False
    overrides: JsonTable = Field(default_factory=dict)
    weights: FilePath | None = None
    threads: int | None = Field(default=None, ge=1)
    engine: Literal["plain", "inductor"] = "plain"
    emulate_replicas: int | None = Field(default=None, ge=1)
    cluster: str | None = Field(default=None, min_length=1)
    metrics: FilePath | None = None
    trace: FilePath | None = None
    trace_steps: int | None = Field(default=None, ge=1, le=MOST_TRACED_STEPS)
    record_digests: FilePath | None = None
    """A folder that gets the digests of each replica, a file each."""
    record_steps: str | None = None
    """Which steps those are of, as `step_range` reads them; None is all of them."""
    save: FilePath | None = None
    log_dir: FilePath | None = None
    sync_timeout: float = Field(default=SYNC_TIMEOUT_S, gt=0)
    predictions: FilePath | None = None
    checkpoint: CheckpointOptions = CheckpointOptions()
    on_nonfinite: OnNonfinite = "stop"
    debug_numerics: bool = False
    json_output: bool = False

    @model_validator(mode="after")
    def _flags_fit_together(self) -> "RunOptions":
        problems: list[Problem] = []
        for field in ("weights", "save", "predictions"):
            path = getattr(self, field)
            if path is not None and path.suffix != SAVE_SUFFIX:
                problems.append(
                    Problem(field, f"must be a {SAVE_SUFFIX} file", _named_well(field, path), show(str(path)))
                )
        if self.predictions is not None and not self.inference:
            problems.append(Problem("predictions", "are made by inference only", "add --inference"))
        if self.inference and self.engine != "plain":
            what = "compiles the training step, and this is inference"
            problems.append(Problem("engine", what, "leave out --engine", self.engine))
        if self.debug_numerics and self.engine != "plain":
            what = "fuses operators, and --debug-numerics looks at what each of them makes"
            problems.append(Problem("engine", what, "leave out one of the two", self.engine))
        if self.trace_steps is not None and self.trace is None:
            what = "says how many steps a trace has, and no trace is asked for"
            problems.append(Problem("trace_steps", what, "add --trace FILE", str(self.trace_steps)))
        problems += self._recording_problems()
        for field in _OF_TRAINING:
            if self.inference and field in self.model_fields_set and getattr(self, field) not in (None, False):
                what = "is for training, and this is inference"
                problems.append(Problem(field, what, f"leave out {_typed(field)}, or leave out --inference"))
        if self.inference and self.checkpoint != CheckpointOptions():
            what = "is for training, and this is inference"
            remedy = "leave out the flags of checkpoints, or leave out --inference"
            problems.append(Problem("checkpoint", what, remedy))
        if self.emulate_replicas is not None and self.emulate_replicas > 1 and self.data_parallel is False:
            what = "needs data parallelism, which is turned off"
            problems.append(Problem("emulate_replicas", what, given=str(self.emulate_replicas)))
        problems += self._host_sync_problems()
        if problems:
            raise Refused(*problems)
        return self

    def _recording_problems(self) -> Iterator[Problem]:
        if self.record_steps is not None:
            if self.record_digests is None:
                what = "says which steps are recorded, and no digests are asked for"
                yield Problem("record_steps", what, "add --record-digests FOLDER", show(self.record_steps))
            try:
                step_range(self.record_steps)
            except Refused as error:
                yield from (replace(problem, name="record_steps") for problem in error.problems)
        if self.record_digests is not None and self.trace is not None:
            what = "take most of the time of a step, and a trace is of times"
            yield Problem("record_digests", what, "leave out --record-digests or --trace")

    def _host_sync_problems(self) -> Iterator[Problem]:
        if self.host_sync is not None and self.reduce_on_rdu:
            what = "is sync through the host, and --reduce-on-rdu is sync between devices"
            yield Problem("host_sync", what, "leave out one of the two", show(self.host_sync))
        if self.parameter_servers is None:
            return
        given = str(self.parameter_servers)
        if self.host_sync != "parameter-server":
            remedy = "add --host-sync parameter-server"
            remedy = f"leave out --reduce-on-rdu, and {remedy}" if self.reduce_on_rdu else remedy
            yield Problem("parameter_servers", "serve nobody", remedy, given)
        if self.emulate_replicas is not None:
            what = "are ranks of their own, and an emulation is one process"
            yield Problem("parameter_servers", what, "leave out --parameter-servers or --emulate-replicas", given)


class CarriedDefaults(Options):
    """What `CompileOptions.training_defaults` wrote into the PEF for its runs. An inference PEF has no optimizer."""

    loss: LossOptions | None = None
    optimizer: OptimizerOptions | None = None
    training: TrainingOptions = TrainingOptions()


class RunFile(CarriedDefaults):
    """The layout of `RunOptions.overrides`, as it is once laid over what the PEF carries."""

    data: DataOptions = DataOptions()


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run, whole: its options, and what holds after its overrides. `changed` names what differs from the PEF."""

    options: RunOptions
    data: DataOptions
    loss: LossOptions | None
    optimizer: OptimizerOptions | None
    training: TrainingOptions
    changed: tuple[str, ...]


RUN_FLAGS: Mapping[str, tuple[str, str]] = {
    "pef": ("--pef", "pef"),
    "data_parallel": ("--data-parallel", "data_parallel"),
    "reduce_on_rdu": ("--reduce-on-rdu", "reduce_on_rdu"),
    "host_sync": ("--host-sync", "host_sync"),
    "parameter_servers": ("--parameter-servers", "parameter_servers"),
    "inference": ("--inference", "inference"),
    "trust": ("--trust", "trust"),
    "weights": ("--weights", "weights"),
    "threads": ("--threads", "threads"),
    "engine": ("--engine", "engine"),
    "emulate_replicas": ("--emulate-replicas", "emulate_replicas"),
    "cluster": ("--cluster", "cluster"),
    "metrics": ("--metrics", "metrics"),
    "trace": ("--trace", "trace"),
    "trace_steps": ("--trace-steps", "trace_steps"),
    "record_digests": ("--record-digests", "record_digests"),
    "record_steps": ("--record-steps", "record_steps"),
    "save": ("--save", "save"),
    "log_dir": ("--log-dir", "log_dir"),
    "sync_timeout": ("--sync-timeout", "sync_timeout"),
    "predictions": ("--predictions", "predictions"),
    "checkpoint_dir": ("--checkpoint-dir", "checkpoint.dir"),
    "checkpoint_every": ("--checkpoint-every", "checkpoint.every"),
    "keep": ("--keep", "checkpoint.keep"),
    "resume": ("--resume", "checkpoint.resume"),
    "exact": ("--exact", "checkpoint.exact"),
    "on_checkpoint_failure": ("--on-checkpoint-failure", "checkpoint.on_failure"),
    "on_nonfinite": ("--on-nonfinite", "on_nonfinite"),
    "debug_numerics": ("--debug-numerics", "debug_numerics"),
    "json_output": ("--json", "json_output"),
    "data": ("--data", "overrides.data.source"),
    "workers": ("--workers", "overrides.data.workers"),
    "batch_size": ("--batch-size", "overrides.training.batch_size"),
    "grad_accumulation_steps": ("--grad-accumulation-steps", "overrides.training.accumulation_steps"),
    "epochs": ("--epochs", "overrides.training.epochs"),
    "steps": ("--steps", "overrides.training.steps"),
    "seed": ("--seed", "overrides.training.seed"),
    "evaluate": ("--evaluate or --no-evaluate", "overrides.training.evaluate"),
    "lr": ("--lr", "overrides.optimizer.lr"),
    "momentum": ("--momentum", "overrides.optimizer.momentum"),
    "weight_decay": ("--weight-decay", "overrides.optimizer.weight_decay"),
    "max_grad_norm": ("--max-grad-norm", "overrides.optimizer.max_grad_norm"),
}
"""By the keyword that `run_options` takes: the flag, and the field of RunOptions that it sets."""

_OF_ONE_SOURCE = ("source", "args", "inputs", "samples", "evaluation_fraction")


def _named_well(field: str, path: Path) -> str:
    """What to type where `path` is no file of tensors by its name."""
    if field == "weights" and os.path.isfile(path / "checkpoint.json"):  # Path's raises where nobody may look
        return f"--resume {path} --steps N --save FILE{SAVE_SUFFIX}, with the N of its step, saves its weights as one"
    return f"{_typed(field)} {path.parent / f'{path.stem or field}{SAVE_SUFFIX}'}"


def _typed(field: str) -> str:
    """The flag of a field of RunOptions."""
    return next(flag for flag, name in RUN_FLAGS.values() if name == field)


def run_options(flags: Mapping[str, object], overrides: Sequence[str]) -> RunOptions:
    """The options of one run: flags over `--set`.

    `flags` has keys of RUN_FLAGS; None is a flag that was not given. A path in them is seen from the working directory.
    Raises OptionError, which lists everything that is wrong at once; overrides wait for `resolve_run` and the PEF.
    """
    changes = apply_overrides({}, overrides)
    mapping, origins = apply_flags({"overrides": changes} if changes else {}, flags, RUN_FLAGS)
    if "overrides" in mapping:
        mapping["overrides"] = absolute_names(_table(mapping["overrides"]), Path.cwd())
    origins |= {".".join(("overrides", *override_name(override))): "--set" for override in overrides}
    return build(RunOptions, mapping, origins=origins)


def resolve_run(
    options: RunOptions, training_defaults: Mapping[str, object], data_source: Mapping[str, object]
) -> ResolvedRun:
    """Lays the run's overrides over what the PEF carries.

    Another data source brings its own arguments, samples and held-out fraction; `epochs` replaces `steps`, and the
    reverse. Raises PefError if what the PEF carries is not valid; OptionError if an override is not, or changes what is
    compiled in, or if the PEF is for inference and the run is not.
    """
    carried = _carried(training_defaults, data_source)
    if carried.optimizer is None and not options.inference:
        raise OptionError("this PEF was compiled for inference and cannot train", remedy="add --inference")
    before = carried.model_dump(mode="json")
    problems = _compiled_in(options.overrides, before)
    if problems:
        raise refusal(problems)
    merged = build(RunFile, _merge(_making_room(before, options.overrides), options.overrides))
    problems = _switched(carried.optimizer, merged.optimizer)
    if problems:
        raise refusal(problems)
    was, now = dict(_leaves(before)), dict(_leaves(merged.model_dump(mode="json")))
    changed = tuple(
        f"{name} = {show(value)} (compiled: {'none' if was.get(name) is None else show(was[name])})"
        for name, value in now.items()
        if value is not None and value != was.get(name)
    )
    return ResolvedRun(options, merged.data, merged.loss, merged.optimizer, merged.training, changed)


def _carried(training_defaults: Mapping[str, object], data_source: Mapping[str, object]) -> RunFile:
    try:
        return build(RunFile, {**training_defaults, "data": dict(data_source)})
    except OptionError as error:
        heading, *each = (line.strip() for line in error.what.split("\n"))
        told = f"{heading} {'; '.join(each)}".rstrip()
        what = f"what the PEF carries for its runs is not valid: {told}"
        raise PefError(what, remedy="compile it again") from None


def _compiled_in(overrides: Mapping[str, object], before: Mapping[str, object]) -> list[Problem]:
    """The overrides that would change what only a compile can change."""
    was = dict(_leaves(before))
    problems: list[Problem] = []
    for name, value in _leaves(overrides):
        section = name.partition(".")[0]
        if section == "optimizer" and before["optimizer"] is None:
            problems.append(Problem(name, "cannot be set: this PEF was compiled for inference, without an optimizer"))
        fixed = name in ("optimizer.name", "training.batch_size") or section == "loss" or name.startswith("data.inputs")
        if fixed and value != was.get(name):
            found = f"as {show(was[name])}" if was.get(name) is not None else "without it"
            remedy = f"compile again: sambasim compile … --set {name}={show(value)}"
            problems.append(Problem(name, f"cannot change: the PEF was compiled {found}", remedy, show(value)))
    return problems


def _switched(before: OptimizerOptions | None, after: OptimizerOptions | None) -> list[Problem]:
    """Hyperparameters whose new value would need other sections, or state that the PEF has no room for."""
    if before is None or after is None:
        return []
    problems: list[Problem] = []
    if before.max_grad_norm is None and after.max_grad_norm is not None:
        what = "cannot be turned on: the PEF was compiled without clipping"
        remedy = f"compile again: sambasim compile … --set optimizer.max_grad_norm={after.max_grad_norm}"
        problems.append(Problem("optimizer.max_grad_norm", what, remedy, show(after.max_grad_norm)))
    if bool(before.momentum) != bool(after.momentum):
        way = "off: the PEF was compiled with it" if before.momentum else "on: the PEF was compiled without it"
        remedy = f"compile again: sambasim compile … --set optimizer.momentum={after.momentum}"
        problems.append(Problem("optimizer.momentum", f"cannot be turned {way}", remedy, show(after.momentum)))
    return problems


def _making_room(before: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """What the PEF carries, without the values that an override makes meaningless."""
    data, training = dict(_table(before["data"])), dict(_table(before["training"]))
    new_data, new_training = _table(overrides.get("data")), _table(overrides.get("training"))
    if "source" in new_data and new_data["source"] != data["source"]:
        data = {name: value for name, value in data.items() if name not in _OF_ONE_SOURCE}
    if "workers" in new_data and new_data["workers"] == 0:
        data = {name: value for name, value in data.items() if name not in ("prefetch_factor", "persistent_workers")}
    for one, other in (("epochs", "steps"), ("steps", "epochs")):
        if one in new_training:
            training.pop(other, None)
    schedule, new_schedule = _table(training["schedule"]), _table(new_training.get("schedule"))
    if "name" in new_schedule and new_schedule["name"] != schedule["name"]:
        training["schedule"] = {name: schedule[name] for name in ("warmup_steps", "total_steps")}
    return {**before, "data": data, "training": training}


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _merge(under: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Tables merged by name; anything else is replaced."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _leaves(mapping: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each dotted name of nested tables that is no table itself."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
