"""`sambasim inspect`, `verify` and `report`, as typed."""

import json
import re
from pathlib import Path

import pytest

import sambasim
from sambasim import pef
from sambasim.errors import ArtifactError, PefError
from tests.cli.typed import invoked, printed, record, refused
from tests.pef import damage
from tests.pef.samples import write_sample
from tests.report.test_page import MEASURED, PREDICTED, Page, a_run


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PEF that is found by its name, and a run of it, seen from the folder they lie in."""
    monkeypatch.chdir(tmp_path)
    folder = Path("out/logreg")
    folder.mkdir(parents=True)
    made = write_sample(folder)
    run = a_run()
    assert run.summary is not None
    for name, digest in (("run.jsonl", pef.read(made).digest), ("other.jsonl", "f" * 64)):
        records = (*run.steps, *run.evaluations, run.summary.model_copy(update={"pef_digest": digest}))
        Path(name).write_text("".join(record.model_dump_json() + "\n" for record in records), encoding="utf-8")
    return made


def test_tables_and_json_by_name_and_by_path(path: Path) -> None:
    output = printed("inspect", "logreg")
    assert "training: sections (6)" in output
    assert printed("inspect", str(path)) == output
    fields = record("inspect", "logreg")
    assert (fields["name"], fields["world_size"], fields["pef"]) == ("logreg", 2, str(path))
    assert [section["kind"] for section in fields["graphs"][0]["sections"]][:2] == ["FWD", "BCKWD"]


def test_one_section_and_graphs() -> None:
    output = printed("inspect", "logreg", "--section", "1")
    assert "training: section 1" in output
    assert "  %d_t = aten.t.default(%d_addmm) : float32[2, 4]  # logreg.py:7\n" in output
    assert "aten.addmm" not in output
    fields = record("inspect", "logreg", "--section", "1")
    assert (fields["graph"], fields["kind"], fields["operators"]) == ("training", "BCKWD", len(fields["nodes"]))
    for section in ("6", "-1"):
        error = refused("inspect", "logreg", "--section", section)
        assert error.what == f"there is no section {section}: the graph training of logreg has 6 sections"
        assert error.remedy == "sambasim inspect out/logreg/logreg.pef"
    output = printed("inspect", "logreg", "--graph")
    assert output.startswith("graph training(\n")
    assert "\n\ngraph evaluation(\n" in output
    assert output.endswith("  %linear -> logits : float32[4, 2]\n")
    for other in (("--json",), ("--section", "1")):
        what = refused("inspect", "logreg", "--graph", *other).what
        assert f"--graph and {other[0]} cannot be given together" in what


def test_verify_reads_every_byte(path: Path) -> None:
    valid = "out/logreg/logreg.pef is valid: it follows the rules of the PEF format"
    assert printed("verify", "logreg").startswith(valid)
    damage.change_members(path, weights=lambda data: data[:-1] + b"\0")
    assert "training: sections (6)" in printed("inspect", "logreg")
    result = invoked("verify", "logreg")
    assert isinstance(result.exception, PefError)
    assert "breaks rule 12 of the PEF format (content)" in result.exception.what
    assert result.output == ""


def page(*arguments: str) -> list[str | None]:
    """The sections of a page."""
    target = Path("pages/page.html")
    assert printed("report", *arguments, "--html", str(target)) == f"{target} written: open it in a browser\n"
    return Page(target.read_text(encoding="utf-8")).ids("section")


def test_a_page_of_a_pef_a_run_or_both(path: Path) -> None:
    assert page("logreg") == PREDICTED
    assert page(str(path), "--arch", "sn40", "--replicas", "8,1,64") == PREDICTED
    assert page("run.jsonl") == MEASURED
    assert set(page("logreg", "--run", "run.jsonl")) == {*PREDICTED, *MEASURED}


@pytest.mark.parametrize("number", ["-1", "9" * 400, "9" * 5000, "NaN", None])
def test_a_run_with_an_impossible_count_or_no_records(number: str | None) -> None:
    *steps, summary = Path("run.jsonl").read_text(encoding="utf-8").splitlines()
    lines, what = [], "run.jsonl has no records"
    if number is not None:
        lines = [*steps, re.sub(r'"peer":\d+', f'"peer":{number}', summary), ""]
        what = "a line is not what sambasim run --metrics writes"
    Path("run.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for arguments in (["run.jsonl"], ["logreg", "--run", "run.jsonl"]):
        error = refused("report", *arguments, "--html", "page.html")
        assert isinstance(error, ArtifactError)
        assert what in error.what


def test_what_does_not_fit_a_page_which_is_not_written_over_what_it_is_made_of(path: Path) -> None:
    error = refused("report", "logreg", "--run", "other.jsonl", "--html", "page.html")
    assert "other.jsonl is a run of another PEF, ffffffffffff; this one is " in error.what
    error = refused("report", "run.jsonl", "--html", "page.html", "--arch", "sn30", "--replicas", "2")
    assert error.what == "run.jsonl is a run, and --arch, --replicas is for predictions about a PEF"
    assert error.remedy == "sambasim report NAME.pef --run run.jsonl --html page.html"
    error = refused("report", str(path))
    assert (error.what, error.remedy) == ("no output is named", f"sambasim report {path} --html FILE.html")
    for *arguments, target in (["logreg", str(path)], ["run.jsonl"] * 2, ["logreg", "--run", "run.jsonl", "run.jsonl"]):
        assert "would overwrite" in refused("report", *arguments, "--html", target).what
    assert pef.read(path).program.name == "logreg"


def test_tables_as_sambatune_names_them(path: Path) -> None:
    printed("report", str(path), "--tables", "tables")
    summary = json.loads(Path("tables/summary.json").read_text(encoding="utf-8"))
    lines = Path("tables/section_report.csv").read_text(encoding="utf-8").splitlines()
    assert summary["predicted"]["predicted_section_count"] == len(lines) - 1 > 1


def test_a_model_has_a_page_and_no_run() -> None:
    config = str(Path(sambasim.__file__).parent / "quickstart" / "digits.toml")
    assert page(config, "--replicas", "1,2") == PREDICTED
    error = refused("report", config, "--html", "page.html", "--run", "run.jsonl")
    assert error.what == f"run.jsonl is a run of a PEF, and {config} is a model"
