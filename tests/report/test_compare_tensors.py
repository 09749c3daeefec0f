"""Comparing tensors bit by bit, and PEFs."""

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sambasim.ir.graph import Node
from sambasim.pef import PefDocument, map_weights, read, write
from sambasim.report.compare import tensor_difference
from sambasim.report.compare.tensors import compare_pefs, compare_tensors
from sambasim.report.tables import Row
from tests.pef.samples import sample_document, sample_weights


def apart(a: Tensor, b: Tensor) -> Row | None:
    common, found = compare_tensors({"w": a}, {"w": b})
    assert common == 1
    return found[0] if found else None


def f32(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


FAR = torch.zeros((1 << 20) + 3)
"""More than is compared at once."""


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (f32(0x7FC00000), f32(0x7FC00001), "1 of 1 elements, 1 of them not finite"),
        ([0.0, 1.0], [-0.0, 1.0], "1 of 2 elements, by 0 at most (relative 0), 0 ULPs"),
        ([100.0, 1.0, 5.0], [101.0, 1.5, 5.0], "2 of 3 elements, by 1 at most (relative 0.33), 4,194,304 ULPs"),
        (FAR, torch.cat([FAR[1:], torch.tensor([2.0])]), "1 of 1,048,579 elements, by 2 at most (relative 1), "),
    ],
)
def test_the_largest_differences_are_told_each_by_itself(a: Tensor, b: Tensor, expected: str) -> None:
    found = apart(torch.as_tensor(a), torch.as_tensor(b))
    assert found is not None
    assert tensor_difference(found).startswith(expected)


def test_equal_bits_are_alike_even_of_a_nan() -> None:
    tensor = torch.tensor([1.0, math.nan, -0.0, math.inf])
    assert apart(tensor, tensor.clone()) is None


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, FLOATS)
def test_ulps_count_the_numbers_between(a: float, b: float) -> None:
    """By walking the integers in the order of the numbers, as IEEE 754 lays them out."""
    bits = [struct.unpack("<I", struct.pack("<f", abs(x)))[0] for x in (a, b)]
    steps = abs(bits[0] - bits[1]) if math.copysign(1.0, a) == math.copysign(1.0, b) else sum(bits)
    found = apart(torch.tensor([a]), torch.tensor([b]))
    assert (found.largest_ulps if found else 0) == steps


def test_what_is_missing_or_of_another_type_is_told_in_order() -> None:
    ours = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(3)}
    theirs = {"c": torch.zeros(3, dtype=torch.float64), "d": torch.zeros(1), "b": torch.zeros(1, 2)}
    common, found = compare_tensors(ours.items(), theirs)
    assert common == 2
    assert [f"{difference.name}: {tensor_difference(difference)}" for difference in found] == [
        "a: only in A, float32[2]",
        "b: float32[2] in A, float32[1, 2] in B",
        "c: float32[3] in A, float64[3] in B",
        "d: only in B, float32[1]",
    ]


def compared(folder: Path, document: PefDocument) -> Row:
    """The sample, and what it has become."""
    paths = folder / "a.pef", folder / "b.pef"
    write(paths[0], sample_document(), sample_weights())
    write(paths[1], document, sample_weights())
    ours, theirs = ((path.name, read(path)) for path in paths)
    found = compare_pefs(ours, theirs, (lambda: map_weights(paths[0]), lambda: map_weights(paths[1])))
    assert not found.equal
    return found


def with_nodes(number: int, **changes: object) -> PefDocument:
    """The sample with another node."""
    document = sample_document()
    graph = document.program.training
    assert graph is not None
    nodes: Sequence[Node] = graph.nodes
    changed = replace(nodes[number], **changes)  # type: ignore[arg-type]  # the fields have many types
    training = replace(graph, nodes=(*nodes[:number], changed, *nodes[number + 1 :]))
    return replace(document, program=replace(document.program, training=training))


def test_options_that_differ_are_told_by_their_names(tmp_path: Path) -> None:
    document = replace(sample_document(), compile_options={"batch_size": 4, "data_parallel": True, "world_size": 3})
    found = compared(tmp_path, document)
    assert found.verdict == "they differ in the options: compile.world_size 2 and 3"
    assert (found.symbols, found.graphs, found.weights) == ([], [], [])


def test_the_first_operator_that_differs_is_told_with_its_line_and_a_name_is_no_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, with_nodes(2, operator="aten._softmax.default"))
    assert found.graphs == [
        "the training graph: operator 2, section 0 FWD logreg__fwd_0\n"
        "  A: `%log_softmax = aten._log_softmax.default(%addmm, 1, False) : float32[4, 2]`\n"
        "  B: `%log_softmax = aten._softmax.default(%addmm, 1, False) : float32[4, 2]`"
    ]
    assert found.verdict == f"they differ in {found.graphs[0]}"
    named = compared(tmp_path, with_nodes(0, name="other", source=None))
    assert named.verdict == "they differ only in layout or metadata"
