"""One rank that has all layers: what a pass of some samples, its memory and its update cost, from which strategies are
estimated; and its operators as a chain of layers that a pipeline may cut.

layers     of a model with many repeated ones, few are compiled and priced
samples    1, 8, 64, 512, … are priced, with recomputation of sections on whole RDUs also 2 and 4; the others are
           interpolated
operators  take their share of their section in the step of a replica without stages; one of the backward belongs to the
           stage whose activations it reads
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Protocol

from sambasim.costs.work import Work, at_batch_size, work_of
from sambasim.errors import SambasimError
from sambasim.hardware.budget import Budget, budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.ir.graph import Section
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR, Mesh
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES
from sambasim.simulation.alone import MODEL_KINDS, price_alone, sections_of_pass
from sambasim.simulation.machine import mixed
from sambasim.simulation.memory import Memory, memory_of, operand_bytes
from sambasim.simulation.planning.chain import Chain, Shorter, chain_of
from sambasim.simulation.planning.strategy import Strategy, roomy
from sambasim.simulation.scaling import slowest_s_of
from sambasim.simulation.sync import Traffic, traffic_of


class Programs(Protocol):
    """The programs of a model. Both raise OptionError for what is impossible."""

    def program(self, strategy: Strategy) -> Program:
        """The program that is compiled for `strategy`."""

    def repeated_layers(self, dtype: str) -> int:
        """How many equal layers the model repeats; 0 if they cannot be left out."""

    def shorter(self, strategy: Strategy, layers: int) -> Shorter | None:
        """The same with so many of its repeated layers; None if it has no more."""


_MANY_LAYERS = 12
_FEW_LAYERS = {"none": (2, 4), "sections": (2, 6)}
"""A model with many repeated layers is priced with few of them, by recomputation, and what a further one adds is added
for the others. Sections that recompute are less regular."""

_CUT_FOR = _APART = 8
"""The most samples for which sections are cut: a pass of more has the same ones. And by how many times the numbers of
samples that are priced differ."""


@dataclass(frozen=True)
class Compiled:
    """The program of a replica of one stage."""

    program: Program
    shorter: Shorter | None = None

    @cached_property
    def work(self) -> Work:
        return work_of(self.program.leading, self.program.symbols)

    @cached_property
    def numel_of(self) -> Mapping[str, int]:
        return {member.parameter: member.numel for group in self.program.groups for member in group.members}

    @property
    def sections(self) -> Sequence[Section]:
        return sections_of_pass(self.program.leading)

    @cached_property
    def largest_layer_bytes(self) -> int:
        """Of the parameters of one module, their gradients and their states."""
        found = Counter[str]()
        for group in self.program.groups:
            regions = self.program.optimizers[group.optimizer].regions
            element_bytes = sum(DTYPE_BYTES[group.region_type(region).dtype] for region in regions)
            for member in group.members:
                module, _, _ = self.program.symbols[member.parameter].torch_names[0].rpartition(".")
                found[module] += member.numel * element_bytes
        return max(found.values(), default=0)

    @cached_property
    def gathered(self) -> tuple[int, int]:
        """By ZeRO 2 and 3: what is whole for some sections only: about the largest gradients, and the parameters of
        two groups."""
        sizes = sorted((group.numel * DTYPE_BYTES[group.dtype] for group in self.program.groups), reverse=True)
        return sum(sizes[:1]), sum(sizes[:1]) + sum(sizes[:2])


@dataclass(frozen=True)
class OneRank:
    """One pass of some samples on a rank that has all layers, and its update. `sent_s`: its inputs and outputs;
    `spread_s`: what the slowest of two replicas takes longer; `memory` is without ZeRO and activations, `between_bytes`
    what lies between sections only, and not until the backward; `gathered` that of `Compiled`."""

    chain: Chain
    sections: int
    groups: int
    numel: int
    start_s: float
    sent_s: float
    update_s: float
    spread_s: float
    messages: Traffic
    memory: Memory
    between_bytes: int
    gathered: tuple[int, int]
    operand_bytes: int


class Ranks:
    """The ranks of all strategies, each priced once."""

    def __init__(self, programs: Programs, device: DeviceSpec, cluster: ClusterSpec) -> None:
        self._programs, self._device, self._cluster = programs, device, cluster
        self._budget_of = cache(lambda tiles: budget_of(device, tiles))
        self._of = cache(self._between)
        self._anchored = cache(self._priced)
        self._compiled = cache(self._made)

    def budget(self, strategy: Strategy) -> Budget:
        return self._budget_of(strategy.tiles)

    def of(self, strategy: Strategy) -> OneRank | str:
        """The rank of `strategy`, or why it is impossible."""
        cut = strategy if strategy.tensor == "weight" else replace(strategy, tensor="none", chips=1)
        again = "none" if strategy.recompute == "full" else strategy.recompute  # each stage has its own segments
        return self._of(replace(cut, replicas=2, stages=1, zero=1, passes=1, schedule="1f1b", recompute=again))

    def _between(self, alone: Strategy) -> OneRank | str:
        # What sections keep between them depends on the samples for which they are cut.
        closer = 2 if alone.recompute == "sections" and alone.tiles is None else _APART
        low, high = 1, closer
        while high <= alone.samples:
            low, high = high, high * (closer if high < _CUT_FOR else _APART)
        found = self._anchored(replace(alone, samples=low))
        if low == alone.samples or isinstance(found, str):
            return found
        more = self._anchored(replace(alone, samples=high))
        return more if isinstance(more, str) else mixed(found, more, (alone.samples - low) / (high - low))

    def _priced(self, alone: Strategy) -> OneRank | str:
        compiled = self._compiled(replace(alone, samples=min(alone.samples, _CUT_FOR)))
        if isinstance(compiled, str):
            return compiled
        ranks = [self._one_rank(alone, each) for each in compiled]
        found, shorter = ranks[-1], compiled[-1].shorter
        if shorter is None:
            return found
        few, more = _FEW_LAYERS[alone.recompute]
        low, high = (replace(rank, chain=Chain((), 0)) for rank in ranks)
        whole = mixed(low, high, (shorter.layers - few) / (more - few))
        between_bytes = max(whole.between_bytes, 0)
        return replace(whole, chain=found.chain, between_bytes=between_bytes, gathered=found.gathered)

    def _made(self, alone: Strategy) -> Sequence[Compiled] | str:
        """The program of the whole model; or that of few layers and one of some more, if they show what one costs: each
        has sections and parameters of its own."""
        try:
            counts = _FEW_LAYERS[alone.recompute]
            if self._programs.repeated_layers(alone.dtype) >= _MANY_LAYERS:
                shorter = [self._programs.shorter(alone, count) for count in counts]
                found = [Compiled(each.program, each) for each in shorter if each is not None]
                if len(found) == len(counts):
                    few, more = found
                    grown = len(more.sections) - len(few.sections)  # of the forward and of the backward
                    has_own = sum(more.numel_of.values()) > sum(few.numel_of.values())
                    if grown >= 2 * (counts[1] - counts[0]) and has_own:
                        return found
            return [Compiled(self._programs.program(alone))]
        except SambasimError as error:  # a model may not be captured in each dtype
            return error.what

    def _one_rank(self, alone: Strategy, compiled: Compiled) -> OneRank:
        program, samples = compiled.program, alone.samples
        budget = replace(roomy(self.budget(alone)), behind=None)
        graph, sections = program.leading, compiled.sections
        work = at_batch_size(compiled.work, program.batch_size, samples)
        step = price_alone(program, work, budget, samples)
        found = [Traffic()] * len(sections)
        if alone.chips > 1:
            placement = place(alone.chips, self._device, None, self._cluster)
            mesh = Mesh({DATA_PARALLEL: 1, TENSOR: alone.chips})
            for number, section in enumerate(sections):
                by_axis = traffic_of([section], graph, program, placement, mesh, 0, samples, work.resident)
                found[number] = by_axis.get(TENSOR, Traffic())
        chain = chain_of(step, work, [traffic.predicted_s for traffic in found], compiled.numel_of, compiled.shorter)
        return OneRank(
            chain,
            sections=len(sections),
            groups=len(program.groups),
            numel=sum(compiled.numel_of.values()),
            start_s=step.start_s,
            sent_s=step.sent_s,
            update_s=sum(section.price.predicted_s for section in step.sections if section.kind not in MODEL_KINDS),
            spread_s=slowest_s_of(step, 2),
            messages=sum(found, Traffic()),
            memory=memory_of(program, activations_bytes=0, samples=samples, zero=0, replicas=1),
            between_bytes=max(step.need.residency.size_bytes - chain.priced_bytes, 0),
            gathered=compiled.gathered,
            operand_bytes=operand_bytes(program),
        )

    def largest_layer_bytes(self, dtype: str) -> int | None:
        """Without cuts; None if it cannot be compiled."""
        compiled = self._compiled(Strategy(2, dtype=dtype))
        return None if isinstance(compiled, str) else compiled[-1].largest_layer_bytes
