"""`sambasim report`, as typed."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import sambasim
from sambasim import pef
from sambasim.cli.report import report_command
from sambasim.errors import ArtifactError, OptionError
from tests.pef.samples import write_sample
from tests.report.test_page import MEASURED, PREDICTED, Page, a_run


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PEF that is found by its name, and a run of it, seen from the folder they lie in."""
    monkeypatch.chdir(tmp_path)
    folder = Path("out/logreg")
    folder.mkdir(parents=True)
    made = write_sample(folder)
    _write_run("run.jsonl", pef.read(made).digest)
    _write_run("other.jsonl", "f" * 64)
    return made


def _write_run(name: str, digest: str) -> None:
    run = a_run()
    assert run.summary is not None
    summary = run.summary.model_copy(update={"pef_digest": digest})
    records = (*run.steps, *run.evaluations, summary)
    Path(name).write_text("".join(record.model_dump_json() + "\n" for record in records), encoding="utf-8")


def page(*arguments: str) -> Page:
    target = Path("pages/page.html")
    result = CliRunner().invoke(report_command, [*arguments, "--html", str(target)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == f"{target} written: open it in a browser\n"
    return Page(target.read_text(encoding="utf-8"))


def refused(*arguments: str) -> OptionError:
    result = CliRunner().invoke(report_command, arguments)
    assert isinstance(result.exception, OptionError)
    return result.exception


def test_of_a_pef_a_run_or_both(path: Path) -> None:
    assert page("logreg").ids("section") == PREDICTED
    assert page(str(path), "--arch", "sn40", "--replicas", "8,1,64").ids("section") == PREDICTED
    assert page("run.jsonl").ids("section") == MEASURED
    assert set(page("logreg", "--run", "run.jsonl").ids("section")) == {*PREDICTED, *MEASURED}


@pytest.mark.parametrize("number", ["-1", "9" * 400, "9" * 5000, "NaN"])
def test_a_run_with_an_impossible_count(number: str) -> None:
    *steps, summary = Path("run.jsonl").read_text(encoding="utf-8").splitlines()
    summary = re.sub(r'"peer":\d+', f'"peer":{number}', summary)
    Path("run.jsonl").write_text("\n".join((*steps, summary, "")), encoding="utf-8")
    for arguments in (["run.jsonl"], ["logreg", "--run", "run.jsonl"]):
        result = CliRunner().invoke(report_command, [*arguments, "--html", "page.html"])
        assert isinstance(result.exception, ArtifactError)
        assert "a line is not what sambasim run --metrics writes" in result.exception.what


def test_an_empty_run() -> None:
    Path("run.jsonl").write_text("", encoding="utf-8")
    result = CliRunner().invoke(report_command, ["run.jsonl", "--html", "page.html"])
    assert isinstance(result.exception, ArtifactError)
    assert result.exception.what == "run.jsonl has no records"


def test_a_run_of_another_pef() -> None:
    error = refused("logreg", "--run", "other.jsonl", "--html", "page.html")
    assert "other.jsonl is a run of another PEF, ffffffffffff; this one is " in error.what


def test_a_run_has_no_device() -> None:
    error = refused("run.jsonl", "--html", "page.html", "--arch", "sn30", "--replicas", "2")
    assert error.what == "run.jsonl is a run, and --arch, --replicas is for predictions about a PEF"
    assert error.remedy == "sambasim report NAME.pef --run run.jsonl --html page.html"


def test_it_is_not_written_over_what_it_is_made_of(path: Path) -> None:
    before = path.read_bytes()
    assert "would overwrite" in refused("logreg", "--html", str(path)).what
    assert "would overwrite" in refused("run.jsonl", "--html", "run.jsonl").what
    assert "would overwrite" in refused("logreg", "--run", "run.jsonl", "--html", "run.jsonl").what
    assert path.read_bytes() == before


def test_tables_as_sambatune_names_them(path: Path) -> None:
    result = CliRunner().invoke(report_command, [str(path), "--tables", "tables"], catch_exceptions=False)
    assert result.exit_code == 0
    summary = json.loads(Path("tables/summary.json").read_text(encoding="utf-8"))
    lines = Path("tables/section_report.csv").read_text(encoding="utf-8").splitlines()
    assert summary["predicted"]["predicted_section_count"] == len(lines) - 1 > 1


def test_it_must_be_said_what_to_write(path: Path) -> None:
    error = refused(str(path))
    assert error.what == "no output is named"
    assert error.remedy == f"sambasim report {path} --html FILE.html"


def test_a_model_has_a_page_and_no_run(path: Path) -> None:
    config = str(Path(sambasim.__file__).parent / "quickstart" / "digits.toml")
    assert page(config, "--replicas", "1,2").ids("section") == PREDICTED
    error = refused(config, "--html", "page.html", "--run", "run.jsonl")
    assert error.what == f"run.jsonl is a run of a PEF, and {config} is a model"
