"""The facts and tables of `sambasim inspect`."""

import io
import json
import re
from pathlib import Path

from rich.console import Console, RenderableType

from sambasim import pef
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.report.inspect import Contents, contents, section_facts
from sambasim.report.inspect_tables import inspection, options_table
from tests.pef.samples import GROUP_BYTES, sample_program, write_sample
from tests.support.compiled import compile_from_options
from tests.support.examples import example_options, in_stages


def facts_of(folder: Path) -> Contents:
    path = write_sample(folder)
    return contents(path, pef.peek(path), pef.read(path))


def section_traffic(program: Program, graph: Graph) -> list[tuple[int, int]]:
    return [(section.in_bytes, section.out_bytes) for section in section_facts(program, graph)]


def printed(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_traffic_counts_what_crosses_a_section_once() -> None:
    program = sample_program()
    assert program.training is not None
    f32, i64 = 4, 8
    # In: weight, bias, x, target. Out: the loss, log_softmax and n, which the backward reads. t and addmm stay inside.
    forward = ((6 + 2 + 12) * f32 + 4 * i64, (8 + 1 + 1) * f32)
    # In: the tangent, log_softmax, target, n, x. Out: both gradients.
    backward = ((1 + 8 + 1 + 12) * f32 + 4 * i64, (6 + 2) * f32)
    reduce = gather = (GROUP_BYTES, GROUP_BYTES)
    f64 = 8
    norm = (GROUP_BYTES, f64)
    # In: parameters, gradients, momentum and the norm. Out: parameters and momentum.
    optimizer = (3 * GROUP_BYTES + f64, 2 * GROUP_BYTES)
    expected = [forward, backward, reduce, norm, optimizer, gather]
    assert section_traffic(program, program.training) == expected
    assert section_traffic(program, program.evaluation) == [((12 + 6 + 2) * f32, 8 * f32)]


def test_facts(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert [graph.name for graph in facts.graphs] == ["training", "evaluation"]
    assert [section.kind for section in facts.graphs[0].sections] == [
        "FWD", "BCKWD", "REDUCE", "GRADNORM", "OPT", "GATHER",
    ]  # fmt: skip
    transposes = next(row for row in facts.graphs[0].operators if row.operator == "aten.t.default")
    assert (transposes.kind, transposes.count, transposes.sources) == ("view", 2, ["logreg.py:7"])
    reduce, update = facts.graphs[0].sections[2], facts.graphs[0].sections[4]
    assert reduce.reads == reduce.writes == ("group0.gradient",)
    assert update.writes == ("group0.momentum", "group0.parameter")
    assert sum(row.count for row in facts.graphs[0].operators) == facts.graphs[0].nodes == 15
    sizes = {row.kind: (row.symbols, row.elements, row.size_bytes) for row in facts.sizes}
    assert sizes["parameter"] == (2, 8, 32)
    assert sum(row.symbols for row in facts.sizes) == len(facts.symbols)
    assert facts.groups[0].gradient_symbol == "$OPT_dp_accum_group_" + "a" * 40
    assert facts.file_bytes == (tmp_path / "logreg.pef").stat().st_size


def test_json_is_strict_and_comes_back(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    text = facts.model_dump_json()
    assert "\n" not in text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    fields = json.loads(text, parse_constant=refuse)
    assert [row["default"] for row in fields["runtime_arguments"]] == [0.05, "Infinity", 1]
    assert Contents.model_validate_json(text) == facts


def test_tables_show_everything(tmp_path: Path) -> None:
    text = printed(inspection(facts_of(tmp_path), everything=True))
    for piece in (
        "2 or more, data parallel",
        "training: sections (6)",
        "evaluation: operators (1)",
        "training defaults",
        "digits.py:dataset",
        "sgd0__max_grad_norm",
        "inf",
        "largest norm of all gradients",
        "$OPT_dp_accum_group_",
    ):
        assert piece in text
    assert re.search(r"\b4 +OPT +logreg__opt_4 +1 +1\.5 KiB +1\.0 KiB", text)
    assert re.search(r"logreg__mask +constant +bool\[3\] +5120 +3 B", text)
    assert re.search(r"view +aten\.t\.default +2 +logreg\.py:7", text)


def test_what_ranks_have_whole_and_gather_is_told(tmp_path: Path) -> None:
    plan = ('parallel.tensor_parallel="weight"', "parallel.n_chips=2", 'parallel.tensor_plan={ tokens = "colwise" }')
    path = compile_from_options(example_options("char_gpt", tmp_path, *plan)).path
    facts = contents(path, pef.peek(path), pef.read(path))
    training, evaluation, _ = facts.graphs
    part_bytes = 4 * 32 * 32 * 4 // 2  # of an activation
    assert [(one.operator, one.values, one.received_bytes) for one in training.gathered] == [
        ("aten.native_layer_norm.default", 5, 5 * part_bytes),
        ("aten.native_layer_norm_backward.default", 1, part_bytes),
    ]
    assert [(one.operator, one.values) for one in evaluation.gathered] == [("aten.native_layer_norm.default", 5)]
    text = printed(inspection(facts, everything=False))
    assert re.search(r"whole along tp +27 of 28 parameters, 103\.5 KiB: blocks\.0\.mlp\.0\.weight, ", text)
    assert re.search(r"aten\.native_layer_norm\.default +tp +5 +40\.0 KiB +blocks\.0\.norm1, ", text)


def test_stages_show_where_a_tied_parameter_is_updated(tmp_path: Path) -> None:
    path = in_stages("char_gpt", tmp_path)
    facts = contents(path, pef.peek(path), pef.read(path))
    assert [one.tied for one in facts.stages] == [{}, {"chargpt__tokens__weight": 0}]
    said = "rank 1 updates chargpt__tokens__weight, whose gradient rank 0 sends once a step"
    assert said in printed(inspection(facts, everything=False))


def test_text_from_a_file_is_neither_markup_nor_control() -> None:
    text = printed(options_table("options", {"model": "[red]x[/red]\x1b[2J", "list": ["[bold]"]}))
    assert "[red]x[/red]\\x1b[2J" in text
    assert '["[bold]"]' in text
    assert "\x1b" not in text
