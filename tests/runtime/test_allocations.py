"""A step allocates nothing after the first, apart from activations: what syncs and updates has its memory by then."""

import pytest
from torch.autograd.profiler import profile

from sambasim.runtime.measure.paths import flat_program
from sambasim.runtime.transports.connect import connect_here
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.runtime.values.optimizers import Optimizers

SCALAR_BYTES = 8
"""Of a number as a tensor, which torch makes where it is an operand."""


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_reduction_and_an_update_allocate_nothing(replicas: int) -> None:
    program = flat_program(200_000)
    memories = [DeviceMemory.private(program) for _ in range(replicas)]
    ranks = connect_here(memories)
    (group,) = program.groups
    reductions = [rank.sync.reduce_scatter(program.groups) for rank in ranks]
    updates = []
    arguments = {"sgd0__lr": 0.1, "sgd0__momentum": 0.0, "sgd0__dampening": 0.0, "sgd0__nesterov": False}
    for rank in ranks:
        optimizers = Optimizers(program, rank.sync.memory, arguments | {"sgd0__weight_decay": 0.0})
        optimizers.begin(1, 1.0)
        start, stop = rank.sync.updated(group)
        updates.append(optimizers.slice(group, start, stop, rank.sync.memory.region(group, "gradient")[start:stop]))

    def step() -> None:
        for reduction in reductions:
            assert reduction is not None
            reduction.begin()
        for reduction, update in zip(reductions, updates, strict=True):
            assert reduction is not None
            reduction.finish()
            update()

    step()
    with profile(profile_memory=True) as profiled:
        step()
    assert max(event.cpu_memory_usage for event in profiled.function_events or ()) <= SCALAR_BYTES
