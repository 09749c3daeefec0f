"""The engine that compiles units of sections with torch's inductor. Its bits are its own; it draws the same random
numbers as the plain engine.

The forward is one unit and the backward at most four. At the end of a unit, its gradients are complete and can be
reduced while the next unit computes. Recurrent layers keep torch's kernels, because they need recorded gradients.
Products that are only gradients come last in their unit: their kernels write directly into the group.

For large products, oneDNN is 5 to 10 % faster than MKL on an AMD CPU; on an Intel CPU, MKL is faster.
"""

# torch._inductor, torch.library and torch.backends are untyped.
# mypy: no-disallow-untyped-calls

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, groupby, islice, zip_longest
from operator import getitem
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Argument as FxArgument
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from sambasim.errors import MachineError, OptionError
from sambasim.ir.dataflow import kind_of, readers_of
from sambasim.ir.graph import Node, Ref, Section, SectionKind
from sambasim.ir.operators import ASSERTION, OPERATORS, OperatorKind
from sambasim.ir.types import TensorType
from sambasim.runtime.engine import instructions
from sambasim.runtime.engine.handlers import is_slow
from sambasim.runtime.engine.instructions import Instruction, RegisterFile, Unit
from sambasim.runtime.engine.pass_code import Route, find_routes, is_plain_view
from sambasim.runtime.machine.kernels import cpu_kind, find_cpp_compiler, use_inductor_cache
from sambasim.runtime.values.memory import type_of
from sambasim.runtime.values.operators import Function, call_of, find_operator, tensors_returned

Fakes: TypeAlias = Mapping[str, Tensor]

BACKWARD_UNITS = 4
"""The maximum number of units of the backward. The gradients of the last one are reduced after it."""


class Region(NamedTuple):
    """Nodes that are compiled together, by position, with the values they read and return. `views`: nodes of other
    regions that are evaluated again here, which costs nothing."""

    views: tuple[int, ...]
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()


Step: TypeAlias = Region | int  # a region, or the position of a node that keeps its own kernel


def _choose_units(sections: Sequence[Section]) -> list[tuple[Section, ...]]:
    backward = sum(section.stop - section.start for section in sections if section.kind is SectionKind.BCKWD)
    units: list[tuple[Section, ...]] = []
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
class _Planner:
    """Plans steps. `taken`: positions of views of symbols, which have none; `needed`: values that regions output."""

    nodes: Sequence[Node]
    taken: Collection[int]
    needed: Collection[str]
    routes: Sequence[Route]

    def steps(self, units: Iterable[tuple[Section, ...]]) -> list[list[Step]]:
        nodes, last, drafts = self.nodes, self._gradient_products(), list[list[Step]]()
        maker = {result: at for at, node in enumerate(nodes) for result in node.makes}
        alone = (OperatorKind.RECURRENT, OperatorKind.CHECK)
        for unit in units:
            positions, draft = range(unit[0].start, unit[-1].stop), list[Step]()
            rest = [at for at in positions if at not in self.taken and at not in last]
            for keeps_kernel, group in groupby(rest, lambda at: kind_of(nodes[at]) in alone):
                run = tuple(group)
                draft += run if keeps_kernel else [self._region(run, maker)]
            drafts.append([*draft, *(at for at in positions if at in last)])
        outside = {*self.needed}
        for step in chain(*drafts):
            outside.update(step.inputs if isinstance(step, Region) else nodes[step].reads)

        def with_outputs(step: Step) -> Step:
            if not isinstance(step, Region):
                return step
            results = (name for at in step.nodes for name in nodes[at].results if name in outside)
            return step._replace(outputs=tuple(filter(None, results)))

        return [[*map(with_outputs, draft)] for draft in drafts]

    def _region(self, nodes: tuple[int, ...], maker: Mapping[str, int]) -> Region:
        """`nodes`, the views to evaluate again for them, and the values that are then read from outside."""
        inside, views, inputs = set(nodes), set[int](), dict[str, None]()
        waiting = [name for position in nodes for name in self.nodes[position].reads]
        while waiting:
            name = waiting.pop(0)
            position = maker.get(name, -1)
            if position in inside or position in views:
                continue
            if position >= 0 and position not in self.taken and is_plain_view(self.nodes[position]):
                views.add(position)
                waiting += self.nodes[position].reads
            else:
                inputs[name] = None
        return Region(tuple(sorted(views)), nodes, tuple(inputs))

    def _gradient_products(self) -> set[int]:
        """The products that are only gradients, the views up to the gradient, and the views that only they read."""
        readers = readers_of(self.nodes)
        last: set[int] = set()
        for route in self.routes:
            members, node = {route.maker, *route.views}, self.nodes[route.maker]
            alone = route.unread == route.views[::-1] and members.issuperset(readers.get(node.results[0] or "", ()))
            if kind_of(node) is OperatorKind.MATMUL and alone and route.value not in readers:
                last |= members
        for position in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[position]
            is_view = position not in self.taken and is_plain_view(node) and node.results[0] not in self.needed
            if is_view and last.issuperset(readers.get(node.results[0] or "", [-1])):
                last.add(position)
        return last


_LIBRARY = Library("sambasim", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight) -> Tensor")
_LIBRARY.impl("linear", lambda x, w: torch.ops.mkldnn._linear_pointwise.default._op(x, w, None, "none", [], ""), "CPU")
_LIBRARY.impl("linear", lambda x, w: x.new_empty(x.shape[0], w.shape[0]), "Meta")

LINEAR = torch.ops.sambasim.linear.default
"""`x [m, k]` and `weight [n, k]`, both float32, to `x @ weight.T`, `[m, n]`."""

FEWEST_FLOPS = 1 << 23


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether LINEAR is faster than torch's product for `x @ weight.T`: if large, and not by MKL on an Intel CPU."""
    flops = 2 * x.shape[0] * x.shape[1] * weight.shape[0]
    if flops < FEWEST_FLOPS or x.dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    return not (torch.backends.mkl.is_available() and "GenuineIntel" in cpu_kind())


_KEPT = (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default)
"""Operators that keep torch's oneDNN kernel: inductor's C++ took up to three times as long."""

KEPT_TAG = "sambasim keeps " + " ".join(str(operator) for operator in _KEPT)
"""Part of the keys of inductor's caches, which otherwise ignore the decomposition table."""


class _Table(dict[OpOverload, Function]):
    """Inductor's cache keys have the table too, of whose functions some cannot be pickled: it then stores nothing."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return decompositions, ()


@cache
def decompositions() -> dict[OpOverload, Function]:
    """Inductor's decomposition table without the kept operators, with a fallback for these. Importing it takes seconds.
    A torch.compile by the user is not affected, because inductor's own table decomposes them first."""
    from torch._inductor.decomposition import decompositions as table
    from torch._inductor.lowering import make_fallback

    for kept in _KEPT:
        make_fallback(kept, warn=False, override_decomp=True)
    return _Table({operator: simpler for operator, simpler in table.items() if operator not in _KEPT})


class _Decomposing(TorchDispatchMode):
    """Calls the decomposition of each operator, as inductor does."""

    def __torch_dispatch__(self, function: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> object:
        if function in decompositions():
            with self:
                result: object = decompositions()[function](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return function(*args, **(kwargs or {}))


def fake_values(nodes: Sequence[Node], inputs: Mapping[str, TensorType]) -> tuple[dict[str, Tensor], set[str]]:
    """A fake tensor (dtype, shape, strides) for every value of `nodes` and every input, and the names of those that
    inductor's decompositions make with other strides, for which a view of the graph may be impossible."""
    strayed = set[str]()
    # Inductor's cache needs a shape environment, even if all shapes are static.
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
        values = {name: torch.empty(type_.shape, dtype=getattr(torch, type_.dtype)) for name, type_ in inputs.items()}
        for node in nodes:
            if node.operator != ASSERTION:
                operator = find_operator(node.operator)
                call = call_of(operator, node)
                made = _by_name(node, call(values))
                values.update(made)
                if operator in decompositions():
                    with _Decomposing():
                        simpler = _by_name(node, call(values))
                    strayed |= {name for name in made if made[name].stride() != simpler[name].stride()}
    return values, strayed


def _by_name(node: Node, returned: Any) -> dict[str, Tensor]:
    several = returned if isinstance(returned, tuple | list) else [returned]
    return {name: value for name, value in zip(node.results, several, strict=True) if name}


def rebuild(
    nodes: Iterable[Node], inputs: Sequence[str], outputs: Sequence[str], fakes: Fakes, strayed: Collection[str] = ()
) -> GraphModule:
    """A module from `inputs` to a tuple of `outputs`, in which values have the strides of `fakes`, also the `strayed`.
    Names are numbers, so that caches find equal layers."""
    from torch._inductor.inductor_prims import force_stride_order

    graph = Graph()
    values: dict[str, FxArgument] = {name: graph.placeholder(f"input{i}") for i, name in enumerate(inputs)}
    for node in nodes:
        call, is_one = _product(node, fakes, values, graph), True
        narrow = {name for name in (*node.reads, *node.makes) if fakes[name].dtype is torch.bfloat16}
        is_widened = bool(narrow) and is_slow(node.operator, "bfloat16", [type_of(fakes[name]) for name in node.makes])
        if call is None:
            operator = find_operator(node.operator)
            wide = {name: _cast(graph, values[name], torch.float32) for name in narrow if is_widened and name in values}
            call = call_of(partial(_added, graph, operator), node)({**values, **wide})
            is_one = tensors_returned(operator) == 1
        for index, name in enumerate(node.results):
            if name is not None:
                value = call if is_one else graph.call_function(getitem, (call, index))
                value = _cast(graph, value, torch.bfloat16) if is_widened and name in narrow else value
                strides = [*fakes[name].stride()]
                values[name] = graph.call_function(force_stride_order, (value, strides)) if name in strayed else value
    graph.output(tuple(values[name] for name in outputs))
    return GraphModule({}, graph)


def _cast(graph: Graph, value: FxArgument, dtype: torch.dtype) -> torch.fx.Node:
    return graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})


def _added(graph: Graph, operator: OpOverload, *args: FxArgument, **kwargs: FxArgument) -> torch.fx.Node:
    return graph.call_function(operator, args, kwargs)


def _product(node: Node, fakes: Fakes, values: Mapping[str, FxArgument], graph: Graph) -> torch.fx.Node | None:
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


@dataclass(frozen=True, slots=True)
class Inductor:
    """Compiles passes, once for all replicas of a process. `progress(done, parts, elapsed_s)` is called before each
    part and at the end."""

    progress: Callable[[int, int, float], None] = lambda done, parts, elapsed_s: None
    _made: list[tuple[object, dict[Region, Function]]] = field(default_factory=list)

    def lower(
        self,
        plain: Sequence[Instruction | None],
        nodes: Sequence[Node],
        sections: Sequence[Section],
        registers: RegisterFile,
        keep: Set[str],
        inputs: Mapping[str, TensorType],
    ) -> list[Unit]:
        """Compile a pass of `sections` and `nodes`. Raises MachineError, and OptionError for a pass that communicates.
        `plain`: the instructions of the plain engine; `inputs`: of the graph."""
        if any(node.operator.startswith("comm.") for node in nodes):
            what = "inductor cannot compile a pass that communicates"
            raise OptionError(what, remedy="run it with --engine plain")
        nodes, drawn = _name_unread_draws(nodes)
        units = _choose_units(sections)
        unit_of = [number for number, unit in enumerate(units) for _ in range(unit[0].start, unit[-1].stop)]
        routes = find_routes(nodes, unit_of, registers.stores, keep)
        taken = frozenset(position for position, instruction in enumerate(plain) if instruction is None)
        planned = _Planner(nodes, taken, {*registers.stores, *keep, *drawn}, routes).steps(units)
        compiled = self._compile([step for step in chain(*planned) if isinstance(step, Region)], nodes, inputs)
        lowered: list[Instruction | None] = []
        for step in chain(*planned):
            if isinstance(step, int):
                lowered.append(plain[step])
                continue
            refs = tuple(Ref(name) for name in step.inputs)
            node = Node(nodes[step.nodes[0]].name, "sambasim.compiled", refs, (), step.outputs)
            operands = map(registers.value, step.inputs)
            lowered.append(instructions.instruction_for(node, compiled[step], operands, registers, returned=0))
        freeing = iter(instructions.free_after_use(lowered, keep, registers))
        of_units = [tuple(filter(None, islice(freeing, len(steps)))) for steps in planned]
        return [Unit(part, instructions, part[-1].stop) for part, instructions in zip(units, of_units, strict=True)]

    def _compile(
        self, regions: Sequence[Region], nodes: Sequence[Node], inputs: Mapping[str, TensorType]
    ) -> dict[Region, Function]:
        asked = regions, nodes, inputs
        if (known := next((made for of, made in self._made if of == asked), None)) is not None:
            return known
        fakes, strayed = fake_values(nodes, inputs)
        use_inductor_cache()
        began_s = time.perf_counter()
        compiled = dict[Region, Function]()
        for done, region in enumerate(regions):
            self.progress(done, len(regions), time.perf_counter() - began_s)
            body = [nodes[position] for position in sorted((*region.views, *region.nodes))]
            module = rebuild(body, region.inputs, region.outputs, fakes, strayed)
            compiled[region] = _compile_module(module, [fakes[name] for name in region.inputs])
        self.progress(len(regions), len(regions), time.perf_counter() - began_s)
        self._made.append((asked, compiled))
        return compiled


def _compile_module(module: GraphModule, inputs: Sequence[Tensor]) -> Function:
    from torch._inductor.compile_fx import compile_fx  # takes seconds to import

    settings = {"deterministic": True, "cpp.cxx": (None, find_cpp_compiler())}  # inductor would call an empty CXX
    settings |= {"fallback_random": True, "reorder_for_peak_memory": False}  # draws as the plain engine, in its order
    try:
        tagged = torch.compiler.config.patch(cache_key_tag=KEPT_TAG)  # type: ignore[attr-defined]  # made at import
        with torch.no_grad(), tagged:
            compiled = compile_fx(module, inputs, config_patches=settings, decompositions=decompositions())
            return cast(Function, compiled)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        what = f"torch's inductor cannot compile this PEF here: {type(error).__name__}: {first_line[:300]}"
        raise MachineError(what, remedy="run it with --engine plain") from error


def _name_unread_draws(nodes: Sequence[Node]) -> tuple[list[Node], list[str]]:
    """`nodes` with named results for unread random draws, so that compiled code keeps them; and these names."""
    read = {name for node in nodes for name in node.reads}
    named, drawn = list[Node](), list[str]()
    for node in nodes:
        if OPERATORS[node.operator].draws_random_numbers and read.isdisjoint(node.results):
            first, *others = node.results
            drawn.append(first or f"{node.name}__drawn")
            node = replace(node, results=(drawn[-1], *others))
        named.append(node)
    return named, drawn
