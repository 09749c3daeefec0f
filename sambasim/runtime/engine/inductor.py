"""The engine that compiles units of sections by torch's inductor: C++ made for this graph, built by the machine's
compiler, and kept on disk for the next start.

Its bits are its own. It draws the random numbers that the plain engine draws: dropout stays torch's own operator, and
such operators keep their order.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sambasim.errors import MachineError
from sambasim.ir.graph import Node, Ref, SectionKind, node_references
from sambasim.ir.operators import OPERATORS
from sambasim.runtime.engine.compiler import find_compiler, use_cache_folder
from sambasim.runtime.engine.decompositions import KEPT_TAG, decompositions
from sambasim.runtime.engine.parts import Part, by_part
from sambasim.runtime.engine.rebuild import fake_values, rebuild
from sambasim.runtime.engine.routes import find_routes
from sambasim.runtime.engine.units import Region, Steps, choose_units
from sambasim.runtime.instructions import Instruction, RegisterFile, compiled_instruction, free_after_use

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
