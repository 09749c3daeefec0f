"""The program: everything that a PEF says, as data. The training step and the evaluation graphs read the same symbols;
an inference program has only evaluation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated

from annotated_types import Interval

from sambasim.errors import LARGEST_INTEGER, InternalError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import DATA_PARALLEL, Axis, least_replicas, replica_mesh
from sambasim.ir.schedule import Schedule
from sambasim.ir.types import DTYPE_BYTES, NORM_BLOCK_ELEMENTS, Count, Size, Symbol, SymbolKind, TensorType, norm_blocks


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a group: its symbol, its gradient's, and where both begin in the group's flat tensors. `block`:
    the number of its first block of the norm, counted over all parameters of the model, however they are grouped."""

    parameter: str
    gradient: str
    start: Size  # elements, a multiple of 64
    numel: Size
    block: Size

    @property
    def blocks(self) -> int:
        return norm_blocks(self.numel)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that lie side by side: one kernel updates them, one exchange reduces their gradients. `numel` is a
    multiple of 64; gaps between members stay zero. `regions` gives the device address of each flat tensor.
    `state_dtype`: of the optimizer states; None if it is that of the parameters. `wrapper`: with data parallelism, the
    symbol around its gradients, which are reduced as one, as SambaFlow shows it."""

    name: str
    dtype: str
    numel: Size
    members: tuple[Member, ...]
    optimizer: Count
    regions: Mapping[str, Size]
    state_dtype: str | None = None
    wrapper: str | None = None  # $OPT_dp_accum_group_<40 hex>

    def region_type(self, region: str) -> TensorType:
        """Of "parameter", "gradient" or a state."""
        dtype = self.dtype if region in ("parameter", "gradient") else self.state_dtype or self.dtype
        return TensorType(dtype_of_average(dtype) if region == AVERAGE else dtype, (self.numel,))

    @property
    def block_starts(self) -> tuple[int, ...]:
        """Where the blocks of its members begin, ascending."""
        spans = ((member.start, member.start + member.numel) for member in self.members)
        return tuple(start for span in spans for start in range(*span, NORM_BLOCK_ELEMENTS))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer of the graph. Its hyperparameters are runtime arguments called `<name>__<hyperparameter>`. One of
    the user's own has an `update`, of a part of its regions, by hyperparameters and the number of the step."""

    name: str  # sgd0, adamw0, …
    kind: str  # one of `optimizers.KINDS`
    states: tuple[str, ...]  # names of the state tensors that each parameter has
    update: Graph | None = None

    @property
    def regions(self) -> tuple[str, ...]:
        return ("parameter", "gradient", *self.states)

    def symbols_of(self, member: Member) -> dict[str, str]:
        """By region, the symbol of `member` in it."""
        states = {state: state_name(member.parameter, self.name, state) for state in self.states}
        return {"parameter": member.parameter, "gradient": member.gradient, **states}


def dtype_of_average(dtype: str) -> str:
    return "float32" if dtype in ("bfloat16", "float16") else dtype


STEP = "step"
"""The input of an optimizer's update that is the number of the step, from 1."""


def state_name(parameter: str, optimizer: str, state: str) -> str:
    """The symbol of one optimizer state of one parameter: `logreg__lin_layer__weight__sgd0__momentum`."""
    return f"{parameter}__{optimizer}__{state}"


@dataclass(frozen=True, slots=True)
class RuntimeArgument:
    """`default` is infinite where nothing is clipped, and never NaN."""

    name: str
    default: (
        Annotated[float, Interval(ge=-inf)] | Annotated[int, Interval(ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] | bool
    )
    meaning: str


ROUNDING_SEED = "rounding_seed"
"""The runtime argument that a program has if, and only if, optimizer steps round to bfloat16 stochastically."""

LOSS_SCALE = "loss_scale"
"""The runtime argument that a program has if its loss is scaled, and steps that are not finite are skipped."""

MASTER = "master"
"""The optimizer state that is a float32 copy of a 16-bit parameter, which steps update."""


AVERAGE = "average"
"""The optimizer state that is the average of a parameter over steps, in float32 if the parameter has 16 bits. That of
the buffer `bn__running_mean` is the buffer `bn__running_mean$average`."""

EMA_PREFIX = "ema__"
"""The beginning of the runtime arguments of that average: the fields of `EmaOptions`."""


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled model. `mesh` holds the axes of its ranks, `batch_size` is that of one pass of a rank. `count`: the
    output by whose sum over a step the sum of its losses is divided; None if each loss is a mean. `logged`: by name,
    outputs of one number beside the loss, of which runs tell the mean; `evaluated`: those of the evaluation graphs, by
    their place among the outputs. `per_sample_loss`:
    evaluation gives one loss for each sample; otherwise the model's own mean, or sum and count, and `single` is the
    same graph at batch 1. `device_bytes` is the device memory of one rank. `schedule`: the order of work in a pipeline,
    whose passes take a micro-batch each. `reduce_buffer`: with data parallelism, the symbol where operands of peers
    arrive; `zero`: what replicas then keep in slices only, see `ir/ranks.py`."""

    name: str
    batch_size: Count
    symbols: Mapping[str, Symbol]
    training: Graph | None
    evaluation: Graph
    single: Graph | None
    loss: str | None
    per_sample_loss: bool
    optimizers: tuple[Optimizer, ...]
    groups: tuple[ParameterGroup, ...]
    runtime_arguments: tuple[RuntimeArgument, ...]
    device_bytes: Size
    mesh: tuple[Axis, ...] = ()
    schedule: Schedule | None = None
    reduce_buffer: str | None = None
    zero: Annotated[int, Interval(ge=0, le=3)] = 0
    count: str | None = None
    logged: Mapping[str, str] = field(default_factory=dict)
    evaluated: Mapping[str, Count] = field(default_factory=dict)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return tuple(filter(None, (self.training, self.evaluation, self.single)))

    @property
    def leading(self) -> Graph:
        """The training step; the evaluation graph of a program for inference."""
        return self.training or self.evaluation

    @property
    def step(self) -> Graph:
        """The training step. Raises InternalError if there is none."""
        if self.training is None:
            raise InternalError(f"{self.name} has no training step")
        return self.training

    @property
    def loss_outputs(self) -> int:
        """How many of the first outputs of its evaluation graph are the loss, with its count."""
        return 0 if self.loss is None else 2 if self.count is not None and not self.per_sample_loss else 1

    @property
    def updates(self) -> tuple[Graph, ...]:
        """Those of the user's own optimizers."""
        return tuple(optimizer.update for optimizer in self.optimizers if optimizer.update is not None)

    @property
    def exchanged(self) -> int:
        """How many numbers a replica tells the others in a step: the loss, and what is logged beside it."""
        return 1 + len(self.logged)

    def names_of(self, *kinds: SymbolKind) -> list[str]:
        return [name for name, symbol in self.symbols.items() if symbol.kind in kinds]

    def map_graphs(self, change: Callable[[Graph], Graph]) -> "Program":
        """The program with `change` of each graph: first of the training step, last of that at batch 1."""
        training = self.training and change(self.training)
        evaluation = change(self.evaluation)
        return replace(self, training=training, evaluation=evaluation, single=self.single and change(self.single))

    @property
    def data_parallel(self) -> bool:
        """Whether its update is for several replicas."""
        return self.reduce_buffer is not None

    @property
    def chooses_replicas(self) -> bool:
        """Whether a run chooses the number of replicas: they train with data parallelism, or each predicts a shard."""
        return any(axis.at_run_time for axis in self.mesh)

    @property
    def optimizer_states(self) -> dict[str, tuple[ParameterGroup, Member, str]]:
        """By symbol: the group, the member and the name of the state."""
        return {
            state_name(member.parameter, optimizer.name, state): (group, member, state)
            for group in self.groups
            for optimizer in (self.optimizers[group.optimizer],)
            for member in group.members
            for state in optimizer.states
        }

    @property
    def averages(self) -> dict[str, str]:
        """By parameter or buffer, the symbol of its average; empty if the program keeps none."""
        states = self.optimizer_states.items()
        return self.buffer_averages | {of.parameter: symbol for symbol, (_, of, state) in states if state == AVERAGE}

    @property
    def buffer_averages(self) -> dict[str, str]:
        names = ((name, f"{name}${AVERAGE}") for name in self.symbols)
        return {name: average for name, average in names if average in self.symbols}

    def symbols_of(self, group: ParameterGroup) -> Iterator[str]:
        """The symbols of its members: parameters, gradients and optimizer states."""
        for member in group.members:
            yield from self.optimizers[group.optimizer].symbols_of(member).values()

    def held_bytes(self, kind: SymbolKind) -> int:
        """What a rank holds of symbols of `kind`, without ZeRO."""
        return sum(symbol.type.size_bytes for symbol in self.symbols.values() if symbol.kind is kind)

    @property
    def parameter_count(self) -> int:
        """The elements of the whole model."""
        return sum(symbol.whole.numel for symbol in self.symbols.values() if symbol.kind is SymbolKind.PARAMETER)

    @property
    def gradient_bytes(self) -> int:
        return sum(group.numel * DTYPE_BYTES[group.dtype] for group in self.groups)

    @property
    def world_size(self) -> int:
        """The smallest number of replicas that may run it."""
        return least_replicas(self.mesh)

    @property
    def chips(self) -> int:
        """The chips that share the batch of a replica, each with the whole model."""
        return replica_mesh(self.mesh).size(DATA_PARALLEL)

    @property
    def micro_batches(self) -> int:
        """The passes of one replica in a micro-step: 1 without a pipeline."""
        return 1 if self.schedule is None else self.schedule.micro_batches

    @property
    def ranks_of_replica(self) -> int:
        return replica_mesh(self.mesh).world_size

    @property
    def replica_batch_size(self) -> int:
        """The samples of one replica in a micro-step."""
        return self.batch_size * self.micro_batches * self.chips
