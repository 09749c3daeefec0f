"""Parameters of which a rank keeps slices only are whole in a block, and in slices again however it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest

from sambasim.ir.program import ParameterGroup
from sambasim.runtime.run.replica import Replica
from sambasim.runtime.run.setup import Engine, Team
from sambasim.runtime.transports.connect import Way
from tests.pef.samples import sample_program


@dataclass
class Sync:
    done: list[str] = field(default_factory=list)

    def make_whole(self) -> None:
        self.done.append("whole")

    def releasing(self, group: ParameterGroup, region: str) -> Callable[[], None]:
        return lambda: self.done.append(f"{region} of {group.name}")


def test_parameters_are_released_also_if_an_evaluation_fails() -> None:
    sync, program = Sync(), sample_program()
    memory = SimpleNamespace(program=replace(program, zero=3))
    replica = cast(Replica, SimpleNamespace(memory=memory, transport=SimpleNamespace(sync=sync)))
    with pytest.raises(KeyError), Team([replica], Way.HOST, Engine("plain")).whole_parameters():
        raise KeyError("a sample")
    assert sync.done == ["whole", *(f"parameter of {group.name}" for group in program.groups)]
