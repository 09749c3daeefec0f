"""The flags of `compile` and `run`, and the fields of options that they set. To add a flag, add a field with a `Flag`:
its docstring is its help, in the `panel` of its class. A command line is read without pydantic, see `problem.py`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from sambasim.errors import (
    LARGEST_COUNT,
    LARGEST_INTEGER,
    LONGEST_WAIT_S,
    MOST_MICRO_STEPS,
    MOST_REPLICAS,
    MOST_THREADS,
    MOST_TILES,
)
from sambasim.optimizers import OPTIMIZERS
from sambasim.options import grammar
from sambasim.options.flag import (
    CHECKPOINTS,
    DATA,
    DEVICE,
    EVALUATION,
    INFERENCE,
    MODEL,
    NUMERICS,
    OUTPUT,
    PARALLEL,
    TRAINING,
    Flag,
    flags_in,
)
from sambasim.options.grammar import LOSS_ARGUMENTS, LossName, OptimizerName, PefName, Source
from sambasim.options.problem import Count, Factor, FilePath, PositiveFactor, Replicas, Text, after, before, limits

if TYPE_CHECKING:
    from sambasim.options.base import Options as Fields
else:
    Fields = object  # models derive from these classes and from Options, whose import takes pydantic

Whole: TypeAlias = Annotated[int, limits(ge=0, le=LARGEST_COUNT)]
OnNonfinite: TypeAlias = Literal["stop", "skip", "ignore"]
ScheduleName: TypeAlias = Literal[
    "constant", "linear", "cosine", "step", "warmup", "warmup_decay", "warmup_cosine", "one_cycle", "range_test"
]

MOST_TRACED_STEPS = 1000  # a trace stays in memory until it is written
SAVE_SUFFIX = ".safetensors"
WEIGHTS_SUFFIXES = (SAVE_SUFFIX, ".pt", ".pth", ".bin", ".ckpt")
MOST_WORKERS = 256  # the most worker processes of one rank: a PEF can ask for them, and each takes memory

TrainingFlag = partial(Flag, training_only=True)
_OF_TORCH = "that of the optimizer in torch"

OPT_LEVELS = {
    "o0": "One operator per section.",
    "o1": "Operators of one module share a section, at most 8.",
    "o3": "The grouping with the shortest predicted step.",
}

_JOINED = before(lambda given: ",".join(map(str, given)) if isinstance(given, list | tuple) else given)
_OR_BARE = before(lambda given: given if not isinstance(given, bool) else "newest" if given else None)
_OF_FILE = after(lambda name: "sn40" if name == "sn40l" else name)  # as the file of the device is called


class DataFields(Fields):
    panel = DATA
    source: Annotated[Source | None, Flag("--data")] = None
    """The data source: module:function, file.py:NAME, FILE.npz, FILE.safetensors or synthetic."""
    workers: Annotated[int, limits(ge=0, le=MOST_WORKERS), Flag("--workers")] = 0
    """Worker processes of each rank that read data."""


class LossFields(Fields):
    panel = TRAINING
    name: Annotated[LossName, Flag("--loss", values=(*LOSS_ARGUMENTS, "module:function"))]
    """Loss of outputs and target: {values}."""


class OptimizerFields(Fields):
    panel = TRAINING
    name: Annotated[OptimizerName, Flag("--optimizer", compiled_in=True, values=(*OPTIMIZERS, "module:function"))]
    """Optimizer: {values}."""
    lr: Annotated[Factor | None, Flag("--lr", default=_OF_TORCH)] = None
    """Learning rate."""
    momentum: Annotated[Factor | None, Flag("--momentum")] = None
    """Momentum of SGD."""
    weight_decay: Annotated[Factor | None, Flag("--weight-decay", default=_OF_TORCH)] = None
    """Weight decay."""
    no_decay: Annotated[Text | None, _JOINED, Flag("--no-decay PATTERNS", compiled_in=True)] = None
    """Parameters without weight decay, by name: '*.bias,*norm*'. The config can have [[optimizer.groups]]."""
    max_grad_norm: Annotated[PositiveFactor | None, Flag("--max-grad-norm")] = None
    """Clip the norm of all gradients to this; a run needs a PEF with clipping."""
    max_grad_value: Annotated[PositiveFactor | None, Flag("--max-grad-value")] = None
    """Clip each element of gradients to this; a run needs a PEF with it."""


class EmaFields(Fields):
    panel = TRAINING
    decay: Annotated[float | None, limits(gt=0, lt=1), Flag("--ema DECAY")] = None
    """Keep an exponential moving average of the weights, for evaluations and run --save-ema."""


class TrainingFields(Fields):
    panel = TRAINING
    batch_size: Annotated[Count, Flag("-b --batch-size", MODEL, compiled_in=True)] = 1
    """Samples that one replica takes in one micro-step."""
    epochs: Annotated[Count | None, Flag("--epochs")] = None
    """Passes over the data."""
    steps: Annotated[Count | None, Flag("--steps")] = None
    """Optimizer steps, instead of epochs."""
    accumulation_steps: Annotated[int, limits(ge=1, le=MOST_MICRO_STEPS), Flag("--grad-accumulation-steps")] = 1
    """Micro-steps in one optimizer step."""
    seed: Annotated[int, limits(ge=0, le=LARGEST_INTEGER), Flag("--seed")] = 0
    """Seed of the order of samples, of dropout and of all other random numbers; of compile, also of the first weights,
    which a run keeps."""


class EvaluationFields(Fields):
    panel = EVALUATION
    enabled: Annotated[bool, Flag("--evaluate/--no-evaluate")] = True
    """Evaluate on the held-out samples during training, if there are any."""
    data: Annotated[Source | None, Flag("--evaluation-data")] = None
    """Hold out this data source, of the same kinds as --data."""
    every: Annotated[grammar.Interval, Flag("--evaluate-every N[steps|epochs]")] = "1epoch"
    """Evaluate this often, and at the end."""
    metrics: Annotated[grammar.Metrics, Flag("--evaluation-metrics NAMES", values=grammar.METRIC_NAMES)] = None
    """Also measure {values}, by torchmetrics; a function gets outputs and targets of all samples."""
    keep_best: Annotated[Text | None, Flag("--keep-best METRIC")] = None
    """Keep the weights of the best evaluation by this metric, loss or accuracy."""
    mode: Annotated[Literal["max", "min"] | None, Flag("--best-mode", default="known by name")] = None
    """Whether the largest value of it is the best, or the smallest."""
    load_best: Annotated[bool, Flag("--load-best")] = False
    """End with these weights: those that --save writes."""
    stop_after: Annotated[Count | None, Flag("--stop-after N")] = None
    """End after N evaluations in a row that are not better than the best, by --keep-best or the loss."""


class ScheduleFields(Fields):
    panel = TRAINING
    name: Annotated[ScheduleName, Flag("--lr-schedule")] = "constant"
    """Factor of the learning rate over optimizer steps; --set training.schedule.total_steps=N gives its end."""
    warmup_steps: Annotated[Whole, Flag("--warmup-steps")] = 0
    """Optimizer steps of warm-up before it."""


class BuildFields(Fields):
    panel = DEVICE
    pef_name: Annotated[PefName | None, Flag("--pef-name", MODEL, default="the model's name")] = None
    """Name of the PEF."""
    output_folder: Annotated[FilePath, Flag("--output-folder", MODEL)] = Path("out")
    """Write OUT/NAME/NAME.pef in this folder."""
    check: Annotated[Whole | None, Flag("--check", NUMERICS, default="2 to 8, fewer for large ones")] = None
    """Steps in which the PEF is compared with eager PyTorch, bit for bit; 0 for none."""
    inference: Annotated[bool, Flag("--inference", MODEL)] = False
    """Compile the forward pass only: no loss, no optimizer."""
    opt_level: Annotated[Literal["o0", "o1", "o3"], Flag("--o0/--o1/--o3", choices=OPT_LEVELS)] = "o3"
    """How operators are grouped into sections."""
    arch: Annotated[Literal["sn10", "sn20", "sn30", "sn40", "sn40l"], _OF_FILE, Flag("--arch")] = "sn30"
    """Device to compile for."""
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], Flag("--dtype", NUMERICS)] = "fp32"
    """How parameters, activations and gradients are stored; fp16 scales the loss."""
    stochastic_rounding: Annotated[bool, Flag("--enable-stoc-rounding", NUMERICS)] = False
    """With bf16: optimizer steps round stochastically."""
    master_weights: Annotated[bool, Flag("--master-weights", NUMERICS)] = False
    """With bf16: optimizers update float32 copies of parameters, and have float32 states. fp16 always has them."""
    num_tiles: Annotated[int | None, limits(ge=1, le=MOST_TILES), Flag("--num-tiles", default="all")] = None
    """Tiles of the device that one replica has."""


class ParallelFields(Fields):
    panel = PARALLEL
    data_parallel: Annotated[bool, Flag("--data-parallel")] = False
    """Add gradient groups, REDUCE and GATHER sections."""
    world_size: Annotated[Replicas, Flag("-ws --ws --world-size")] = 1
    """Fewest replicas that may run the PEF."""
    tensor_parallel: Annotated[Literal["weight", "batch"] | None, Flag("--tensor-parallel")] = None
    """What is cut over the chips of a replica: weights, in pairs of products, or the batch."""
    n_chips: Annotated[Replicas, Flag("--n-chips")] = 1
    """Chips of one replica, each with a rank of its own."""
    pipeline_stages: Annotated[Replicas, Flag("--pipeline-stages")] = 1
    """Ranks of a pipeline, each with some of the layers of a replica."""
    micro_batches: Annotated[Count, Flag("--micro-batches")] = 1
    """Parts of a batch, which go through the pipeline one after another."""
    schedule: Annotated[str, Flag("--schedule NAME|FILE.csv")] = "1f1b"
    """Order of work in the pipeline: gpipe, 1f1b, interleaved-1f1b, zb-h1, or a file."""
    zero: Annotated[int, limits(ge=0, le=3), Flag("--zero")] = 1
    """What replicas keep in slices only: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    recompute: Annotated[Literal["none", "sections", "full"], Flag("--recompute")] = "none"
    """Compute activations again in the backward: those inside sections, or all but one tensor a segment."""
    gradient_groups: Annotated[Literal["section", "parameter"], Flag("--gradient-groups")] = "section"
    """A gradient group holds all gradients of a backward section, or that of one parameter."""


class CallFields(Fields):
    panel = TRAINING
    deepspeed: Annotated[FilePath | None, Flag("--deepspeed FILE")] = None
    """A DeepSpeed config: batches, optimizer, scheduler, precision, clipping, ZeRO. It overrides --config."""


class CheckpointFields(Fields):
    panel = CHECKPOINTS
    dir: Annotated[FilePath | None, Flag("--checkpoint-dir DIR")] = None
    """Write checkpoints of the run here."""
    every: Annotated[grammar.IntervalOrTime, Flag("--checkpoint-every N[steps|epochs|s|min|h]")] = "10min"
    """Write one this often, and one at the end."""
    keep: Annotated[Count, Flag("--keep K")] = 3
    """Keep the newest K checkpoints."""
    resume: Annotated[Text | None, _OR_BARE, Flag("--resume [auto|if-any|PATH]", bare="newest")] = None
    """Continue from the newest checkpoint, which must be valid. auto: from the newest that is valid. if-any: the same,
    or from the start if there is none. PATH: from that checkpoint."""
    exact: Annotated[bool, Flag("--exact")] = False
    """With --resume: exit with an error if the bits of the run would change."""
    on_failure: Annotated[Literal["warn", "stop"], Flag("--on-checkpoint-failure")] = "warn"
    """If a checkpoint cannot be written: warn and continue, or stop the run."""


class RunFields(Fields):
    panel = OUTPUT
    pef: Annotated[Text, Flag("-p --pef", DATA)]
    """The PEF: a path, or NAME for OUT/NAME/NAME.pef."""
    trust: Annotated[bool, Flag("--trust", DATA)] = False
    """Execute a PEF that another account compiled, and open its data source."""
    weights: Annotated[FilePath | None, Flag("--weights FILE", DATA)] = None
    """Start from these weights: a file of --save, or a state_dict in .pt, .pth, .bin or .ckpt, or the folder of a
    checkpoint."""
    strict: Annotated[bool, Flag("--strict/--no-strict", DATA)] = True
    """Whether --weights must fit the model; else what fits is taken, and the rest told."""
    deepspeed: Annotated[FilePath | None, TrainingFlag("--deepspeed FILE", TRAINING)] = None
    """A DeepSpeed config: changes what a run may change, and must agree with what is compiled in."""
    data_parallel: Annotated[bool | None, Flag("--data-parallel", PARALLEL, default="on if np > 1")] = None
    """Average gradients over replicas."""
    reduce_on_rdu: Annotated[bool, Flag("--reduce-on-rdu", PARALLEL)] = False
    """Sync gradients between devices, and not through the host."""
    host_sync: Annotated[Literal["mpi", "gloo", "parameter-server"], TrainingFlag("--host-sync", PARALLEL)] = "mpi"
    """How hosts exchange gradients."""
    wire: Annotated[Literal["fp32", "bf16"], TrainingFlag("--wire", PARALLEL)] = "fp32"
    """bf16: replicas exchange gradients rounded to bfloat16, and add them in float32. Parameters stay as they are."""
    parameter_servers: Annotated[
        int | None, limits(ge=0, le=MOST_REPLICAS), TrainingFlag("--parameter-servers N", PARALLEL, default="0")
    ] = None
    """The last N ranks are parameter servers and do not train; with 0, rank 0 trains and serves."""
    emulate_replicas: Annotated[Replicas | None, TrainingFlag("--emulate-replicas N", PARALLEL)] = None
    """Run N replicas in one process, with the same bits as under mpirun."""
    one_process_per_replica: Annotated[bool, TrainingFlag("--one-process-per-replica", PARALLEL)] = False
    """mpirun starts a process for each replica, which runs all its stages and the parts of its weights."""
    cluster: Annotated[Text | None, Flag("--cluster NAME|FILE", PARALLEL, default="that of the device")] = None
    """The simulated machine, see `sambasim devices`."""
    threads: Annotated[
        int | None, limits(ge=1, le=MOST_THREADS), Flag("--threads", PARALLEL, default="cores of the node / its ranks")
    ] = None
    """Intra-op threads of each rank."""
    # Longer than any step, batch or section should take, and short against a night.
    sync_timeout: Annotated[float, limits(gt=0, le=LONGEST_WAIT_S), Flag("--sync-timeout SECONDS", PARALLEL)] = 300.0
    """Seconds that ranks wait for one that hangs."""
    engine: Annotated[Literal["plain", "inductor"], Flag("--engine", NUMERICS)] = "plain"
    """inductor: compile sections with torch's inductor, which needs g++."""
    on_nonfinite: Annotated[OnNonfinite, TrainingFlag("--on-nonfinite", NUMERICS)] = "stop"
    """If the loss is NaN or infinite: stop the run, skip the update of that step, or ignore it. skip turns off the
    overlap of sync with the backward pass. Gradients are not checked."""
    debug_numerics: Annotated[bool, TrainingFlag("--debug-numerics", NUMERICS)] = False
    """Check the result of every operator, and stop at the first NaN or infinity. Slow."""
    metrics: Annotated[FilePath | None, TrainingFlag("--metrics FILE")] = None
    """Write steps, evaluations and a summary as JSON lines. FILE.csv: tables of steps and, in FILE.evaluations.csv, of
    evaluations."""
    tensorboard: Annotated[FilePath | None, TrainingFlag("--tensorboard DIR")] = None
    """Write losses, rates and evaluations for TensorBoard here."""
    callback: Annotated[grammar.Target | None, TrainingFlag("--callback module:function")] = None
    """Call this function, of a module or of file.py, at each step, evaluation and checkpoint, and at the end. Its event
    has the record, can read the weights, and can stop the run."""
    callback_ranks: Annotated[Literal["first", "all"], TrainingFlag("--callback-ranks")] = "first"
    """With callbacks: which ranks call them."""
    save: Annotated[FilePath | None, TrainingFlag("--save FILE.safetensors")] = None
    """Save the trained weights, for load_state_dict."""
    save_ema: Annotated[FilePath | None, TrainingFlag("--save-ema FILE.safetensors")] = None
    """Save the average of the weights, of a PEF compiled with --ema."""
    trace: Annotated[FilePath | None, TrainingFlag("--trace FILE")] = None
    """Write one trace of all ranks, for ui.perfetto.dev."""
    trace_steps: Annotated[
        int | None, limits(ge=1, le=MOST_TRACED_STEPS), TrainingFlag("--trace-steps N", default="3, after the first 2")
    ] = None
    """With --trace: how many steps it holds."""
    record_digests: Annotated[FilePath | None, TrainingFlag("--record-digests FOLDER")] = None
    """Write a digest of every value that leaves its section, for `sambasim compare`: one file per replica, some 100
    bytes per value and step. Slow."""
    record_steps: Annotated[grammar.Steps | None, TrainingFlag("--record-steps FIRST-LAST", default="all")] = None
    """With --record-digests: which steps."""
    log_dir: Annotated[FilePath | None, TrainingFlag("--log-dir FOLDER")] = None
    """Write one log file per rank here."""
    json_output: Annotated[bool, Flag("--json")] = False
    """Print the summary as one JSON line, and nothing else."""
    verbose: Annotated[bool, TrainingFlag("-v --verbose")] = False
    """Print the digests of what was trained, and where replicas are on the simulated machine, as --cluster,
    --reduce-on-rdu and --predict do."""
    predict: Annotated[bool, TrainingFlag("--predict")] = False
    """Print at the end what is predicted for the simulated device, too."""
    inference: Annotated[bool, Flag("--inference", INFERENCE)] = False
    """Predict instead of training."""
    predictions: Annotated[FilePath | None, Flag("--predictions FILE.safetensors", INFERENCE)] = None
    """With --inference: write the outputs here."""


_OF_COMPILE: Mapping[str, type[Fields]] = {
    "": CallFields, "compile": BuildFields, "parallel": ParallelFields, "data": DataFields, "loss": LossFields,
    "optimizer": OptimizerFields, "ema": EmaFields, "training": TrainingFields, "training.schedule": ScheduleFields,
}  # fmt: skip
_OF_RUN: Mapping[str, type[Fields]] = {
    "": RunFields, "overrides.data": DataFields, "overrides.training": TrainingFields,
    "overrides.training.schedule": ScheduleFields, "overrides.optimizer": OptimizerFields,
    "overrides.evaluation": EvaluationFields, "checkpoint": CheckpointFields,
}  # fmt: skip
COMPILE_FLAGS, RUN_FLAGS = flags_in(_OF_COMPILE), flags_in(_OF_RUN, of_run=True)
