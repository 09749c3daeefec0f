"""The options of `sambasim run`, and how its overrides change those that the PEF stores. A change of what is compiled
in is an error."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from sambasim.bounded import MOST_REPLICAS
from sambasim.errors import OptionError
from sambasim.options.base import Count, FilePath, Given, JsonTable, Options, Problem, Replicas, Text, build, show
from sambasim.options.flag import CHECKPOINTS, DATA, INFERENCE, NUMERICS, OUTPUT, PARALLEL, TRAINING, Flag, flags_in
from sambasim.options.given import as_table, assign, given_flags, leaves
from sambasim.options.grammar import Cadence, absolute_names, parse_cadence, step_range
from sambasim.options.training import DataOptions, OptimizerOptions, TrainingOptions

HostSyncName: TypeAlias = Literal["mpi", "gloo", "parameter-server"]
OnNonfinite: TypeAlias = Literal["stop", "skip", "ignore"]

MOST_TRACED_STEPS = 1000
"""A trace stays in memory until it is written."""

MOST_THREADS = 4096
"""More than any node has cores; each thread has a stack."""

LONGEST_TIMEOUT_S = 31_536_000
"""A year."""

SYNC_TIMEOUT_S = 300.0
"""Longer than any step, batch or section should take, and short against a night."""

SAVE_SUFFIX = ".safetensors"

TrainingFlag = partial(Flag, training_only=True)

DEFAULT_EVERY = "10min"
DEFAULT_KEEP = 3


class CheckpointOptions(Options):
    """Where and how often a run writes checkpoints, and which one it continues from."""

    panel = CHECKPOINTS

    dir: Annotated[FilePath | None, Flag("--checkpoint-dir DIR")] = None
    """Write checkpoints of the run here."""
    every: Annotated[str | None, Flag("--checkpoint-every N[steps|epochs|s|min|h]", default=DEFAULT_EVERY)] = None
    """Write one this often, and one at the end."""
    keep: Annotated[Count | None, Flag("--keep K", default=str(DEFAULT_KEEP))] = None
    """Keep the newest K checkpoints."""
    resume: Annotated[Text | None, Flag("--resume [auto|if-any|PATH]", bare="newest")] = None
    """Continue from the newest checkpoint, which must be valid. auto: from the newest that is valid. if-any: the same,
    or from the start if there is none. PATH: from that checkpoint."""
    exact: Annotated[bool, Flag("--exact")] = False
    """With --resume: exit with an error if the bits of the run would change."""
    on_failure: Annotated[Literal["warn", "stop"] | None, Flag("--on-checkpoint-failure", default="warn")] = None
    """If a checkpoint cannot be written: warn and continue, or stop the run."""

    @property
    def cadence(self) -> Cadence:
        return parse_cadence(self.every or DEFAULT_EVERY)

    @property
    def kept(self) -> int:
        return self.keep or DEFAULT_KEEP

    @field_validator("every")
    @classmethod
    def _check_every(cls, every: str | None) -> str | None:
        parse_cadence(every or DEFAULT_EVERY)
        return every

    def problems(self) -> Iterator[Problem]:
        if self.dir is None:
            for field in ("every", "keep", "on_failure"):
                if getattr(self, field) is not None:
                    remedy = f"add --checkpoint-dir DIR, or leave out {_typed(f'checkpoint.{field}')}"
                    yield Problem(field, "needs a folder for checkpoints, and none is given", remedy)
            if self.resume in ("newest", "auto", "if-any"):
                remedy = "add --checkpoint-dir DIR, or name one: --resume DIR/step-…"
                yield Problem("resume", "needs the folder of the checkpoints", remedy)
        if self.exact and self.resume is None:
            yield Problem("exact", "needs a run that is resumed", "add --resume, or leave out --exact")


class RunOptions(Options):
    """Everything that `run` needs. `data_parallel` None means: on, if the PEF is data parallel and there are two
    replicas or more. `resolve_run` checks `overrides`."""

    panel = OUTPUT

    pef: Annotated[Text, Flag("-p --pef", DATA)]
    """The PEF: a path, or NAME for OUT/NAME/NAME.pef."""
    trust: Annotated[bool, Flag("--trust", DATA)] = False
    """Execute a PEF that another account compiled, and open its data source."""
    weights: Annotated[FilePath | None, Flag("--weights FILE", DATA)] = None
    """Start from these weights, a file of --save."""
    deepspeed: Annotated[FilePath | None, TrainingFlag("--deepspeed FILE", TRAINING)] = None
    """A DeepSpeed config: changes what a run may change, and must agree with what is compiled in."""
    data_parallel: Annotated[bool | None, Flag("--data-parallel", PARALLEL, default="on if np > 1")] = None
    """Average gradients over replicas."""
    reduce_on_rdu: Annotated[bool, Flag("--reduce-on-rdu", PARALLEL)] = False
    """Sync gradients between devices, and not through the host."""
    host_sync: Annotated[HostSyncName | None, TrainingFlag("--host-sync", PARALLEL, default="mpi")] = None
    """How hosts exchange gradients."""
    parameter_servers: Annotated[
        int | None, Field(ge=0, le=MOST_REPLICAS), TrainingFlag("--parameter-servers N", PARALLEL, default="0")
    ] = None
    """The last N ranks are parameter servers and do not train; with 0, rank 0 trains and serves."""
    emulate_replicas: Annotated[Replicas | None, TrainingFlag("--emulate-replicas N", PARALLEL)] = None
    """Run N replicas in one process, with the same bits as under mpirun."""
    one_process_per_replica: Annotated[bool, TrainingFlag("--one-process-per-replica", PARALLEL)] = False
    """mpirun starts a process for each replica, which runs all its stages and the parts of its weights."""
    cluster: Annotated[Text | None, Flag("--cluster NAME|FILE", PARALLEL, default="that of the device")] = None
    """The simulated machine, see `sambasim devices`."""
    threads: Annotated[
        int | None, Field(ge=1, le=MOST_THREADS), Flag("--threads", PARALLEL, default="cores of the node / its ranks")
    ] = None
    """Intra-op threads of each rank."""
    sync_timeout: Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT_S), Flag("--sync-timeout SECONDS", PARALLEL)] = (
        SYNC_TIMEOUT_S
    )
    """Seconds that ranks wait for one that hangs."""
    engine: Annotated[Literal["plain", "inductor"], Flag("--engine", NUMERICS)] = "plain"
    """inductor: compile sections with torch's inductor, which needs g++."""
    on_nonfinite: Annotated[OnNonfinite, TrainingFlag("--on-nonfinite", NUMERICS)] = "stop"
    """If the loss is NaN or infinite: stop the run, skip the update of that step, or ignore it. skip turns off the
    overlap of sync with the backward pass. Gradients are not checked."""
    debug_numerics: Annotated[bool, TrainingFlag("--debug-numerics", NUMERICS)] = False
    """Check the result of every operator, and stop at the first NaN or infinity. Slow."""
    metrics: Annotated[FilePath | None, TrainingFlag("--metrics FILE")] = None
    """Write steps, evaluations and a summary as JSON lines."""
    save: Annotated[FilePath | None, TrainingFlag("--save FILE.safetensors")] = None
    """Save the trained weights, for load_state_dict."""
    trace: Annotated[FilePath | None, TrainingFlag("--trace FILE")] = None
    """Write one trace of all ranks, for ui.perfetto.dev."""
    trace_steps: Annotated[
        int | None, Field(ge=1, le=MOST_TRACED_STEPS), TrainingFlag("--trace-steps N", default="3, after the first 2")
    ] = None
    """With --trace: how many steps it holds."""
    record_digests: Annotated[FilePath | None, TrainingFlag("--record-digests FOLDER")] = None
    """Write a digest of every value that leaves its section, for `sambasim compare`: one file per replica, some 100
    bytes per value and step. Slow."""
    record_steps: Annotated[str | None, TrainingFlag("--record-steps FIRST-LAST", default="all")] = None
    """With --record-digests: which steps."""
    log_dir: Annotated[FilePath | None, TrainingFlag("--log-dir FOLDER")] = None
    """Write one log file per rank here."""
    json_output: Annotated[bool, Flag("--json")] = False
    """Print the summary as one JSON line, and nothing else."""
    predict: Annotated[bool, TrainingFlag("--predict")] = False
    """Print at the end what is predicted for the simulated device, too."""
    inference: Annotated[bool, Flag("--inference", INFERENCE)] = False
    """Predict instead of training."""
    predictions: Annotated[FilePath | None, Flag("--predictions FILE.safetensors", INFERENCE)] = None
    """With --inference: write the outputs here."""
    overrides: JsonTable = Field(default_factory=dict)
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions)

    @field_validator("record_steps")
    @classmethod
    def _check_record_steps(cls, steps: str | None) -> str | None:
        step_range(steps)
        return steps

    def problems(self) -> Iterator[Problem]:
        for field in ("weights", "save", "predictions"):
            path = getattr(self, field)
            if path is not None and path.suffix != SAVE_SUFFIX:
                yield Problem(field, f"must be a {SAVE_SUFFIX} file", _other_name(field, path), show(str(path)))
        if self.predictions is not None and not self.inference:
            yield Problem("predictions", "needs inference", "add --inference")
        if self.debug_numerics and self.engine != "plain":
            what = "fuses operators, and --debug-numerics checks each of them"
            yield Problem("engine", what, "leave out one of the two", self.engine)
        if self.trace_steps is not None and self.trace is None:
            yield Problem("trace_steps", "needs a trace", "add --trace FILE", str(self.trace_steps))
        if self.record_steps is not None and self.record_digests is None:
            given = show(self.record_steps)
            yield Problem("record_steps", "needs a folder for the digests", "add --record-digests FOLDER", given)
        if self.record_digests is not None and self.trace is not None:
            what = "takes most of the time of a step, so a trace would show wrong times"
            yield Problem("record_digests", what, "leave out --record-digests or --trace")
        if self.inference:
            yield from self._inference_problems()
        if self.emulate_replicas is not None and self.emulate_replicas > 1 and self.data_parallel is False:
            what = "needs data parallelism, which is turned off"
            yield Problem("emulate_replicas", what, given=str(self.emulate_replicas))
        if self.one_process_per_replica and self.emulate_replicas is not None:
            what = "is for replicas that mpirun starts, and --emulate-replicas runs all in one process"
            yield Problem("one_process_per_replica", what, "leave out one of the two")
        yield from self._host_sync_problems()

    def _inference_problems(self) -> Iterator[Problem]:
        what = "is for training, and this is inference"
        if self.engine != "plain":
            yield Problem("engine", what, "leave out --engine", self.engine)
        for name in dict(leaves(self.overrides)):
            if name.startswith(("optimizer.", "training.")) and name not in _FOR_OUTPUTS:
                yield Problem(f"overrides.{name}", what, "leave it out, or leave out --inference")
        for setting in RUN_FLAGS.values():
            field, typed = setting.name, setting.flag.typed
            if setting.flag.training_only and field in self.model_fields_set and getattr(self, field):
                yield Problem(field, what, f"leave out {typed}, or leave out --inference")
        if self.checkpoint != CheckpointOptions():
            yield Problem("checkpoint", what, "leave out the flags of checkpoints, or leave out --inference")

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
            yield Problem("parameter_servers", "needs sync through a parameter server", remedy, given)
        if self.emulate_replicas is not None:
            what = "needs ranks of its own, and an emulation has one process"
            yield Problem("parameter_servers", what, "leave out --parameter-servers or --emulate-replicas", given)


RUN_FLAGS = flags_in(
    {
        "": RunOptions,
        "overrides.data": DataOptions,
        "overrides.training": TrainingOptions,
        "overrides.optimizer": OptimizerOptions,
        "checkpoint": CheckpointOptions,
    },
    "run",
)

_FOR_OUTPUTS = ("training.seed", "training.batch_size")
"""Of training, what `--inference` reads too."""


def _other_name(field: str, path: Path) -> str:
    if field == "weights" and os.path.isfile(path / "checkpoint.json"):  # Path.is_file raises in a closed folder
        return f"--resume {path} --steps N --save FILE{SAVE_SUFFIX}, with the N of its step, saves its weights"
    return f"{_typed(field)} {path.parent / f'{path.stem or field}{SAVE_SUFFIX}'}"


def _typed(name: str) -> str:
    return next(setting.flag.typed for setting in RUN_FLAGS.values() if setting.name == name)


def run_options(flags: Mapping[str, object], settings: Sequence[Given] = ()) -> RunOptions:
    """The options of one run: flags override `settings`, those of `--set`, or of `set` in Python. Raises OptionError,
    which lists all mistakes; `resolve_run` checks the settings, together with the PEF."""
    changes = [setting._replace(path=["overrides", *setting.path]) for setting in settings]
    if removed := [".".join(setting.path[1:]) for setting in changes if setting.value is None]:
        raise OptionError(
            f"--set {removed[0]}= removes an option, which a run cannot: the PEF has it",
            remedy=f"--set {removed[0]}=VALUE, or compile the model again with --set {removed[0]}=",
        )
    given = [*changes, *given_flags(flags, RUN_FLAGS)]
    mapping = assign({}, given)
    if "overrides" in mapping:
        mapping["overrides"] = absolute_names(as_table(mapping["overrides"]), Path.cwd())
    return build(RunOptions, mapping, given=given)
