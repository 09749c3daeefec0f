"""`sambasim inspect`, `verify`, `report` and `compare`, as typed."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sambasim
from sambasim import pef
from sambasim.errors import PefError, WeightsError
from sambasim.records.metrics import Line, json_line
from tests.cli.typed import invoked, printed, record, refused
from tests.pef import damage
from tests.pef.samples import sample_document, sample_weights, write_sample
from tests.report.test_page import MEASURED, PREDICTED, Page, a_run
from tests.runtime.checkpoint import samples as checkpoints
from tests.support import recordings
from tests.support.recordings import VALUES, a_step, write_recording


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PEF that is found by its name and a run of it, seen from the folder they lie in; of each kind that can be
    compared, an `a` and a `b` that differs."""
    monkeypatch.chdir(tmp_path)
    folder = Path("out/logreg")
    folder.mkdir(parents=True)
    made, run = write_sample(folder), a_run()
    pef.write(Path("b.pef"), replace(sample_document(), training_defaults={"epochs": 4}), sample_weights())
    assert run.summary is not None
    for name, digest in (("run", pef.read(made).digest), ("other", "f" * 64)):
        _write(name, *run.steps, *run.evaluations, run.summary.model_copy(update={"pef_digest": digest}))
    for name, loss in (("a", 0.5), ("b", 0.75)):
        _write(name, *run.steps[:-1], replace(run.steps[-1], loss=loss), *run.evaluations, run.summary)
    other = VALUES[1]._replace(digest="ff" * 8, norm=2.5)
    write_recording(Path("a"), {0: [a_step(1), a_step(2)]})
    changed = a_step(2, changed={"net__relu": other})
    write_recording(Path("b"), {0: [a_step(1), changed]}, recordings.a_run(sync="device"))
    save_file({"w": torch.zeros(3)}, "a.safetensors")
    save_file({"w": torch.tensor([0.0, 1.0, 0.0])}, "b.safetensors")
    for name, epoch in (("a", 1), ("b", 2)):
        torch.save({"epoch": epoch, "model": {"w": torch.ones(2)}, "rates": [0.1, math.nan]}, f"{name}.pt")
    return made


def _write(name: str, *records: Line) -> None:
    text = "".join(map(json_line, records))
    Path(f"{name}.jsonl").write_text(text, encoding="utf-8")


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


compare = partial(invoked, "compare")


PAIRS = {
    "runs": ("a", "b", "they first differ at step 2, replica 0, section 0 FWD net__a: value net__relu; norms 2 and"),
    "weights": ("a.safetensors", "b.safetensors", "they first differ in w: 1 of 3 elements, by 1 at most"),
    "pefs": ("logreg", "b.pef", "they differ in the options: epochs 3 and 4"),
    "files": ("a.pt", "b.pt", "1 tensor equal, but not: epoch 1 and 2"),
    "metrics": ("a.jsonl", "b.jsonl", "they first differ at step 8: loss 0.5 and 0.75, 3.3e-01 apart"),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_the_exit_code_and_the_first_line_say_whether_they_differ(kind: str) -> None:
    a, b, answer = PAIRS[kind]
    equal, apart, as_json = compare(a, a), compare(a, b), compare(a, b, "--json")
    assert (equal.exit_code, apart.exit_code, as_json.exit_code) == (0, 1, 1)
    assert equal.stdout.startswith("equal: ")
    assert apart.stdout.startswith(answer), apart.stdout
    assert len(as_json.stdout.splitlines()) == 1
    found = json.loads(as_json.stdout)
    assert (found["kind"], found["equal"]) == (kind, False)
    assert found["verdict"].startswith(answer)


def test_steps_choose_what_is_compared() -> None:
    assert compare("a", "b", "--steps", "1").exit_code == 0
    assert compare("a", "b", "--steps", "2-").exit_code == 1
    assert compare("a.jsonl", "b.jsonl", "--steps", "-7").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("a", "a.safetensors"), "a is the digests of a run, and a.safetensors is a file of weights: only"),
        (("a", "c"), "there is nothing called c: no folder, no file and no PEF"),
        (("logreg", "a"), "logreg is a PEF, and a is the digests of a run"),
        (("a.safetensors", "b.safetensors", "--steps", "3"), "--steps is for runs, and a.safetensors is a file"),
        (("a", "b", "--steps", "3-2"), '--steps "3-2": '),
        (("a.safetensors", "net.py"), "net.py is the source of a model, and only results are compared"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple[str, ...], what: str) -> None:
    Path("net.py").touch()
    error = refused("compare", *arguments)
    assert error.what.startswith(what)
    assert error.exit_code == 2


def test_a_damaged_file_of_weights_is_told() -> None:
    Path("b.safetensors").write_bytes(b"no")
    error = refused("compare", "a.safetensors", "b.safetensors", kind=WeightsError)
    assert error.what.startswith("b.safetensors is no safetensors file: ")
    torch.save(print, "b.pt")
    assert (
        "b.pt is no file of torch.save with tensors, numbers and texts alone" in refused("compare", "a.pt", "b.pt").what
    )


def test_two_checkpoints_differ_in_a_parameter_whichever_shards_it_lies_in() -> None:
    first, second = checkpoints.write_sample(Path("saved")), checkpoints.write_sample(Path("again"))
    equal = compare(str(first), str(second))
    assert (equal.exit_code, equal.stdout.splitlines()[0]) == (0, "equal: 9 tensors")
    third = checkpoints.write_sample(Path("other"), changed={"net__frozen": torch.zeros(3, 2)})
    apart = compare(str(first), str(third))
    assert apart.exit_code == 1
    assert apart.stdout.startswith("they first differ in net__frozen: 6 of 6 elements, by 8 at most")
    later = compare(str(first), str(checkpoints.write_sample(Path("saved"), 60)))
    assert later.exit_code == 1
    assert "step 50 and 60" in later.stdout.splitlines()[0]
