"""Where two PEFs differ: each part of them by itself, and the first of all in the verdict."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sambasim.ir.graph import Graph
from sambasim.ir.types import TensorType
from sambasim.pef import PefDocument, map_weights, read, write
from sambasim.report.compare.result import PefsCompared, comparison
from sambasim.report.compare.tensors import compare_pefs
from tests.pef.samples import sample_document, sample_weights


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


def test_what_was_compiled_twice_is_alike(tmp_path: Path) -> None:
    found = compared(tmp_path, sample_document())
    assert found.alike
    assert found.verdict.startswith("alike: both are logreg, digest ")
    assert list(comparison(found)) == [found.verdict]


def test_options_that_differ_are_told_by_their_names(tmp_path: Path) -> None:
    document = replace(sample_document(), compile_options={"batch_size": 4, "data_parallel": True, "world_size": 3})
    found = compared(tmp_path, document)
    assert not found.alike
    assert found.verdict == "they differ in the options: compile.world_size 2 and 3"
    assert (found.symbols, found.graphs, found.weights) == ((), (), ())


def test_the_first_operator_that_differs_is_told_with_its_line(tmp_path: Path) -> None:
    graph = sample_document().program.training
    assert graph is not None
    nodes = list(graph.nodes)
    nodes[2] = replace(nodes[2], operator="aten._softmax.default")
    found = compared(tmp_path, with_training(replace(graph, nodes=tuple(nodes))))
    assert found.graphs == (
        "the training graph: operator 2, section 0 FWD logreg__fwd_0: "
        "`%log_softmax = aten._log_softmax.default(%addmm, 1, False) : float32[4, 2]` in A, "
        "`%log_softmax = aten._softmax.default(%addmm, 1, False) : float32[4, 2]` in B",
    )
    assert found.verdict == f"they differ in {found.graphs[0]}"


def test_the_names_of_values_and_their_lines_are_no_difference_of_the_graph(tmp_path: Path) -> None:
    graph = sample_document().program.training
    assert graph is not None
    nodes = (replace(graph.nodes[0], name="other", source=None), *graph.nodes[1:])
    found = compared(tmp_path, with_training(replace(graph, nodes=nodes)))
    assert not found.alike
    assert found.verdict == "they differ only in layout or metadata"


def test_other_cuts_are_told(tmp_path: Path) -> None:
    graph = sample_document().program.training
    assert graph is not None
    first, second, *rest = graph.sections
    sections = (replace(first, stop=3), replace(second, start=3), *rest)
    moved = replace(graph, sections=sections)
    assert compared(tmp_path, with_training(moved)).graphs == (
        "the training graph: the sections differ from section 0 on: 6 sections in A, 6 in B",
    )


def test_a_symbol_of_another_shape_is_told(tmp_path: Path) -> None:
    document = sample_document()
    symbols = dict(document.program.symbols)
    symbols["logreg__mask"] = replace(symbols["logreg__mask"], type=TensorType("bool", (1,)))
    weights = {**sample_weights(), "logreg__mask": torch.tensor([True])}
    found = compared(tmp_path, replace(document, program=replace(document.program, symbols=symbols)), weights)
    assert found.symbols == ("the symbols: logreg__mask is constant bool[3] in A, and constant bool[1] in B",)
    assert found.verdict == f"they differ in {found.symbols[0]}"
    (apart,) = found.weights
    assert (apart.name, apart.why) == ("logreg__mask", "type")


def test_weights_that_differ_are_told_with_how_much(tmp_path: Path) -> None:
    weights = sample_weights()
    weights["logreg__lin_layer__bias"] = torch.tensor([0.5, 0.25])
    found = compared(tmp_path, sample_document(), weights)
    assert found.verdict.startswith(
        "they differ in the weights, first logreg__lin_layer__bias: 1 of 2 elements, by 0.25 at most (relative 1)"
    )
    assert found.tensors == 5


def test_equal_weights_are_not_read(tmp_path: Path) -> None:
    def unread() -> Mapping[str, Tensor]:
        pytest.fail("the digests of the weights are equal")

    path = tmp_path / "a.pef"
    write(path, sample_document(), sample_weights())
    other = replace(read(path), data_source={}, digest="0" * 64)
    assert not compare_pefs(("a", read(path)), ("b", other), (unread, unread)).alike
