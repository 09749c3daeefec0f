"""The memory of a rank for other dtypes, optimizers, levels of ZeRO and recomputation than a program has: computed from
one program in float32 and the graphs of its pass."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sambasim.ir.graph import Graph
from sambasim.ir.program import MASTER, Program
from sambasim.ir.types import TensorType
from sambasim.optimizers import OPTIMIZERS
from sambasim.simulation.memory import Memory, PassMemory, memory_of, pass_memory

RECOMPUTATIONS = ("none", "sections", "full")
"""As in `--recompute`."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """How parameters, gradients and activations are stored, as `--dtype` and `--master-weights` say it. `stored`: the
    type of what is float32 in the program."""

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


def graph_in(graph: Graph, captured: str, wanted: str) -> Graph:
    """`graph`, which was captured in one dtype, in another one."""
    types = {name: _in(type_, captured, wanted) for name, type_ in graph.values.items()}
    return replace(graph, values=types)


def _in(type_: TensorType, captured: str, wanted: str) -> TensorType:
    return TensorType(wanted, type_.shape) if type_.dtype == captured else type_
