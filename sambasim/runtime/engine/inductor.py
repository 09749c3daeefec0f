"""The engine that compiles units of sections with torch's inductor.

Nodes of our graph become a torch.fx graph; inductor writes C++ for it, the machine's compiler builds that, and the
cache folder keeps the result for the next start.

The engine's bits are its own. It draws the same random numbers as the plain engine: dropout stays torch's operator, and
operators that draw keep their order.
"""

# torch._inductor is untyped.
# mypy: no-disallow-untyped-calls

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Argument as FxArgument

from sambasim.errors import MachineError
from sambasim.ir.graph import Argument, Node, Ref, SectionKind, node_references
from sambasim.ir.operators import OPERATORS
from sambasim.runtime.engine.choice import find_compiler, use_cache_folder
from sambasim.runtime.engine.products import LINEAR, by_onednn
from sambasim.runtime.engine.routes import find_routes
from sambasim.runtime.engine.straight_line import Part, by_part
from sambasim.runtime.engine.units import Region, Steps, choose_units
from sambasim.runtime.instructions import (
    Instruction,
    RegisterFile,
    compiled_instruction,
    find_operator,
    free_after_use,
    plain_argument,
    returns_one_tensor,
)

_KEPT = (torch.ops.aten.gelu.default, torch.ops.aten.gelu_backward.default)
"""torch has them from oneDNN; inductor's C++ for them took two to three times as long on an Intel processor with
AVX-512, and as long on an AMD one."""


KEPT_TAG = "sambasim keeps " + " ".join(str(operator) for operator in _KEPT)
"""For the keys of inductor's caches, which do not tell by which table a graph was made simpler."""


@cache
def decompositions() -> dict[OpOverload, Callable[..., object]]:
    """What inductor replaces by simpler operators: its own table, without what is kept and without those that draw
    random numbers, as by its `fallback_random`. Importing it takes seconds.

    From then on, what is kept has a way through inductor in the whole process. A torch.compile of the user's own never
    comes to it: by inductor's own table, these operators are replaced before.
    """
    from torch._inductor.decomposition import decompositions as table
    from torch._inductor.lowering import make_fallback

    for kept in _KEPT:
        make_fallback(kept, warn=False, override_decomp=True)
    return {operator: simpler for operator, simpler in table.items() if operator not in _KEPT}


T = TypeVar("T")
"""What stands for a value: a tensor, or a node of torch.fx."""


def fake_values(nodes: Sequence[Node], symbols: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every value of `nodes` and every symbol as a tensor without memory: dtype, shape and strides."""
    # Inductor's cache asks for a shape environment, even where all shapes are known.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    values: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in symbols.items()}
    with mode:
        for node in nodes:
            returned = find_operator(node.operator)(*_given(node, values), **_keywords(node, values))
            several = returned if isinstance(returned, tuple | list) else [returned]
            values.update((name, value) for name, value in zip(node.results, several, strict=True) if name)
    return values


def rebuild(
    nodes: Iterable[Node], inputs: Sequence[str], outputs: Sequence[str], fakes: Mapping[str, Tensor]
) -> GraphModule:
    """A module from `inputs` to a tuple of `outputs`, with large products by oneDNN where that is faster.

    Names are numbered by position, so that equal layers give equal code and inductor's cache finds it."""
    graph = Graph()
    values: dict[str, FxArgument] = {name: graph.placeholder(f"input{i}") for i, name in enumerate(inputs)}
    for node in nodes:
        product = _product(node, fakes, values, graph)
        if product is not None:
            values.update((name, product) for name in node.results if name is not None)
            continue
        found = find_operator(node.operator)
        call = graph.call_function(found, tuple(_given(node, values)), _keywords(node, values))
        if returns_one_tensor(found._schema):
            values.update((name, call) for name in node.results if name is not None)
            continue
        for index, name in enumerate(node.results):
            if name is not None:
                values[name] = graph.call_function(operator.getitem, (call, index))
    graph.output(tuple(values[name] for name in outputs))
    return GraphModule({}, graph)


def _product(
    node: Node, fakes: Mapping[str, Tensor], values: Mapping[str, FxArgument], graph: Graph
) -> torch.fx.Node | None:
    """`node` as a product by oneDNN, if it is one that is faster there."""
    names = [argument.name for argument in node.args if isinstance(argument, Ref)]
    if node.kwargs or (node.operator, len(names)) not in (("aten.mm.default", 2), ("aten.addmm.default", 3)):
        return None
    *bias, a, b = names
    if not by_onednn(fakes[a], fakes[b].t()):
        return None
    transposed = graph.call_function(torch.ops.aten.t.default, (values[b],))
    product = graph.call_function(LINEAR, (values[a], transposed))
    # Inductor adds a bias in the pass over memory that follows. (It would put torch's own product and such a bias
    # together again.)
    return graph.call_function(torch.ops.aten.add.Tensor, (product, values[bias[0]])) if bias else product


def _given(node: Node, values: Mapping[str, T]) -> list[T]:
    return [_converted(argument, values) for argument in node.args]


def _keywords(node: Node, values: Mapping[str, T]) -> dict[str, T]:
    return {name: _converted(argument, values) for name, argument in node.kwargs}


def _converted(argument: Argument, values: Mapping[str, T]) -> T:
    """`argument` with `values` in the places of references, in the form that torch takes."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, tuple):
        return cast(T, [_converted(item, values) for item in argument])
    return cast(T, plain_argument(argument))


_UNIT = "sambasim.compiled"

_SETTINGS = {
    "deterministic": True,
    "fallback_random": True,  # dropout draws what the plain engine draws
    "reorder_for_peak_memory": False,  # and in its order
}


@dataclass(frozen=True, slots=True)
class Compiling:
    """How far the compiler is: `done` parts of `parts`, after `elapsed_s` seconds."""

    done: int
    parts: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Inductor:
    """Compiles with the compiler that `find_compiler` found. `progress` is called before each part and at the end."""

    progress: Callable[[Compiling], None] = lambda compiling: None

    def lower(
        self,
        plain: Sequence[Instruction | None],
        nodes: Sequence[Node],
        sections: Sequence[tuple[SectionKind, int]],
        registers: RegisterFile,
        stores: Mapping[str, Sequence[Tensor]],
        keep: Iterable[str],
        symbols: Mapping[str, Tensor],
    ) -> list[Part]:
        """The instructions of each unit of sections.

        `plain` are the instructions of `nodes` for the plain engine, `sections` the kind and the number of nodes of
        each section; `symbols` are all tensors that the nodes begin from. Raises MachineError if something cannot be
        compiled.
        """
        taken = [position for position, one in enumerate(plain) if one is None]
        nodes, drawn = _name_what_is_drawn(nodes)
        units = choose_units(sections)
        unit_of = [number for number, unit in enumerate(units) for _ in range(unit.start, unit.stop)]
        routes = find_routes(nodes, unit_of, list(stores), list(keep))
        planned = Steps(nodes, frozenset(taken), {*stores, *keep, *drawn}, routes).of(units)
        fakes = fake_values(nodes, symbols)
        regions = [step for steps in planned for step in steps if isinstance(step, Region)]
        compiled = self._compile(regions, nodes, fakes)
        lowered: list[Instruction | None] = []
        for step in (step for steps in planned for step in steps):
            if isinstance(step, int):
                lowered.append(plain[step])
                continue
            refs = tuple(Ref(name) for name in step.inputs)
            node = Node(nodes[step.nodes[0]].name, _UNIT, refs, (), step.outputs)
            lowered.append(compiled_instruction(node, compiled[step], registers, stores))
        sizes = [(unit.sections, len(steps)) for unit, steps in zip(units, planned, strict=True)]
        return by_part(free_after_use(lowered, keep, registers), sizes)

    def _compile(
        self, regions: Sequence[Region], nodes: Sequence[Node], fakes: Mapping[str, Tensor]
    ) -> dict[Region, Callable[..., object]]:
        use_cache_folder()
        began_s = time.perf_counter()
        compiled = {}
        for done, region in enumerate(regions):
            self.progress(Compiling(done, len(regions), time.perf_counter() - began_s))
            positions = sorted((*region.views, *region.nodes))
            body = [nodes[p] for p in positions]
            module = rebuild(body, region.inputs, region.outputs, fakes)
            compiled[region] = _compile_module(module, [fakes[name] for name in region.inputs])
        self.progress(Compiling(len(regions), len(regions), time.perf_counter() - began_s))
        return compiled


def _compile_module(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
    from torch._inductor.compile_fx import compile_fx  # it takes seconds to import, and only this engine needs it

    settings = {**_SETTINGS, "cpp.cxx": (None, find_compiler())}  # by itself, inductor would call an empty CXX
    try:
        tagged = torch.compiler.config.patch(cache_key_tag=KEPT_TAG)  # type: ignore[attr-defined]  # made at import
        with torch.no_grad(), tagged:
            compiled = compile_fx(module, inputs, config_patches=settings, decompositions=decompositions())
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise MachineError(
            f"torch's inductor cannot compile this PEF here: {type(error).__name__}: {first_line[:300]}",
            remedy="run it with --engine plain",
        ) from error
    if not callable(compiled):
        raise MachineError("torch's inductor made nothing that can be called", remedy="run it with --engine plain")
    return compiled


def _name_what_is_drawn(nodes: Sequence[Node]) -> tuple[list[Node], list[str]]:
    """`nodes`, and a value of each that draws random numbers which nobody reads: asked for, it is not left out."""
    read = {name for node in nodes for name in node_references(node)}
    named: list[Node] = []
    drawn: list[str] = []
    for node in nodes:
        if OPERATORS[node.operator].draws_random_numbers and read.isdisjoint(node.results):
            first, *others = node.results
            drawn.append(first or f"{node.name}__drawn")
            node = replace(node, results=(drawn[-1], *others))
        named.append(node)
    return named, drawn
