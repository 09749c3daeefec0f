"""The facts and tables of `sambasim inspect`."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from sambasim import pef
from sambasim.report.inspect import contents, inspection, options_table, section_facts
from sambasim.report.summaries import compilation_report
from sambasim.report.tables import Row
from tests.pef.samples import GROUP_BYTES, sample_program, write_sample
from tests.support.compiled import compile_from_options
from tests.support.examples import example_options, in_stages


def facts_of(path: Path) -> Row:
    return contents(path, pef.read(path))


def printed(table: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_traffic_counts_what_crosses_a_section_once() -> None:
    program = sample_program()
    f32, i64, f64 = 4, 8, 8
    expected = [
        # In: weight, bias, x, target. Out: the loss, log_softmax and n, which the backward reads. t and addmm stay.
        ((6 + 2 + 12) * f32 + 4 * i64, (8 + 1 + 1) * f32),
        # In: the tangent, log_softmax, target, n, x. Out: both gradients.
        ((1 + 8 + 1 + 12) * f32 + 4 * i64, (6 + 2) * f32),
        (GROUP_BYTES, GROUP_BYTES),
        (GROUP_BYTES, f64),
        # In: parameters, gradients, momentum and the norm. Out: parameters and momentum.
        (3 * GROUP_BYTES + f64, 2 * GROUP_BYTES),
        (GROUP_BYTES, GROUP_BYTES),
    ]
    for graph, traffic in ((program.leading, expected), (program.evaluation, [((12 + 6 + 2) * f32, 8 * f32)])):
        assert [(section.in_bytes, section.out_bytes) for section in section_facts(program, graph)] == traffic


def test_json_is_strict_and_tables_show_everything(tmp_path: Path) -> None:
    facts = facts_of(write_sample(tmp_path))
    training = facts.graphs[0]
    assert [graph.name for graph in facts.graphs] == ["training", "evaluation"]
    kinds = [section.kind for section in training.sections]
    assert kinds == ["FWD", "BCKWD", "REDUCE", "GRADNORM", "OPT", "GATHER"]
    transposes = next(row for row in training.operators if row.operator == "aten.t.default")
    assert (transposes.kind, transposes.count, transposes.sources) == ("view", 2, ["logreg.py:7"])
    reduce, update = training.sections[2], training.sections[4]
    assert reduce.reads == reduce.writes == ["group0.gradient"]
    assert update.writes == ["group0.momentum", "group0.parameter"]
    assert sum(row.count for row in training.operators) == training.nodes == 15
    sizes = {row.kind: (row.symbols, row.elements, row.size_bytes) for row in facts.sizes}
    assert sizes["parameter"] == (2, 8, 32)
    assert sum(row.symbols for row in facts.sizes) == len(facts.symbols)
    assert facts.groups[0].gradient_symbol == "$OPT_dp_accum_group_" + "a" * 40
    assert facts.file_bytes == (tmp_path / "logreg.pef").stat().st_size
    line = facts.model_dump_json()
    assert "\n" not in line
    fields = json.loads(line, parse_constant=pytest.fail)
    assert [row["default"] for row in fields["runtime_arguments"]] == [0.05, "Infinity", 1]
    text = printed(inspection(facts, everything=True))
    pieces = (
        *("2 or more, data parallel", "training: sections (6)", "evaluation: operators (1)", "training defaults"),
        *("digits.py:dataset", "sgd0__max_grad_norm", "inf", "largest norm of all gradients", "$OPT_dp_accum_group_"),
    )
    assert [piece for piece in pieces if piece not in text] == []
    assert re.search(r"\b4 +OPT +logreg__opt_4 +1 +1\.5 KiB +1\.0 KiB", text)
    assert re.search(r"logreg__mask +constant +bool\[3\] +5120 +3 B", text)
    assert re.search(r"view +aten\.t\.default +2 +logreg\.py:7", text)


def test_what_ranks_have_whole_and_gather_is_told(tmp_path: Path) -> None:
    plan = ('parallel.tensor_parallel="weight"', "parallel.n_chips=2", 'parallel.tensor_plan={ tokens = "colwise" }')
    done = compile_from_options(example_options("char_gpt", tmp_path, *plan))
    facts = facts_of(done.path)
    training, evaluation, _ = facts.graphs
    part_bytes = 4 * 32 * 32 * 4 // 2  # of an activation
    assert [(row.operator, row.values, row.received_bytes) for row in training.gathered] == [
        ("aten.native_layer_norm.default", 5, 5 * part_bytes),
        ("aten.native_layer_norm_backward.default", 1, part_bytes),
    ]
    assert [(row.operator, row.values) for row in evaluation.gathered] == [("aten.native_layer_norm.default", 5)]
    text = printed(inspection(facts, everything=False))
    assert re.search(r"whole along tp +27 of 28 parameters, 103\.5 KiB: blocks\.0\.mlp\.0\.weight, ", text)
    assert re.search(r"aten\.native_layer_norm\.default +tp +5 +40\.0 KiB +blocks\.0\.norm1, ", text)
    compiled = "\n".join(map(printed, compilation_report(done, details=True)))
    assert "whole along tp" in compiled
    assert f"digest {done.digest}" in compiled
    assert re.search(r"partition into sections +[0-9.]+ m?s", compiled)


def test_stages_show_where_a_tied_parameter_is_updated(tmp_path: Path) -> None:
    facts = facts_of(in_stages("char_gpt", tmp_path))
    assert [stage.tied for stage in facts.stages] == [{}, {"chargpt__tokens__weight": 0}]
    said = "rank 1 updates chargpt__tokens__weight, whose gradient rank 0 sends once a step"
    assert said in printed(inspection(facts, everything=False))


def test_text_from_a_file_is_neither_markup_nor_control() -> None:
    text = printed(options_table("options", {"model": "[red]x[/red]\x1b[2J", "list": ["[bold]"]}))
    assert "[red]x[/red]\\x1b[2J" in text
    assert '["[bold]"]' in text
    assert "\x1b" not in text
