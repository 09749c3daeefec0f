"""Memory of a rank by part: against the addresses that a compiled program has, and against slices counted by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from sambasim.compiler.front import shapes_from_options
from sambasim.ir.program import Program
from sambasim.options.compile import compile_options
from sambasim.simulation.memory import memory_of

CONFIG = Path(__file__).parents[2] / "configs" / "char_gpt.toml"


@pytest.fixture(scope="module")
def program() -> Program:
    return shapes_from_options(compile_options(CONFIG, None, (), {"data_parallel": True}))


def test_what_a_program_keeps_is_what_it_has_addresses_for(program: Program) -> None:
    memory = memory_of(program, activations_bytes=0)
    alignment = 512 * len(program.symbols)
    assert program.device_bytes - alignment <= memory.total_bytes <= program.device_bytes
    assert memory.gradients == memory.parameters
    assert memory.states == 2 * memory.parameters  # AdamW


def test_each_level_of_zero_cuts_one_part_more(program: Program) -> None:
    numel = sum(group.numel for group in program.groups)
    levels = [memory_of(program, activations_bytes=0, zero=zero, replicas=8) for zero in range(4)]
    whole = [4 * numel, 4 * numel, 8 * numel]
    for zero, memory in enumerate(levels):
        parts = [memory.parameters, memory.gradients, memory.states]
        cut = [level <= zero for level in (3, 2, 1)]
        assert parts == [
            pytest.approx(size / 8 if is_cut else size, rel=0.01) for size, is_cut in zip(whole, cut, strict=True)
        ]
    largest = max(4 * (group.numel - 64 * math.ceil(group.numel / 8 / 64)) for group in program.groups)
    assert levels[1].buffers == levels[0].buffers
    assert levels[2].buffers - levels[1].buffers >= largest  # whole gradients of a section
    assert levels[3].buffers - levels[2].buffers >= largest  # and parameters
    assert [one.total_bytes for one in levels] == sorted((one.total_bytes for one in levels), reverse=True)


def test_gradients_are_whole_if_a_step_has_several_passes(program: Program) -> None:
    one, several = (memory_of(program, activations_bytes=0, zero=2, replicas=8, passes=n) for n in (1, 4))
    assert several.gradients == several.parameters > 7 * one.gradients
    assert several.buffers < one.buffers


def test_one_replica_has_everything(program: Program) -> None:
    of_levels = {memory_of(program, activations_bytes=0, zero=zero) for zero in range(4)}
    assert len(of_levels) == 1


def test_activations_are_kept_by_every_pass_in_flight_and_inputs_grow_with_samples(program: Program) -> None:
    one = memory_of(program, activations_bytes=1000)
    more = memory_of(program, activations_bytes=2000, samples=2 * program.batch_size, in_flight=3)
    inputs = sum(symbol.type.size_bytes for symbol in program.symbols.values() if symbol.kind == "input")
    assert more == replace(one, activations=6000, buffers=one.buffers + inputs)
