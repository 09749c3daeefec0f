"""`sambasim inspect` and `sambasim verify`, as typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sambasim.cli.inspect import inspect_command, verify_command
from sambasim.errors import OptionError, PefError
from tests.pef import damage
from tests.pef.samples import write_sample


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PEF that is found by its name, seen from the folder it lies in."""
    monkeypatch.chdir(tmp_path)
    folder = Path("out/logreg")
    folder.mkdir(parents=True)
    return write_sample(folder)


def inspect(*arguments: str) -> str:
    result = CliRunner().invoke(inspect_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def refused(*arguments: str) -> OptionError:
    result = CliRunner().invoke(inspect_command, arguments)
    assert isinstance(result.exception, OptionError)
    return result.exception


def test_tables_and_json_by_name_and_by_path(path: Path) -> None:
    output = inspect("logreg")
    assert "training: sections (6)" in output
    assert inspect(str(path)) == output
    output = inspect("logreg", "--json")
    assert output.count("\n") == 1
    fields = json.loads(output)
    assert (fields["name"], fields["world_size"], fields["pef"]) == ("logreg", 2, str(path))
    assert [section["kind"] for section in fields["graphs"][0]["sections"]][:2] == ["FWD", "BCKWD"]


@pytest.mark.usefixtures("path")
def test_one_section() -> None:
    output = inspect("logreg", "--section", "1")
    assert "training: section 1" in output
    assert "  %d_t = aten.t.default(%d_addmm) : float32[2, 4]  # logreg.py:7\n" in output
    assert "aten.addmm" not in output
    fields = json.loads(inspect("logreg", "--section", "1", "--json"))
    assert (fields["graph"], fields["kind"], fields["operators"]) == ("training", "BCKWD", len(fields["nodes"]))


@pytest.mark.usefixtures("path")
def test_graphs() -> None:
    output = inspect("logreg", "--graph")
    assert output.startswith("graph training(\n")
    assert "\n\ngraph evaluation(\n" in output
    assert output.endswith("  %linear -> logits : float32[4, 2]\n")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("section", ["6", "-1"])
def test_a_section_that_is_not_there(section: str) -> None:
    error = refused("logreg", "--section", section)
    assert error.what == f"there is no section {section}: the graph training of logreg has 6 sections"
    assert error.remedy == "sambasim inspect out/logreg/logreg.pef"


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("other", [("--json",), ("--section", "1")])
def test_graph_stands_alone(other: tuple[str, ...]) -> None:
    assert f"--graph and {other[0]} cannot be given together" in refused("logreg", "--graph", *other).what


def test_verify_reads_every_byte(path: Path) -> None:
    result = CliRunner().invoke(verify_command, ["logreg"])
    assert (result.exit_code, result.exception) == (0, None)
    assert result.output.startswith("out/logreg/logreg.pef is valid: it follows the rules of the PEF format")
    damage.change_weights(path, lambda data: data[:-1] + b"\0")
    assert "training: sections (6)" in inspect("logreg")
    result = CliRunner().invoke(verify_command, ["logreg"])
    assert isinstance(result.exception, PefError)
    assert "breaks rule 12 of the PEF format (content)" in result.exception.what
    assert result.output == ""
