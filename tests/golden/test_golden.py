"""Golden text for structure: what the compiler makes of known models, line by line.

`make golden` writes the files anew; read the difference before you commit it.
"""

import json
import zipfile
from pathlib import Path

import pytest

from sambasim.ir.graph import format_graph
from sambasim.pef import read
from tests.support.compiled import compile_from_options
from tests.support.examples import example_options

FOLDER = Path(__file__).parent


def _compare(name: str, text: str, request: pytest.FixtureRequest) -> None:
    file = FOLDER / name
    if request.config.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"there is no {name}: make golden"
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("level", ["o0", "o3"])
@pytest.mark.parametrize("data_parallel", [False, True])
def test_graph_of_an_example(level: str, data_parallel: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    override = f"compile.opt_level={level}"
    options = example_options("logistic_regression", tmp_path, override, data_parallel=data_parallel)
    compiled = compile_from_options(options)
    graph = compiled.program.training
    assert graph is not None
    text = format_graph(graph, compiled.program.symbols)
    _compare(f"logistic_regression-{level}{'-data_parallel' * data_parallel}.graph.txt", text, request)


@pytest.mark.parametrize("example", ["digits", "char_gpt", "lstm_classifier", "resnet"])
def test_section_plan_of_an_example(example: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = compile_from_options(example_options(example, tmp_path)).program
    assert program.training is not None
    lines = [
        f"{section.index:3} {section.kind:8} {section.stop - section.start:3} operators  {section.name}"
        for section in program.training.sections
    ]
    lines += [
        f"{group.name}: {group.numel} × {group.dtype}: "
        + ", ".join(f"{member.gradient}@{member.start}" for member in group.members)
        for group in program.groups
    ]
    _compare(f"{example}.sections.txt", "\n".join(lines) + "\n", request)


def test_manifest_of_a_logistic_regression(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Without what another torch or another folder changes: digests, versions and absolute paths."""
    path = compile_from_options(example_options("logistic_regression", tmp_path)).path
    assert read(path).program.name == "logistic_regression"
    manifest = json.loads(zipfile.ZipFile(path).read("pef.json"))
    del manifest["weights_sha256"], manifest["compile_options"], manifest["graphs"]["logistic_regression"]["metadata"]
    _compare("logistic_regression.manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n", request)
