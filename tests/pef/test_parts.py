"""What a PEF is made of: a change shows in the digest of its part, and in no other."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from sambasim.ir.program import Program
from sambasim.pef.document import PefDocument
from sambasim.pef.parts import PartDigests, part_digests
from tests.pef.samples import sample_document


def document(**changed: object) -> PefDocument:
    written = replace(sample_document(), weights_sha256="a" * 64, digest="b" * 64)
    return replace(written, **changed)  # type: ignore[arg-type]  # fields by name


def program(change: Mapping[str, object]) -> Program:
    return replace(sample_document().program, **change)  # type: ignore[arg-type]  # fields by name


def _larger() -> Program:
    data_parallel = sample_document().program.data_parallel
    assert data_parallel is not None
    return program({"data_parallel": replace(data_parallel, world_size=8)})


def _quicker() -> Program:
    first, *others = sample_document().program.runtime_arguments
    return program({"runtime_arguments": (replace(first, default=first.default + 1), *others)})


def _without_arguments_of_replicas() -> Program:
    *others, last = sample_document().program.runtime_arguments
    assert last.name == "dp_scale_factor"
    return program({"runtime_arguments": tuple(others)})


def _with_a_line_more() -> Program:
    graph = sample_document().program.training
    assert graph is not None
    nodes = [
        replace(node, source=replace(node.source, line=node.source.line + 1)) if node.source else node
        for node in graph.nodes
    ]
    return program({"training": replace(graph, nodes=tuple(nodes))})


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("graph", document(program=program({"batch_size": 99}))),
        ("graph", document(program=program({"data_parallel": None}))),
        ("graph", document(program=_without_arguments_of_replicas())),
        ("source", document(program=_with_a_line_more())),
        ("weights", document(weights_sha256="c" * 64)),
        ("data_source", document(data_source={"target": "other.py:dataset"})),
        ("compile_options", document(compile_options={})),
        ("compile_options", document(program=_larger())),
        ("training_defaults", document(training_defaults={"epochs": 4})),
        ("training_defaults", document(program=_quicker())),
        ("metadata", document(metadata={})),
    ],
)
def test_a_change_shows_in_its_part(part: str, changed: PefDocument) -> None:
    before, after = part_digests(document()), part_digests(changed)
    apart = {name for name in PartDigests.model_fields if getattr(before, name) != getattr(after, name)}
    # One that is for no data-parallel run has lost its smallest world size too, which is an option.
    assert apart == ({part, "compile_options"} if changed.program.data_parallel is None else {part})


def test_what_wrote_it_is_no_part() -> None:
    assert part_digests(document()) == part_digests(replace(document(), digest="c" * 64))
