"""The engine that compiles units of sections with torch's inductor. Its bits are its own; it draws the same random
numbers as the plain engine.

For large products, oneDNN is 5 to 10 % faster than MKL on an AMD CPU; on an Intel CPU, MKL is faster.
"""

# torch._inductor, torch.library and torch.backends are untyped.
# mypy: no-disallow-untyped-calls

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, islice, zip_longest
from operator import getitem
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Argument as FxArgument
from torch.library import Library

from sambasim.errors import MachineError, OptionError
from sambasim.ir.dataflow import readers_of
from sambasim.ir.graph import Argument, Node, Ref, Section, SectionKind
from sambasim.ir.operators import ASSERTION, OPERATORS, OperatorKind
from sambasim.ir.types import TensorType
from sambasim.runtime.engine.instructions import (
    Instruction,
    RegisterFile,
    Unit,
    find_operator,
    free_after_use,
    instruction_for,
    plain_argument,
    returns_one_tensor,
)
from sambasim.runtime.engine.pass_code import Route, find_routes
from sambasim.runtime.machine.kernels.build import find_cpp_compiler, use_inductor_cache

BACKWARD_UNITS = 4
"""The maximum number of units of the backward. The gradients of the last one are reduced after it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that are compiled together, by position, with the values they read and return. `views`: nodes of other
    regions that are evaluated again here, which costs nothing."""

    views: tuple[int, ...]
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_ALONE = (OperatorKind.RECURRENT, OperatorKind.CHECK)

Step = Region | int
"""A region, or the position of a node that keeps its own kernel."""


Run = tuple[Section, ...]
"""Sections that are compiled together."""


def choose_units(sections: Sequence[Section]) -> list[Run]:
    """The sections of each unit of a pass."""
    backward = sum(section.stop - section.start for section in sections if section.kind is SectionKind.BCKWD)
    units: list[Run] = []
    unit: list[Section] = []
    done = made = 0
    for section, following in zip_longest(sections, sections[1:]):
        unit.append(section)
        is_backward = section.kind is SectionKind.BCKWD
        done += section.stop - section.start if is_backward else 0
        ends = following is None or following.kind is not section.kind
        if ends or (is_backward and done * BACKWARD_UNITS >= backward * (made + 1)):
            units.append(tuple(unit))
            unit, made = [], made + is_backward
    return units


@dataclass(frozen=True, slots=True)
class Steps:
    """Plans the steps of every unit. `nodes`: of the pass; `taken`: positions of views of symbols, which have no step;
    `needed`: values that regions must output."""

    nodes: Sequence[Node]
    taken: Collection[int]
    needed: Collection[str]
    routes: Sequence[Route]

    def of(self, units: Sequence[Run]) -> list[list[Step]]:
        last = self._gradient_products()
        drafts = [self._draft(unit, last) for unit in units]
        steps = [step for draft in drafts for step in draft]
        maker = {result: at for at, node in enumerate(self.nodes) for result in node.results if result is not None}
        bodies = {step: self._inputs(step, maker) for step in steps if not isinstance(step, int)}
        outside = set(self.needed).union(
            *(inputs for _, inputs in bodies.values()),
            *(self.nodes[step].reads for step in steps if isinstance(step, int)),
        )
        return [
            [step if isinstance(step, int) else self._region(step, *bodies[step], outside) for step in draft]
            for draft in drafts
        ]

    def _draft(self, unit: Run, last: Collection[int]) -> list[tuple[int, ...] | int]:
        """The positions of nodes that are compiled together, and of those that keep their own kernels."""
        draft: list[tuple[int, ...] | int] = []
        positions = range(unit[0].start, unit[-1].stop)
        rest = [position for position in positions if position not in self.taken and position not in last]
        for keeps_kernel, run in groupby(rest, lambda at: OPERATORS[self.nodes[at].operator].kind in _ALONE):
            nodes = tuple(run)
            draft += nodes if keeps_kernel else [nodes]
        return draft + [position for position in positions if position in last]

    def _region(
        self, nodes: tuple[int, ...], views: tuple[int, ...], inputs: tuple[str, ...], outside: Collection[str]
    ) -> Region:
        results = (result for position in nodes for result in self.nodes[position].results)
        return Region(views, nodes, inputs, tuple(name for name in results if name is not None and name in outside))

    def _inputs(self, nodes: tuple[int, ...], maker: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The views to evaluate again for `nodes`, and the values that are then read from outside. `maker`: by value,
        the node that gives it."""
        inside, views, inputs = set(nodes), set[int](), dict[str, None]()
        waiting = [name for position in nodes for name in self.nodes[position].reads]
        while waiting:
            name = waiting.pop(0)
            position = maker.get(name, -1)
            if position in inside or position in views:
                continue
            if position >= 0 and position not in self.taken and _is_plain_view(self.nodes[position]):
                views.add(position)
                waiting += self.nodes[position].reads
            else:
                inputs[name] = None
        return tuple(sorted(views)), tuple(inputs)

    def _gradient_products(self) -> set[int]:
        """The products that are only gradients, the views up to the gradient, and the views that only they read."""
        readers = readers_of(self.nodes)
        last: set[int] = set()
        for route in self.routes:
            members = {route.maker, *route.views}
            made = self.nodes[route.maker].results[0] or ""
            is_product = OPERATORS[self.nodes[route.maker].operator].kind is OperatorKind.MATMUL
            alone = route.unread == tuple(reversed(route.views)) and members.issuperset(readers.get(made, ()))
            if is_product and alone and route.value not in readers:
                last |= members
        for position in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[position]
            is_view = position not in self.taken and _is_plain_view(node) and node.results[0] not in self.needed
            if is_view and last.issuperset(readers.get(node.results[0] or "", [-1])):
                last.add(position)
        return last


def _is_plain_view(node: Node) -> bool:
    is_single = len(node.results) == 1 and node.results[0] is not None and len(node.reads) == 1
    return is_single and OPERATORS[node.operator].kind is OperatorKind.VIEW


_LIBRARY = Library("sambasim", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight) -> Tensor")


_LIBRARY.impl("linear", lambda x, w: torch.ops.mkldnn._linear_pointwise.default._op(x, w, None, "none", [], ""), "CPU")
_LIBRARY.impl("linear", lambda x, w: x.new_empty(x.shape[0], w.shape[0]), "Meta")

LINEAR = torch.ops.sambasim.linear.default
"""`x [m, k]` and `weight [n, k]`, both float32, to `x @ weight.T`, `[m, n]`."""


FEWEST_FLOPS = 1 << 23


@cache
def mkl_favours(processors: Path) -> bool:
    """Whether torch has MKL and `processors`, a file like /proc/cpuinfo, describes an Intel CPU."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "GenuineIntel" in processors.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether LINEAR is faster than torch's product for `x @ weight.T`."""
    if x.dtype is not torch.float32 or not torch.backends.mkldnn.is_available() or mkl_favours(Path("/proc/cpuinfo")):
        return False
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] >= FEWEST_FLOPS


_KEPT = (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default)
"""Operators that keep torch's oneDNN kernel: inductor's C++ took up to three times as long."""


KEPT_TAG = "sambasim keeps " + " ".join(str(operator) for operator in _KEPT)
"""Part of the keys of inductor's caches, which otherwise ignore the decomposition table."""


@cache
def decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Inductor's decomposition table without the kept operators, with a fallback for these. Importing it takes seconds.
    A torch.compile by the user is not affected, because inductor's own table decomposes them first."""
    from torch._inductor.decomposition import decompositions as table
    from torch._inductor.lowering import make_fallback

    for kept in _KEPT:
        make_fallback(kept, warn=False, override_decomp=True)
    return {operator: simpler for operator, simpler in table.items() if operator not in _KEPT}


T = TypeVar("T")


def fake_values(nodes: Sequence[Node], inputs: Mapping[str, TensorType]) -> dict[str, Tensor]:
    """A fake tensor (dtype, shape, strides) for every value of `nodes` and every input."""
    # Inductor's cache needs a shape environment, even if all shapes are static.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with mode:
        values = {name: torch.empty(type_.shape, dtype=getattr(torch, type_.dtype)) for name, type_ in inputs.items()}
        for node in nodes:
            if node.operator == ASSERTION:
                continue
            returned = find_operator(node.operator)(*_arguments(node, values), **_keywords(node, values))
            several = returned if isinstance(returned, tuple | list) else [returned]
            values.update((name, value) for name, value in zip(node.results, several, strict=True) if name)
    return values


def rebuild(
    nodes: Iterable[Node], inputs: Sequence[str], outputs: Sequence[str], fakes: Mapping[str, Tensor]
) -> GraphModule:
    """A module from `inputs` to a tuple of `outputs`. Names are numbered by position, so that equal layers give equal
    code and inductor's cache finds it."""
    graph = Graph()
    values: dict[str, FxArgument] = {name: graph.placeholder(f"input{i}") for i, name in enumerate(inputs)}
    for node in nodes:
        product = _product(node, fakes, values, graph)
        if product is not None:
            values.update((name, product) for name in node.results if name is not None)
            continue
        operator = find_operator(node.operator)
        call = graph.call_function(operator, tuple(_arguments(node, values)), _keywords(node, values))
        if returns_one_tensor(operator._schema):
            values.update((name, call) for name in node.results if name is not None)
            continue
        for index, name in enumerate(node.results):
            if name is not None:
                values[name] = graph.call_function(getitem, (call, index))
    graph.output(tuple(values[name] for name in outputs))
    return GraphModule({}, graph)


def _product(
    node: Node, fakes: Mapping[str, Tensor], values: Mapping[str, FxArgument], graph: Graph
) -> torch.fx.Node | None:
    """`node` as a product by oneDNN if that is faster, else None."""
    names = [argument.name for argument in node.args if isinstance(argument, Ref)]
    if node.kwargs or (node.operator, len(names)) not in (("aten.mm.default", 2), ("aten.addmm.default", 3)):
        return None
    *bias, a, b = names
    if not by_onednn(fakes[a], fakes[b].t()):
        return None
    transposed = graph.call_function(torch.ops.aten.t.default, (values[b],))
    product = graph.call_function(LINEAR, (values[a], transposed))
    # Inductor fuses the addition of the bias with what follows.
    return graph.call_function(torch.ops.aten.add.Tensor, (product, values[bias[0]])) if bias else product


def _arguments(node: Node, values: Mapping[str, T]) -> list[T]:
    return [_converted(argument, values) for argument in node.args]


def _keywords(node: Node, values: Mapping[str, T]) -> dict[str, T]:
    return {name: _converted(argument, values) for name, argument in node.kwargs}


def _converted(argument: Argument, values: Mapping[str, T]) -> T:
    """`argument` as torch takes it, with references replaced by `values`."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return cast(T, [_converted(item, values) for item in argument])
    return cast(T, plain_argument(argument))


_UNIT = "sambasim.compiled"

_SETTINGS = {
    "deterministic": True,
    "fallback_random": True,  # dropout draws the same numbers as the plain engine
    "reorder_for_peak_memory": False,  # and in its order
}


@dataclass(frozen=True, slots=True)
class Inductor:
    """Compiles passes. `progress(done, parts, elapsed_s)` is called before each part and at the end."""

    progress: Callable[[int, int, float], None] = lambda done, parts, elapsed_s: None

    def lower(
        self,
        plain: Sequence[Instruction | None],
        nodes: Sequence[Node],
        sections: Sequence[Section],
        registers: RegisterFile,
        stores: Mapping[str, Sequence[Tensor]],
        keep: Set[str],
        inputs: Mapping[str, TensorType],
    ) -> list[Unit]:
        """Compile a pass of `sections` and `nodes`. Raises MachineError, and OptionError for a pass that communicates.
        `plain`: the instructions of the plain engine; `inputs`: of the graph."""
        if any(node.operator.startswith("comm.") for node in nodes):
            what = "inductor cannot compile a pass that communicates"
            raise OptionError(what, remedy="run it with --engine plain")
        taken = [position for position, instruction in enumerate(plain) if instruction is None]
        nodes, drawn = _name_unread_draws(nodes)
        units = choose_units(sections)
        unit_of = [number for number, unit in enumerate(units) for _ in range(unit[0].start, unit[-1].stop)]
        routes = find_routes(nodes, unit_of, stores, keep)
        planned = Steps(nodes, frozenset(taken), {*stores, *keep, *drawn}, routes).of(units)
        fakes = fake_values(nodes, inputs)
        regions = [step for steps in planned for step in steps if isinstance(step, Region)]
        compiled = self._compile(regions, nodes, fakes)
        lowered: list[Instruction | None] = []
        for step in (step for steps in planned for step in steps):
            if isinstance(step, int):
                lowered.append(plain[step])
                continue
            refs = tuple(Ref(name) for name in step.inputs)
            node = Node(nodes[step.nodes[0]].name, _UNIT, refs, (), step.outputs)
            operands = map(registers.value, step.inputs)
            lowered.append(instruction_for(node, compiled[step], operands, registers, stores, single=False))
        freeing = iter(free_after_use(lowered, keep, registers))
        return [
            Unit(unit, tuple(filter(None, islice(freeing, len(steps)))))
            for unit, steps in zip(units, planned, strict=True)
        ]

    def _compile(
        self, regions: Sequence[Region], nodes: Sequence[Node], fakes: Mapping[str, Tensor]
    ) -> dict[Region, Callable[..., object]]:
        use_inductor_cache()
        began_s = time.perf_counter()
        compiled = {}
        for done, region in enumerate(regions):
            self.progress(done, len(regions), time.perf_counter() - began_s)
            positions = sorted((*region.views, *region.nodes))
            body = [nodes[p] for p in positions]
            module = rebuild(body, region.inputs, region.outputs, fakes)
            compiled[region] = _compile_module(module, [fakes[name] for name in region.inputs])
        self.progress(len(regions), len(regions), time.perf_counter() - began_s)
        return compiled


def _compile_module(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    settings = {**_SETTINGS, "cpp.cxx": (None, find_cpp_compiler())}  # inductor itself would call an empty CXX
    try:
        tagged = torch.compiler.config.patch(cache_key_tag=KEPT_TAG)  # type: ignore[attr-defined]  # made at import
        with torch.no_grad(), tagged:
            compiled = compile_fx(module, inputs, config_patches=settings, decompositions=decompositions())
            return cast("Callable[..., object]", compiled)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise MachineError(
            f"torch's inductor cannot compile this PEF here: {type(error).__name__}: {first_line[:300]}",
            remedy="run it with --engine plain",
        ) from error


def _name_unread_draws(nodes: Sequence[Node]) -> tuple[list[Node], list[str]]:
    """`nodes` with named results for unread random draws, so that compiled code keeps them; and these names."""
    read = {name for node in nodes for name in node.reads}
    named: list[Node] = []
    drawn: list[str] = []
    for node in nodes:
        if OPERATORS[node.operator].draws_random_numbers and read.isdisjoint(node.results):
            first, *others = node.results
            drawn.append(first or f"{node.name}__drawn")
            node = replace(node, results=(drawn[-1], *others))
        named.append(node)
    return named, drawn
