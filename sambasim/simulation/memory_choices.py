"""The memory of a rank for other dtypes, optimizers, levels of ZeRO and recomputation than a program has: computed from
one program and the graphs of its pass."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from sambasim.ir.graph import Graph
from sambasim.ir.program import MASTER, Program
from sambasim.ir.types import Symbol, TensorType
from sambasim.optimizers import OPTIMIZERS
from sambasim.simulation.memory import Memory, PassMemory, memory_of, pass_memory, whole_regions
from sambasim.simulation.planning.strategy import RECOMPUTE


@dataclass(frozen=True, slots=True)
class Dtype:
    """How parameters, gradients and activations are stored, as `--dtype` and `--master-weights` say it. `stored`: their
    type."""

    name: str
    stored: str
    master: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} + master" if self.master else self.name


DTYPES = (
    Dtype("fp32", "float32"),
    Dtype("bf16", "bfloat16"),
    Dtype("bf16", "bfloat16", master=True),
    Dtype("fp16", "float16", master=True),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """`states` are those that the optimizer keeps of each parameter, without master weights."""

    dtype: Dtype
    recompute: str
    optimizer: str
    states: tuple[str, ...]
    zero: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of one rank. `temporaries`: see `PassMemory`."""

    choice: Choice
    memory: Memory
    temporaries: int

    @property
    def total_bytes(self) -> int:
        return self.memory.total_bytes + self.temporaries


class Choices:
    """The estimates of a `program` with data parallelism, whose numbers are stored in `dtype`; `graphs`: its pass by
    recomputation. `replicas` take `passes` in a step."""

    def __init__(
        self, program: Program, graphs: Mapping[str, Graph], dtype: str, *, replicas: int, passes: int
    ) -> None:
        self.program = program
        self.graphs = graphs
        self.dtype = dtype
        self.replicas = replicas
        self.passes = passes
        self._held = cache(self._held_by)
        self._kept = cache(self._kept_by)
        self._whole = cache(partial(whole_regions, program))

    def estimate(self, choice: Choice) -> Estimate:
        held = self._held(choice.dtype.stored, choice.recompute)
        kept = self._kept(replace(choice, recompute="none"))
        return Estimate(choice, replace(kept, activations=held.activations), held.temporaries)

    def _held_by(self, stored: str, recompute: str) -> PassMemory:
        graph = self.graphs[recompute]
        values = {name: in_dtype(type_, self.dtype, stored) for name, type_ in graph.values.items()}
        return pass_memory(replace(graph, values=values), _symbols_in(self.program, self.dtype, stored))

    def _kept_by(self, choice: Choice) -> Memory:
        """Without activations."""
        changed = _changed(self.program, self.dtype, choice)
        return memory_of(
            changed,
            activations_bytes=0,
            zero=choice.zero,
            replicas=self.replicas,
            passes=self.passes,
            whole=self._whole(choice.zero),
        )

    def by_dtype(self, asked: Choice) -> list[Estimate]:
        """For each dtype and recomputation."""
        pairs = ((dtype, mode) for dtype in DTYPES for mode in RECOMPUTE)
        return [self.estimate(replace(asked, dtype=dtype, recompute=mode)) for dtype, mode in pairs]

    def by_optimizer(self, asked: Choice) -> list[Estimate]:
        """For each optimizer with default options; if its default keeps no state, also with what it has at most."""
        found = []
        for kind, entry in OPTIMIZERS.items():
            for states in dict.fromkeys((entry.kept_states({}), tuple(entry.states))):
                found.append(self.estimate(replace(asked, optimizer=kind, states=states)))
        return found

    def by_zero(self, asked: Choice) -> list[Estimate]:
        return [self.estimate(replace(asked, zero=zero)) for zero in range(4)]

    def least(self, asked: Choice) -> Estimate:
        """The least memory that the optimizer asked for can have."""
        levels = (replace(asked, zero=zero) for zero in range(4))
        return min(
            (estimate for level in levels for estimate in self.by_dtype(level)),
            key=lambda estimate: estimate.total_bytes,
        )


def _changed(program: Program, captured: str, choice: Choice) -> Program:
    """`program` in another dtype, with another optimizer."""
    stored = choice.dtype.stored
    groups = tuple(
        replace(
            group,
            dtype=stored if group.dtype == captured else group.dtype,
            state_dtype="float32" if choice.dtype.master else None,
        )
        for group in program.groups
    )
    states = (MASTER, *choice.states) if choice.dtype.master else choice.states
    optimizers = tuple(replace(optimizer, kind=choice.optimizer, states=states) for optimizer in program.optimizers)
    return replace(program, symbols=_symbols_in(program, captured, stored), groups=groups, optimizers=optimizers)


def _symbols_in(program: Program, captured: str, stored: str) -> Mapping[str, Symbol]:
    return {
        name: replace(symbol, type=in_dtype(symbol.type, captured, stored)) for name, symbol in program.symbols.items()
    }


def in_dtype(type_: TensorType, captured: str, wanted: str) -> TensorType:
    """`type_`, with numbers stored in `wanted` if they are in `captured`."""
    return TensorType(wanted, type_.shape) if type_.dtype == captured else type_
