"""A rank of a job and its connections to the others: along dp, along the other axes of its mesh, and at the end of each
step."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from sambasim.errors import InternalError
from sambasim.ir.mesh import DATA_PARALLEL, Mesh
from sambasim.ir.program import ParameterGroup
from sambasim.runtime.transports.communication import AxisGroup, EndOfStep
from sambasim.runtime.transports.gradient_sync import Fusion, GradientSync
from sambasim.runtime.transports.in_process import Hub
from sambasim.runtime.values.device import DeviceMemory
from sambasim.runtime.watch.observer import StepObserver, report_spans

Connect: TypeAlias = Callable[[Sequence[int]], AxisGroup]
"""Connects ranks of the job, of which the own one is one."""


@final
class Transport:
    """Rank `rank` of `mesh`, with device memory `memory`. Along dp it is connected by `sync`, along other axes by
    `connect`; `end` is the end of each step. `hub` connects the ranks of this process; None if there is only one."""

    def __init__(
        self,
        memory: DeviceMemory,
        sync: GradientSync,
        mesh: Mesh,
        rank: int,
        connect: Connect,
        end: EndOfStep,
        title: str = "",
        hub: Hub | None = None,
    ) -> None:
        self.program = memory.program
        self.memory = memory
        self.sync = sync
        self.mesh = mesh
        self.rank = rank
        self.replica = sync.replica
        self.end = end
        self.title = title or sync.title
        self.hub = hub
        self.gives_loss = mesh.gives_loss(rank)
        self.is_first_copy = mesh.is_first_copy(rank)
        self._connect = connect

    def axis_group(self, axis: str) -> AxisGroup:
        """The group along `axis` that this rank belongs to."""
        return self.sync.group if axis == DATA_PARALLEL else self._connect(self.mesh.group(self.rank, axis))

    def fusions(self) -> Sequence[Fusion]:
        """The fused instructions; lowering uses the longest pattern that matches."""
        if self.mesh.world_size == self.sync.replicas:
            return self.sync.fusions()
        # Those of a clipped update take its all-reduce for the only one, along dp.
        return [fusion for fusion in self.sync.fusions() if "comm.all_reduce" not in fusion.pattern]

    def observe(self, observer: StepObserver | None) -> None:
        for part in self.sync.observed:
            report_spans(part, observer, self.rank)

    def group(self, name: str) -> ParameterGroup:
        for group in self.program.groups:
            if group.name == name:
                return group
        raise InternalError(f"the program has no group {name}")
