"""The options of `sambasim run`, and how they override those in the PEF. Changing what is compiled in is an error."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field, JsonValue

from sambasim.errors import OptionError, PefError
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.base import Options, build, dotted_names
from sambasim.options.deepspeed import World, deepspeed_options
from sambasim.options.fields import RUN_FLAGS, SAVE_SUFFIX, WEIGHTS_SUFFIXES, CheckpointFields, RunFields
from sambasim.options.given import as_table, assign, changed_values, given_flags, leaf_paths, leaves
from sambasim.options.grammar import Cadence, JsonTable, absolute_names, parse_cadence
from sambasim.options.problem import Given, Problem, broken, one_of, refusal, show
from sambasim.options.training import OptimizerOptions, Sections, unreplaced
from sambasim.units import counted


class CheckpointOptions(CheckpointFields, Options):
    """Where and how often a run writes checkpoints, and which one it continues from."""

    @property
    def cadence(self) -> Cadence:
        return parse_cadence(self.every)

    def problems(self) -> Iterator[Problem]:
        if self.dir is None:
            for field in ("every", "keep", "on_failure"):
                if field in self.model_fields_set:
                    remedy = f"add --checkpoint-dir DIR, or leave out {_typed(f'checkpoint.{field}')}"
                    yield Problem(field, "needs a folder for checkpoints, and none is given", remedy)
        name_one = "add --checkpoint-dir DIR, or name one: --resume DIR/step-…"
        by_name, without = self.resume in ("newest", "auto", "if-any"), "add --resume, or leave out --exact"
        yield from broken(
            (by_name and self.dir is None, "resume", "needs the folder of the checkpoints", name_one),
            (self.exact and self.resume is None, "exact", "needs a run that is resumed", without),
        )


class RunOptions(RunFields, Options):
    """Everything that `run` needs; `resolve_run` checks `overrides`."""

    overrides: JsonTable = Field(default_factory=dict)
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions)

    def problems(self) -> Iterator[Problem]:
        for field in ("save", "save_ema", "predictions"):
            path = getattr(self, field)
            if path is not None and path.suffix != SAVE_SUFFIX:
                remedy = f"{_typed(field)} {path.parent / f'{path.stem or field}{SAVE_SUFFIX}'}"
                yield Problem(field, f"must be a {SAVE_SUFFIX} file", remedy, str(path))
        given = self.weights
        if given is not None and given.suffix not in WEIGHTS_SUFFIXES and not os.path.isdir(given):
            what = f"must be a {one_of(WEIGHTS_SUFFIXES)} file, or the folder of a checkpoint"
            yield Problem("weights", what, f"--weights {given.parent / f'{given.stem}{SAVE_SUFFIX}'}", str(given))
        emulated, servers, one_of_two = self.emulate_replicas, self.parameter_servers, "leave out one of the two"
        is_recorded, is_traced = self.record_digests is not None, self.trace is not None
        other = self.metrics is not None and self.metrics.suffix not in ("", ".jsonl", ".csv")  # a pipe may have none
        yield from broken(
            (other, "metrics", "must be a file .jsonl or .csv", "--metrics FILE.jsonl or FILE.csv", str(self.metrics)),
            (self.predictions is not None and not self.inference, "predictions", "needs inference", "add --inference"),
            (self.debug_numerics and self.engine != "plain", "engine",
             "fuses operators, and --debug-numerics checks each of them", one_of_two, self.engine),
            (self.trace_steps is not None and not is_traced, "trace_steps",
             "needs a trace", "add --trace FILE", self.trace_steps),
            (self.record_steps is not None and not is_recorded, "record_steps",
             "needs a folder for the digests", "add --record-digests FOLDER", self.record_steps),
            (is_recorded and is_traced, "record_digests",
             "takes most of the time of a step, so a trace would show wrong times",
             "leave out --record-digests or --trace"),
        )  # fmt: skip
        if self.inference:
            yield from self._inference_problems()
        by_server = "add --host-sync parameter-server"
        by_server = f"leave out --reduce-on-rdu, and {by_server}" if self.reduce_on_rdu else by_server
        yield from broken(
            ((emulated or 0) > 1 and self.data_parallel is False, "emulate_replicas",
             "needs data parallelism, which is turned off", None, emulated),
            (self.one_process_per_replica and emulated is not None, "one_process_per_replica",
             "is for replicas that mpirun starts, and --emulate-replicas runs all in one process", one_of_two),
            ("host_sync" in self.model_fields_set and self.reduce_on_rdu, "host_sync",
             "is sync through the host, and --reduce-on-rdu is sync between devices", one_of_two, self.host_sync),
            (self.wire != "fp32" and self.host_sync == "gloo", "wire",
             "rounds each operand of a sum, and gloo adds by itself", "leave out --wire or --host-sync", self.wire),
            (servers is not None and self.host_sync != "parameter-server", "parameter_servers",
             "needs sync through a parameter server", by_server, servers),
            (servers is not None and emulated is not None, "parameter_servers",
             "needs ranks of its own, and an emulation has one process",
             "leave out --parameter-servers or --emulate-replicas", servers),
        )  # fmt: skip

    def _inference_problems(self) -> Iterator[Problem]:
        what = "is for training, and this is inference"
        yield from broken((self.engine != "plain", "engine", what, "leave out --engine", self.engine))
        for name in leaves(self.overrides):  # inference reads the seed and the batch size, too
            is_for_outputs = name in ("training.seed", "training.batch_size") or name.startswith("evaluation.metrics")
            if name.startswith(("optimizer.", "ema.", "training.", "evaluation.")) and not is_for_outputs:
                yield Problem(f"overrides.{name}", what, "leave it out, or leave out --inference")
        for setting in RUN_FLAGS.values():
            field, typed = setting.name, setting.flag.typed
            if setting.flag.training_only and field in self.model_fields_set and getattr(self, field):
                yield Problem(field, what, f"leave out {typed}, or leave out --inference")
        if self.checkpoint != CheckpointOptions():
            yield Problem("checkpoint", what, "leave out the flags of checkpoints, or leave out --inference")


def _typed(name: str) -> str:
    return next(setting.flag.typed for setting in RUN_FLAGS.values() if setting.name == name)


def run_options(flags: Mapping[str, object], settings: Sequence[Given] = ()) -> RunOptions:
    """The options of one run: flags override `settings`, of `--set` or of `set` in Python. Raises OptionError."""
    if removed := [setting.name for setting in settings if setting.value is None]:
        what = f"--set {removed[0]}= removes an option, which a run cannot: the PEF has it"
        remedy = f"--set {removed[0]}=VALUE, or compile the model again with --set {removed[0]}="
        raise OptionError(what, remedy=remedy)
    changes = (setting._replace(path=["overrides", *setting.path]) for setting in settings)
    given = [*changes, *given_flags(flags, RUN_FLAGS, dotted_names(Sections))]
    mapping = assign({}, given)
    if "overrides" in mapping:
        mapping["overrides"] = absolute_names(as_table(mapping["overrides"]), Path.cwd())
    return build(RunOptions, mapping, given=given)


class ResolvedRun(Sections):
    """What a run trains, and in words what `changed` since the PEF was compiled."""

    changed: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, JsonValue]:
        return self.model_dump(mode="json", exclude={"changed"})


def with_deepspeed(
    options: RunOptions, training_defaults: Mapping[str, object], compiled: Mapping[str, object], replicas: int
) -> tuple[RunOptions, list[Given], list[str]]:
    """`options` with what their DeepSpeed config, if there is one, changes of a PEF, below what was typed; that alone,
    and notes. `compiled`: its compile options. Raises OptionError, which lists all that is compiled otherwise."""
    if options.deepspeed is None:
        return options, [], []
    stored = {**training_defaults, "compile": compiled, "parallel": compiled}
    starts = "mpirun -np" if options.emulate_replicas is None else "--emulate-replicas"
    batch_size = as_table(training_defaults.get("training")).get("batch_size")
    world = World(replicas, counted(replicas, "replica"), starts, batch_size if isinstance(batch_size, int) else None)
    typed = [Given(path, value, "a flag, or --set") for path, value in leaf_paths(options.overrides)]
    given, notes = deepspeed_options(options.deepspeed, assign(stored, typed), typed, world, stored)
    return options.model_copy(update={"overrides": assign({}, [*given, *typed])}), given, notes


def resolve_run(
    options: RunOptions,
    training_defaults: Mapping[str, object],
    data_source: Mapping[str, object],
    given: Sequence[Given] = (),
    states: Sequence[Collection[str]] = (),
) -> ResolvedRun:
    """What the PEF stores, with the overrides of the run, of which a file may have `given` some. `states`: of each
    of its optimizers. Raises PefError for invalid stored options, OptionError for invalid overrides."""
    try:
        stored = build(Sections, {**training_defaults, "data": dict(data_source)})
    except OptionError as error:
        heading, *each = (line.strip() for line in error.what.split("\n"))
        what = f"the PEF stores invalid options for its runs: {heading} {'; '.join(each)}".rstrip()
        raise PefError(what, remedy="compile it again") from None
    if stored.optimizer is None and not options.inference:
        raise OptionError("this PEF was compiled for inference and cannot train", remedy="add --inference")
    before = stored.model_dump(mode="json")
    if problems := _compiled_in(options.overrides, leaves(before)):
        raise refusal(problems)
    kept = unreplaced(before, leaves(options.overrides))
    merged = build(Sections, _merge(kept, options.overrides), given=given)
    problems = [*_other_arguments(stored, merged), *_switched(stored.optimizer, merged.optimizer, states)]
    if stored.ema is None and options.save_ema is not None:
        remedy = "compile again: sambasim compile … --ema 0.999"
        problems.append(Problem("save_ema", "needs a PEF with averages", remedy))
    if problems:
        raise refusal(problems)
    values = changed_values(before, merged.model_dump(mode="json")).items()
    changed = [f"{name} = {now} (compiled: {was})" for name, (was, now) in values if now not in ("none", "{}")]
    return ResolvedRun.model_construct(**dict(merged), changed=tuple(changed))


def _merge(under: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


_FIXED = ("optimizer.name", "training.batch_size", "ema.buffers", "data.buckets")


def _compiled_in(overrides: Mapping[str, object], was: Mapping[str, object]) -> list[Problem]:
    problems: list[Problem] = []
    for name, value in leaves(overrides).items():
        section, _, own = name.partition(".")
        if section == "parallel" and own in RunFields.__annotations__ and own != "data_parallel":  # which both have
            problems.append(Problem(name, "is an option of run itself", f"sambasim run … {_typed(own)} {value}", value))
        elif section in ("compile", "model", "parallel") or (section == "ema" and was.get("ema.every") is None):
            problems.append(_compile_again(name, "is compiled into the PEF", value))
        fixed = name in _FIXED or section == "loss" or name.startswith("data.inputs")
        if fixed and value != was.get(name):
            compiled = f"as {show(was[name])}" if was.get(name) is not None else "without it"
            problems.append(_compile_again(name, f"cannot change: the PEF was compiled {compiled}", value))
    return problems


def _other_arguments(before: Sections, after: Sections) -> Iterator[Problem]:
    for name, argument in after.arguments.items():
        was = before.arguments.get(name)
        if was is None or was.dtype != argument.dtype:
            what = "is no argument of the compiled model" if was is None else f"was compiled as {was.dtype}"
            yield Problem(f"arguments.{name}", what, "compile again, with it in [arguments]")


def _switched(
    before: OptimizerOptions | None, after: OptimizerOptions | None, states: Sequence[Collection[str]]
) -> list[Problem]:
    """Hyperparameters whose new value needs other sections, or another state of an optimizer."""
    if before is None or after is None:
        return []
    was, now = ([(group.match, group.name) for group in optimizer.all_groups()] for optimizer in (before, after))
    if was != now:
        groups = [group.model_dump(exclude_none=True) for group in after.groups]
        return [_compile_again("optimizer.groups", "are compiled in: a run may change their numbers", groups)]
    problems, cannot = list[Problem](), "cannot be turned"
    for bound in ("max_grad_norm", "max_grad_value"):
        if getattr(before, bound) is None and (value := getattr(after, bound)) is not None:
            what = f"{cannot} on: the PEF was compiled without clipping"
            problems.append(_compile_again(f"optimizer.{bound}", what, value))
    for new, kept in zip(after.updates(), states, strict=False):  # an app has updates of its own
        for state, switch in () if new.is_own else OPTIMIZERS[new.name].needs.items():
            if getattr(new, switch) and state not in kept:
                what = f"{cannot} on: the PEF was compiled without it"
                problems.append(_compile_again(f"optimizer.{switch}", what, getattr(new, switch)))
    return problems[:1]


def _compile_again(name: str, what: str, value: object) -> Problem:
    return Problem(name, what, f"compile again: sambasim compile … --set {name}={show(value)}", value)
