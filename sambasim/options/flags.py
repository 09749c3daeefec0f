"""Every flag of `compile` and `run`, declared as the field of the options that it sets. To add a flag, add a field.
Nothing here imports pydantic: `--help` is quick."""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from sambasim.options.load import Options as Fields
else:
    Fields = object

MOST_MICRO_STEPS = 4096
"""The most micro-steps of one optimizer step: a prediction has a time for each section of each of them."""

MOST_WORKERS = 256
"""The most worker processes of one rank: a PEF can ask for them, and each takes memory."""

MOST_TRACED_STEPS = 1000
"""A trace stays in memory until it is written."""

MOST_REPLICAS = 16_384
"""More than any published job has; a placement lists each."""

MOST_THREADS = 4096
"""More than any node has cores; each thread has a stack."""

LONGEST_TIMEOUT_S = 31_536_000
"""A year."""

LARGEST_COUNT = 10**9
"""The largest count of steps, samples and the like: more than any run has."""

SYNC_TIMEOUT_S = 300.0
"""Longer than any step, batch or section should take, and short against a night."""

SAVE_SUFFIX = ".safetensors"

HostSyncName: TypeAlias = Literal["mpi", "gloo", "parameter-server"]
OnNonfinite: TypeAlias = Literal["stop", "skip", "ignore"]
Command: TypeAlias = Literal["compile", "run"]


class Flag(NamedTuple):
    """How a field is given on the command line. `usage` has its names and how `--help` shows the value; `only` is the
    one command that has it; `bare` is the value of the flag without one; `choices` makes one switch for each value;
    `training_only` is an error with `run --inference`."""

    usage: str
    help: str
    panel: str
    only: Command | None = None
    default: str | None = None
    bare: str | None = None
    choices: Mapping[str, str] = MappingProxyType({})
    training_only: bool = False

    @property
    def names(self) -> list[str]:
        """`["-b", "--batch-size"]`."""
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        """How `--help` shows the value; None for the name of its type."""
        return next((word for word in self.usage.split() if not word.startswith("-")), None)

    @property
    def typed(self) -> str:
        """The flag in a sentence: `--lr`, `--evaluate or --no-evaluate`."""
        return self.names[-1].replace("/", " or ")


TrainingFlag = partial(Flag, training_only=True)


class Limits:
    """What a value must satisfy beside its type, as `pydantic.Field` says it, without an import of pydantic."""

    def __init__(self, **limits: float | bool) -> None:
        self._limits = limits

    def __get_pydantic_core_schema__(self, source: type, handler: Any) -> Any:
        return {**handler(source), **self._limits}


FilePath = Annotated[Path, Limits(strict=False)]

Count = Annotated[int, Limits(ge=1, le=LARGEST_COUNT)]
Replicas = Annotated[int, Limits(ge=1, le=MOST_REPLICAS)]
Seed = Annotated[int, Limits(ge=0, lt=2**63)]
Text = Annotated[str, Limits(min_length=1)]

MODEL, DATA, TRAINING, PARALLEL = "Model and PEF", "PEF and data", "Training", "Replicas and gradient sync"
DEVICE, OUTPUT, CHECKPOINTS, INFERENCE = "Device and sections", "Output", "Checkpoints", "Inference"
NUMERICS, OTHER = "Numerics", "Other"
PANELS = (MODEL, DATA, TRAINING, PARALLEL, DEVICE, OUTPUT, CHECKPOINTS, INFERENCE, NUMERICS, OTHER)


_OF_OPTIMIZER = "that of the optimizer in torch"


class DataFlags(Fields):
    """Fields of `[data]`."""

    source: Annotated[
        str | None,
        Flag(
            "--data", "The data source: module:function, file.py:NAME, FILE.npz, FILE.safetensors or synthetic.", DATA
        ),
    ] = None
    workers: Annotated[
        int, Limits(ge=0, le=MOST_WORKERS), Flag("--workers", "Worker processes of each rank that read data.", DATA)
    ] = 0


class LossFlags(Fields):
    """Fields of `[loss]`."""

    name: Annotated[
        str,
        Flag("--loss", "Loss of outputs and target: cross_entropy, mse, … or module:function.", TRAINING, "compile"),
    ]


class TrainingFlags(Fields):
    """Fields of `[training]`."""

    batch_size: Annotated[
        Count, Flag("-b --batch-size", "Samples that one replica takes in one micro-step.", MODEL, only="compile")
    ] = 1
    epochs: Annotated[Count | None, Flag("--epochs", "Passes over the data.", TRAINING)] = None
    steps: Annotated[Count | None, Flag("--steps", "Optimizer steps, instead of epochs.", TRAINING)] = None
    accumulation_steps: Annotated[
        int,
        Limits(ge=1, le=MOST_MICRO_STEPS),
        Flag("--grad-accumulation-steps", "Micro-steps in one optimizer step.", TRAINING),
    ] = 1
    seed: Annotated[
        Seed,
        Flag("--seed", "Seed of the order of samples, of dropout and of all other random numbers.", TRAINING),
    ] = 0
    evaluate: Annotated[
        bool,
        Flag("--evaluate/--no-evaluate", "Evaluate on the held-out samples after each epoch.", TRAINING, only="run"),
    ] = True


class OptimizerFlags(Fields):
    """Fields of `[optimizer]`."""

    name: Annotated[str, Flag("--optimizer", "Optimizer: sgd, adam, adamw, adagrad or lion.", TRAINING, "compile")]
    lr: Annotated[float, Limits(ge=0), Flag("--lr", "Learning rate.", TRAINING, default=_OF_OPTIMIZER)] = 1e-3
    momentum: Annotated[Annotated[float, Limits(ge=0)] | None, Flag("--momentum", "Momentum of SGD.", TRAINING)] = None
    weight_decay: Annotated[
        float, Limits(ge=0), Flag("--weight-decay", "Weight decay.", TRAINING, default=_OF_OPTIMIZER)
    ] = 0.0
    max_grad_norm: Annotated[
        Annotated[float, Limits(gt=0)] | None,
        Flag("--max-grad-norm", "Clip the norm of all gradients to this; a run needs a PEF with clipping.", TRAINING),
    ] = None


class ParallelFlags(Fields):
    """Fields of `[parallel]`."""

    data_parallel: Annotated[
        bool, Flag("--data-parallel", "Add gradient groups, REDUCE and GATHER sections.", PARALLEL)
    ] = False
    world_size: Annotated[
        Replicas, Flag("-ws --ws --world-size", "Fewest replicas that may run the PEF.", PARALLEL)
    ] = 1
    tensor_parallel: Annotated[
        Literal["weight", "batch"] | None,
        Flag(
            "--tensor-parallel",
            "What is cut over the chips of a replica: weights, in pairs of products, or the batch.",
            PARALLEL,
        ),
    ] = None
    n_chips: Annotated[Replicas, Flag("--n-chips", "Chips of one replica, each with a rank of its own.", PARALLEL)] = 1
    pipeline_stages: Annotated[
        Replicas, Flag("--pipeline-stages", "Ranks of a pipeline, each with some of the layers of a replica.", PARALLEL)
    ] = 1
    micro_batches: Annotated[
        Count, Flag("--micro-batches", "Parts of a batch, which go through the pipeline one after another.", PARALLEL)
    ] = 1
    schedule: Annotated[
        str,
        Flag(
            "--schedule NAME|FILE.csv",
            "Order of work in the pipeline: gpipe, 1f1b, interleaved-1f1b, zb-h1, or a file.",
            PARALLEL,
        ),
    ] = "1f1b"
    zero: Annotated[
        int,
        Limits(ge=0, le=3),
        Flag(
            "--zero",
            "What replicas keep in slices only: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.",
            PARALLEL,
        ),
    ] = 1
    recompute: Annotated[
        Literal["none", "sections", "full"],
        Flag(
            "--recompute",
            "Compute activations again in the backward: those inside sections, or all but one tensor a segment.",
            PARALLEL,
        ),
    ] = "none"
    gradient_groups: Annotated[
        Literal["section", "parameter"],
        Flag(
            "--gradient-groups",
            "A gradient group holds all gradients of a backward section, or that of one parameter.",
            PARALLEL,
        ),
    ] = "section"


class BuildFlags(Fields):
    """Fields of `[compile]`."""

    pef_name: Annotated[str | None, Flag("--pef-name", "Name of the PEF.", MODEL, default="the model's name")] = None
    output_folder: Annotated[FilePath, Flag("--output-folder", "Write OUT/NAME/NAME.pef in this folder.", MODEL)] = (
        Path("out")
    )
    check: Annotated[
        Annotated[int, Limits(ge=0, le=LARGEST_COUNT)] | None,
        Flag(
            "--check",
            "Steps in which the PEF is compared with eager PyTorch, bit for bit; 0 for none.",
            NUMERICS,
            default="2 to 8, fewer for large ones",
        ),
    ] = None
    inference: Annotated[bool, Flag("--inference", "Compile the forward pass only: no loss, no optimizer.", MODEL)] = (
        False
    )
    opt_level: Annotated[
        Literal["o0", "o1", "o3"],
        Flag(
            "--o0/--o1/--o3",
            "How operators are grouped into sections.",
            DEVICE,
            choices={
                "o0": "One operator per section.",
                "o1": "Operators of one module share a section, at most 8.",
                "o3": "The grouping with the shortest predicted step.",
            },
        ),
    ] = "o3"
    arch: Annotated[Literal["sn10", "sn30", "sn40"], Flag("--arch", "Device to compile for.", DEVICE)] = "sn30"
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Flag("--dtype", "How parameters, activations and gradients are stored; fp16 scales the loss.", NUMERICS),
    ] = "fp32"
    stochastic_rounding: Annotated[
        bool, Flag("--enable-stoc-rounding", "With bf16: optimizer steps round stochastically.", NUMERICS)
    ] = False
    master_weights: Annotated[
        bool,
        Flag(
            "--master-weights",
            "With bf16: optimizers update float32 copies of parameters, and have float32 states. fp16 always has them.",
            NUMERICS,
        ),
    ] = False
    num_tiles: Annotated[
        Count | None, Flag("--num-tiles", "Tiles of the device that one replica has.", DEVICE, default="all")
    ] = None


class CheckpointFlags(Fields):
    """Fields of `RunOptions.checkpoint`."""

    dir: Annotated[FilePath | None, Flag("--checkpoint-dir DIR", "Write checkpoints of the run here.", CHECKPOINTS)] = (
        None
    )
    every: Annotated[
        str | None,
        Flag(
            "--checkpoint-every N[steps|epochs|s|min|h]",
            "Write one this often, and one at the end.",
            CHECKPOINTS,
            default="10min",
        ),
    ] = None
    keep: Annotated[Count | None, Flag("--keep K", "Keep the newest K checkpoints.", CHECKPOINTS, default="3")] = None
    resume: Annotated[
        Text | None,
        Flag(
            "--resume [auto|if-any|PATH]",
            "Continue from the newest checkpoint, which must be valid. auto: from the newest that is valid. if-any: "
            "the same, or from the start if there is none. PATH: from that checkpoint.",
            CHECKPOINTS,
            bare="newest",
        ),
    ] = None
    exact: Annotated[
        bool, Flag("--exact", "With --resume: exit with an error if the bits of the run would change.", CHECKPOINTS)
    ] = False
    on_failure: Annotated[
        Literal["warn", "stop"] | None,
        Flag(
            "--on-checkpoint-failure",
            "If a checkpoint cannot be written: warn and continue, or stop the run.",
            CHECKPOINTS,
            default="warn",
        ),
    ] = None


class RunFlags(Fields):
    """Fields of RunOptions."""

    pef: Annotated[Text, Flag("-p --pef", "The PEF: a path, or NAME for OUT/NAME/NAME.pef.", DATA)]
    trust: Annotated[
        bool, Flag("--trust", "Execute a PEF that another account compiled, and open its data source.", DATA)
    ] = False
    weights: Annotated[FilePath | None, Flag("--weights FILE", "Start from these weights, a file of --save.", DATA)] = (
        None
    )
    deepspeed: Annotated[
        FilePath | None,
        TrainingFlag(
            "--deepspeed FILE",
            "A DeepSpeed config: changes what a run may change, and must agree with what is compiled in.",
            TRAINING,
        ),
    ] = None
    data_parallel: Annotated[
        bool | None, Flag("--data-parallel", "Average gradients over replicas.", PARALLEL, default="on if np > 1")
    ] = None
    reduce_on_rdu: Annotated[
        bool, Flag("--reduce-on-rdu", "Sync gradients between devices, and not through the host.", PARALLEL)
    ] = False
    host_sync: Annotated[
        HostSyncName | None, TrainingFlag("--host-sync", "How hosts exchange gradients.", PARALLEL, default="mpi")
    ] = None
    parameter_servers: Annotated[
        Annotated[int, Limits(ge=0, le=MOST_REPLICAS)] | None,
        TrainingFlag(
            "--parameter-servers N",
            "The last N ranks are parameter servers and do not train; with 0, rank 0 trains and serves.",
            PARALLEL,
            default="0",
        ),
    ] = None
    emulate_replicas: Annotated[
        Replicas | None,
        TrainingFlag(
            "--emulate-replicas N", "Run N replicas in one process, with the same bits as under mpirun.", PARALLEL
        ),
    ] = None
    one_process_per_replica: Annotated[
        bool,
        TrainingFlag(
            "--one-process-per-replica",
            "mpirun starts a process for each replica, which runs all its stages and the parts of its weights.",
            PARALLEL,
        ),
    ] = False
    cluster: Annotated[
        Text | None,
        Flag(
            "--cluster NAME|FILE",
            "The simulated machine, see `sambasim devices`.",
            PARALLEL,
            default="that of the device",
        ),
    ] = None
    threads: Annotated[
        Annotated[int, Limits(ge=1, le=MOST_THREADS)] | None,
        Flag("--threads", "Intra-op threads of each rank.", PARALLEL, default="cores of the node / its ranks"),
    ] = None
    sync_timeout: Annotated[
        float,
        Limits(gt=0, le=LONGEST_TIMEOUT_S),
        Flag("--sync-timeout SECONDS", "Seconds that ranks wait for one that hangs.", PARALLEL),
    ] = SYNC_TIMEOUT_S
    engine: Annotated[
        Literal["plain", "inductor"],
        Flag("--engine", "inductor: compile sections with torch's inductor, which needs g++.", NUMERICS),
    ] = "plain"
    on_nonfinite: Annotated[
        OnNonfinite,
        TrainingFlag(
            "--on-nonfinite",
            "If the loss is NaN or infinite: stop the run, skip the update of that step, or ignore it. skip turns "
            "off the overlap of sync with the backward pass. Gradients are not checked.",
            NUMERICS,
        ),
    ] = "stop"
    debug_numerics: Annotated[
        bool,
        TrainingFlag(
            "--debug-numerics",
            "Check the result of every operator, and stop at the first NaN or infinity. Slow.",
            NUMERICS,
        ),
    ] = False
    metrics: Annotated[
        FilePath | None, TrainingFlag("--metrics FILE", "Write steps, evaluations and a summary as JSON lines.", OUTPUT)
    ] = None
    save: Annotated[
        FilePath | None,
        TrainingFlag("--save FILE.safetensors", "Save the trained weights, for load_state_dict.", OUTPUT),
    ] = None
    trace: Annotated[
        FilePath | None, TrainingFlag("--trace FILE", "Write one trace of all ranks, for ui.perfetto.dev.", OUTPUT)
    ] = None
    trace_steps: Annotated[
        Annotated[int, Limits(ge=1, le=MOST_TRACED_STEPS)] | None,
        TrainingFlag(
            "--trace-steps N", "With --trace: how many steps it holds.", OUTPUT, default="3, after the first 2"
        ),
    ] = None
    record_digests: Annotated[
        FilePath | None,
        TrainingFlag(
            "--record-digests FOLDER",
            "Write a digest of every value that leaves its section, for `sambasim compare`: one file per replica, "
            "some 100 bytes per value and step. Slow.",
            OUTPUT,
        ),
    ] = None
    record_steps: Annotated[
        str | None,
        TrainingFlag("--record-steps FIRST-LAST", "With --record-digests: which steps.", OUTPUT, default="all"),
    ] = None
    log_dir: Annotated[
        FilePath | None, TrainingFlag("--log-dir FOLDER", "Write one log file per rank here.", OUTPUT)
    ] = None
    json_output: Annotated[bool, Flag("--json", "Print the summary as one JSON line, and nothing else.", OUTPUT)] = (
        False
    )
    predict: Annotated[
        bool,
        TrainingFlag("--predict", "Print at the end what is predicted for the simulated device, too.", OUTPUT),
    ] = False
    inference: Annotated[bool, Flag("--inference", "Predict instead of training.", INFERENCE)] = False
    predictions: Annotated[
        FilePath | None, Flag("--predictions FILE.safetensors", "With --inference: write the outputs here.", INFERENCE)
    ] = None


class Setting(NamedTuple):
    """A flag with the option that it sets: its keyword in `compile_options` and `run_options`, its dotted name, its
    type without None, and its default, `...` if it has none."""

    keyword: str
    name: str
    flag: Flag
    kind: Any
    default: object


_TABLES: Mapping[Command, Mapping[str, type]] = {
    "compile": {
        "compile": BuildFlags,
        "parallel": ParallelFlags,
        "data": DataFlags,
        "loss": LossFlags,
        "optimizer": OptimizerFlags,
        "training": TrainingFlags,
    },
    "run": {
        "": RunFlags,
        "overrides.data": DataFlags,
        "overrides.training": TrainingFlags,
        "overrides.optimizer": OptimizerFlags,
        "checkpoint": CheckpointFlags,
    },
}


@cache
def flags_of(command: Command) -> Mapping[str, Setting]:
    return {setting.keyword: setting for setting in _settings(command)}


def _settings(command: Command) -> Iterator[Setting]:
    for table, fields in _TABLES[command].items():
        for name, hint in get_type_hints(fields, include_extras=True).items():
            kind, *metadata = get_args(hint)
            (flag,) = (one for one in metadata if isinstance(one, Flag))
            if flag.only in (None, command):
                keyword = name if flag.choices else flag.names[-1].split("/")[0].strip("-").replace("-", "_")
                full_name = f"{table}.{name}" if table else name
                yield Setting(keyword, full_name, flag, _without_none(kind), getattr(fields, name, ...))


def _without_none(hint: Any) -> Any:
    while get_origin(hint) not in (None, Literal):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return hint
