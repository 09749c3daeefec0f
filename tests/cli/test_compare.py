"""`sambasim compare`, as typed: kinds, exit codes, and one JSON document."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sambasim.errors import WeightsError
from sambasim.pef import write
from tests.cli.typed import invoked, refused
from tests.pef.samples import sample_document, sample_weights, write_sample
from tests.report.test_page import a_run as metrics_of_a_run
from tests.runtime.checkpoint import samples as checkpoints
from tests.support.recordings import VALUES, a_run, a_step, write_recording


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of each kind, `a` and a `b` that differs."""
    monkeypatch.chdir(tmp_path)
    other = VALUES[1]._replace(digest="ff" * 8, norm=2.5)
    write_recording(Path("a"), {0: [a_step(1), a_step(2)]})
    write_recording(Path("b"), {0: [a_step(1), a_step(2, changed={"net__relu": other})]}, a_run(sync="device"))
    save_file({"w": torch.zeros(3)}, "a.safetensors")
    save_file({"w": torch.tensor([0.0, 1.0, 0.0])}, "b.safetensors")
    Path("out/logreg").mkdir(parents=True)
    write_sample(Path("out/logreg"))
    write(Path("b.pef"), replace(sample_document(), training_defaults={"epochs": 4}), sample_weights())
    steps = metrics_of_a_run().steps
    for name, loss in (("a", 0.5), ("b", 0.75)):
        lines = [*steps[:-1], steps[-1].model_copy(update={"loss": loss})]
        Path(f"{name}.jsonl").write_text("".join(line.model_dump_json() + "\n" for line in lines), encoding="utf-8")
    return tmp_path


compare = partial(invoked, "compare")


PAIRS = {
    "runs": ("a", "b", "they first differ at step 2, replica 0, section 0 FWD net__a: value net__relu; norms 2 and"),
    "weights": ("a.safetensors", "b.safetensors", "they first differ in w: 1 of 3 elements, by 1 at most"),
    "pefs": ("logreg", "b.pef", "they differ in the options: epochs 3 and 4"),
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
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple[str, ...], what: str) -> None:
    error = refused("compare", *arguments)
    assert error.what.startswith(what)
    assert error.exit_code == 2


def test_a_damaged_file_of_weights_is_told() -> None:
    Path("b.safetensors").write_bytes(b"no")
    error = refused("compare", "a.safetensors", "b.safetensors")
    assert isinstance(error, WeightsError)
    assert error.what.startswith("b.safetensors is not a safetensors file: ")


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
