"""Comparing tensors bit by bit, and PEFs."""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sambasim.ir.graph import Graph
from sambasim.pef import PefDocument, map_weights, read, write
from sambasim.report.compare import PefsCompared, TensorDifference, tensor_difference
from sambasim.report.compare.tensors import compare_pefs, compare_tensors
from tests.pef.samples import sample_document, sample_weights


def apart(a: Tensor, b: Tensor) -> TensorDifference | None:
    common, found = compare_tensors({"w": a}, {"w": b})
    assert common == 1
    return found[0] if found else None


def f32(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def test_equal_bits_are_alike_even_of_a_nan() -> None:
    tensor = torch.tensor([1.0, math.nan, -0.0, math.inf])
    assert apart(tensor, tensor.clone()) is None


def test_a_nan_of_other_bits_differs() -> None:
    found = apart(f32(0x7FC00000), f32(0x7FC00001))
    assert found is not None
    assert (found.differing, found.differing_not_finite, found.largest_absolute, found.largest_ulps) == (
        1,
        1,
        None,
        None,
    )
    assert tensor_difference(found) == "1 of 1 elements, 1 of them not finite"


def test_the_sign_of_zero_is_a_difference_of_no_size() -> None:
    found = apart(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert found is not None
    assert (found.differing, found.elements, found.largest_absolute, found.largest_ulps) == (1, 2, 0.0, 0)


def test_the_largest_differences_are_told_each_by_itself() -> None:
    found = apart(torch.tensor([100.0, 1.0, 5.0]), torch.tensor([101.0, 1.5, 5.0]))
    assert found is not None
    assert (found.differing, found.largest_absolute) == (2, 1.0)
    assert found.largest_relative == pytest.approx(1 / 3)
    assert found.largest_ulps == 1 << 22
    assert tensor_difference(found) == "2 of 3 elements, by 1 at most (relative 0.33), 4,194,304 ULPs"


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, FLOATS)
def test_ulps_count_the_numbers_between(a: float, b: float) -> None:
    """By walking the integers in the order of the numbers, as IEEE 754 lays them out."""
    if math.copysign(1.0, a) == math.copysign(1.0, b):
        bits = [struct.unpack("<I", struct.pack("<f", abs(x)))[0] for x in (a, b)]
        steps = abs(bits[0] - bits[1])
    else:
        steps = sum(struct.unpack("<I", struct.pack("<f", abs(x)))[0] for x in (a, b))
    found = apart(torch.tensor([a]), torch.tensor([b]))
    assert (found.largest_ulps if found else 0) == steps


def test_a_difference_behind_the_first_piece_is_found() -> None:
    one = torch.zeros((1 << 20) + 3)
    other = one.clone()
    other[-1] = 2.0
    found = apart(one, other)
    assert found is not None
    assert (found.differing, found.largest_absolute) == (1, 2.0)


def test_what_is_missing_or_of_another_type_is_told_in_order() -> None:
    ours = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(3)}
    theirs = {"c": torch.zeros(3, dtype=torch.float64), "d": torch.zeros(1), "b": torch.zeros(1, 2)}
    common, found = compare_tensors(ours.items(), theirs)
    assert common == 2
    assert [f"{one.name}: {tensor_difference(one)}" for one in found] == [
        "a: only in A, float32[2]",
        "b: float32[2] in A, float32[1, 2] in B",
        "c: float32[3] in A, float64[3] in B",
        "d: only in B, float32[1]",
    ]


def compared(folder: Path, document: PefDocument, weights: Mapping[str, Tensor] | None = None) -> PefsCompared:
    """The sample, and what it has become."""
    paths = folder / "a.pef", folder / "b.pef"
    write(paths[0], sample_document(), sample_weights())
    write(paths[1], document, dict(weights or sample_weights()))
    ours, theirs = ((path.name, read(path)) for path in paths)
    return compare_pefs(ours, theirs, (lambda: map_weights(paths[0]), lambda: map_weights(paths[1])))


def with_training(graph: Graph) -> PefDocument:
    document = sample_document()
    return replace(document, program=replace(document.program, training=graph))


def test_options_that_differ_are_told_by_their_names(tmp_path: Path) -> None:
    document = replace(sample_document(), compile_options={"batch_size": 4, "data_parallel": True, "world_size": 3})
    found = compared(tmp_path, document)
    assert not found.equal
    assert found.verdict == "they differ in the options: compile.world_size 2 and 3"
    assert (found.symbols, found.graphs, found.weights) == ((), (), ())


def test_the_first_operator_that_differs_is_told_with_its_line(tmp_path: Path) -> None:
    graph = sample_document().program.training
    assert graph is not None
    nodes = list(graph.nodes)
    nodes[2] = replace(nodes[2], operator="aten._softmax.default")
    found = compared(tmp_path, with_training(replace(graph, nodes=tuple(nodes))))
    assert found.graphs == (
        "the training graph: operator 2, section 0 FWD logreg__fwd_0\n"
        "  A: `%log_softmax = aten._log_softmax.default(%addmm, 1, False) : float32[4, 2]`\n"
        "  B: `%log_softmax = aten._softmax.default(%addmm, 1, False) : float32[4, 2]`",
    )
    assert found.verdict == f"they differ in {found.graphs[0]}"


def test_the_names_of_values_and_their_lines_are_no_difference_of_the_graph(tmp_path: Path) -> None:
    graph = sample_document().program.training
    assert graph is not None
    nodes = (replace(graph.nodes[0], name="other", source=None), *graph.nodes[1:])
    found = compared(tmp_path, with_training(replace(graph, nodes=nodes)))
    assert not found.equal
    assert found.verdict == "they differ only in layout or metadata"
