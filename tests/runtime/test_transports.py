"""Flags in a shared window, the notice about scattered ranks, and steps that allocate nothing."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch.autograd.profiler import profile

from sambasim.ir.program import Member
from sambasim.runtime.machine.communicator import Communicator, SharedWindow
from sambasim.runtime.measure.paths import flat_program
from sambasim.runtime.transports.connect import connect_here
from sambasim.runtime.transports.network import narrowed, scattered
from sambasim.runtime.transports.shared_flags import Counter, NodeFlags
from sambasim.runtime.values.mean import CHUNK_ELEMENTS
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.runtime.values.optimizers import Optimizers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfTwo(Communicator):
    """A rank of two, which are one and the same process."""

    window: SharedWindow = field(kw_only=True)

    def allocate_shared(self, size_bytes: int, touched: object = None) -> SharedWindow:
        return self.window

    def all_gather_object(self, value: T) -> tuple[T, ...]:
        return value, value


def test_counters_losses_and_requests_are_those_that_the_peer_has_published() -> None:
    window = SharedWindow(tuple(np.zeros(8192, np.uint8) for _ in range(2)))
    own, peer = (NodeFlags(OfTwo(rank=rank, node_of=(0, 0), host_name="here", window=window)) for rank in range(2))
    assert own.reached(Counter.PROGRESS, 0)
    assert not own.reached(Counter.PROGRESS, 1)
    peer.publish(Counter.UPDATED, 1)
    assert not own.reached(Counter.PROGRESS, 1)
    peer.publish(Counter.PROGRESS, 2)
    assert own.reached(Counter.PROGRESS, 1)
    own.wait(Counter.PROGRESS, 2)
    own.put(0, [0.25], 3)
    peer.put(0, [-1.5], 7)
    peer.put(1, [9.0], 0)
    for flags in (own, peer):
        assert flags.numbers(0) == ([0.25, -1.5], 7)
        assert flags.numbers(1) == ([0.0, 9.0], 0)


def test_a_notice_if_the_ranks_of_a_node_are_no_block() -> None:
    assert scattered([0, 0, 1, 1]) == scattered([0, 1, 2]) == []
    (notice,) = scattered([0, 1, 0, 1])
    assert notice.startswith("4 gradients of each slice are sent between 2 nodes; it would be 2 sums")
    (notice,) = scattered([0, 0, 0, 1, 1, 1])
    assert notice.startswith("6 gradients of each slice are sent between 2 nodes")


def test_a_gradient_is_rounded_in_its_own_memory() -> None:
    gradient = torch.randn(2 * CHUNK_ELEMENTS + 64)
    expected, before = gradient[64:].bfloat16(), gradient[:64].clone()
    sent = narrowed(gradient[64:], torch.bfloat16)
    assert torch.equal(sent, expected)
    assert sent.data_ptr() == gradient[64:].data_ptr()
    assert torch.equal(gradient[:64], before)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_reduction_and_an_update_allocate_nothing_after_the_first_step(replicas: int) -> None:
    program = flat_program(200_000)
    ranks = connect_here([DeviceMemory.private(program) for _ in range(replicas)])
    group = replace(program.groups[0], members=(Member("w", "w__grad", 0, program.groups[0].numel, 0),))
    reductions = [rank.sync.reduce_scatter(program.groups) for rank in ranks]
    settings = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
    updates = []
    for rank in ranks:
        optimizers = Optimizers(rank.sync.memory, {f"sgd0__{name}": value for name, value in settings.items()})
        optimizers.begin(1, 1.0)
        start, stop = rank.sync.updated(group)
        updates.append(optimizers.slice(group, start, stop, rank.sync.memory.region(group, "gradient")[start:stop]))

    def step() -> None:
        for reduction in filter(None, reductions):
            reduction.begin()
        for reduction, update in zip(filter(None, reductions), updates, strict=True):
            reduction.finish()
            update()

    step()
    with profile(profile_memory=True) as profiled:
        step()
    scalar_bytes = 8  # of a number as a tensor, which torch makes where it is an operand
    assert max(event.cpu_memory_usage for event in profiled.function_events or ()) <= scalar_bytes
