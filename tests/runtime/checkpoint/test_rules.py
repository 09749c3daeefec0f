"""Every rule of the format is broken here, and named by number, with the file and what to do."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sambasim.errors import CheckpointError, MachineError
from sambasim.runtime.checkpoint import rules
from sambasim.runtime.checkpoint.reader import check, read
from sambasim.runtime.checkpoint.rules import LARGEST_MANIFEST_BYTES, MANIFEST_FILE
from tests.runtime.checkpoint.samples import SHARD, Fields, change_bytes, change_fields, tensors, write_sample

README = Path(rules.__file__).with_name("README.md").read_text(encoding="utf-8")

Damage = Callable[[Path], object]


def fields(change: Callable[[Fields], object]) -> Damage:
    return lambda path: change_fields(path, change)


def in_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: change_bytes(path, name, change)


def _linked(path: Path) -> None:
    (path / SHARD).rename(path / "elsewhere")
    (path / SHARD).symlink_to(path / "elsewhere")


def _piped(path: Path) -> None:
    (path / MANIFEST_FILE).unlink()
    os.mkfifo(path / MANIFEST_FILE)


def _nested(found: Fields) -> None:
    inner: object = 1
    for _ in range(40):
        inner = [inner]
    found["options"]["data"]["deep"] = inner


CASES: dict[str, tuple[Damage, int]] = {
    "no manifest": (lambda path: (path / MANIFEST_FILE).unlink(), 1),
    "no shard": (lambda path: (path / SHARD).unlink(), 1),
    "a shard that is a link": (_linked, 1),
    "a manifest that is a pipe": (_piped, 1),
    "a huge manifest": (in_file(MANIFEST_FILE, lambda data: data + b" " * LARGEST_MANIFEST_BYTES), 2),
    "a manifest cut short": (in_file(MANIFEST_FILE, lambda data: data[:-20]), 3),
    "NaN in the manifest": (in_file(MANIFEST_FILE, lambda data: data.replace(b"2.5", b"NaN")), 3),
    "a list for a manifest": (in_file(MANIFEST_FILE, lambda data: b"[]"), 3),
    "deep arrays": (in_file(MANIFEST_FILE, lambda data: b"[" * 100_000), 3),
    "another format": (fields(lambda found: found.update(format="zip")), 4),
    "a later version": (fields(lambda found: found.update(version="1.9")), 5),
    "no version": (fields(lambda found: found.update(version=[1])), 5),
    "spaces in the manifest": (in_file(MANIFEST_FILE, lambda data: data.replace(b",", b", ", 1)), 6),
    "a step that was changed": (in_file(MANIFEST_FILE, lambda data: data.replace(b'"step":50', b'"step":51')), 7),
    "an unknown key": (fields(lambda found: found.update(code="import os")), 8),
    "a negative step": (fields(lambda found: found["position"].update(step=-1)), 8),
    "text for a number": (fields(lambda found: found["run"].update(threads="1")), 8),
    "more skipped steps than steps": (fields(lambda found: found["progress"].update(skipped_steps=51)), 8),
    "more samples than there are": (fields(lambda found: found["position"].update(used=10**6)), 8),
    "no shards": (fields(lambda found: found.update(shards=[])), 8),
    "deep options": (fields(_nested), 8),
    "a parameter that is there twice": (fields(lambda found: found["untrained"][0].update(name="net__bias")), 9),
    "a dtype that is none": (fields(lambda found: found["groups"][0].update(dtype="object")), 9),
    "members that overlap": (fields(lambda found: found["groups"][0]["members"][1].update(start=64)), 9),
    "a member that is too long": (fields(lambda found: found["groups"][0]["members"][1].update(numel=100)), 9),
    "a state called parameter": (fields(lambda found: found["groups"][0]["states"].append("parameter")), 9),
    "a ragged group": (fields(lambda found: found["groups"][0].update(numel=193)), 9),
    "elements that are missing": (fields(lambda found: found["shards"][0].update(spans=[[0, 128]])), 10),
    "elements that are not there": (fields(lambda found: found["shards"][0].update(spans=[[0, 256]])), 10),
    "a span that ends before it begins": (fields(lambda found: found["shards"][0].update(spans=[[128, 64]])), 10),
    "a span for no group": (fields(lambda found: found["shards"][0]["spans"].append([0, 0])), 10),
    "a replica without buffers": (fields(lambda found: found["shards"][0].update(replicas=[0])), 11),
    "a replica that is there twice": (fields(lambda found: found["shards"][0].update(replicas=[1, 1])), 11),
    "a shard cut short": (in_file(SHARD, lambda data: data[:-1]), 12),
    "a shard with more": (in_file(SHARD, lambda data: data + b"x"), 12),
    "a size that does not fit": (fields(lambda found: found["buffers"][0].update(shape=[10**12])), 12),
    "a header that claims more": (in_file(SHARD, lambda data: b"\xff" * 8 + data[8:]), 13),
    "a tensor of another name": (in_file(SHARD, lambda data: data.replace(b"net__frozen", b"net__frozeN")), 13),
    "a bit of a tensor": (in_file(SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1])), 14),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_named(name: str, tmp_path: Path) -> None:
    damage, number = CASES[name]
    path = write_sample(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError) as refused:
        check(path)
    rule = rules.RULES[number - 1]
    assert f"breaks rule {number} of the checkpoint format ({rule.name})" in str(refused.value)
    assert str(path) in str(refused.value.where)
    assert refused.value.remedy
    assert len(refused.value.what) < 400


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoint = check(write_sample(tmp_path))
    read_back = checkpoint.tensors(0)
    assert read_back.keys() == tensors().keys()
    assert all(torch.equal(read_back[name], tensor) for name, tensor in tensors().items())
    assert checkpoint.manifest.position.step == 50


def test_a_damaged_bit_is_seen_by_check_and_not_by_read(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    change_bytes(path, SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    read(path)
    with pytest.raises(CheckpointError):
        check(path)


def test_what_a_terminal_would_obey_is_shown_as_what_it_is(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    change_fields(path, lambda fields: fields["groups"][0].update(name="a\n\r\tb"))
    with pytest.raises(CheckpointError) as told:
        read(path)
    assert str(told.value.what).isprintable(), told.value.what


def test_nothing_is_written_that_nobody_would_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sambasim.runtime.checkpoint.writer.LARGEST_MANIFEST_BYTES", 100)
    with pytest.raises(MachineError, match=r"its checkpoint\.json would have more than 100 B"):
        write_sample(tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_tools_read_the_shards(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    loaded = load_file(write_sample(tmp_path) / SHARD)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())


def test_the_same_state_has_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_sample(tmp_path / name) for name in ("a", "b"))
    for name in (MANIFEST_FILE, SHARD):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert json.loads((first / MANIFEST_FILE).read_bytes())["format"] == "sambasim-checkpoint"


def test_readme_and_table_agree_and_every_rule_is_broken() -> None:
    stated = re.findall(r"^(\d+)\. \*\*(\w+)\*\*: ", README, re.MULTILINE)
    assert [(int(number), name) for number, name in stated] == [(rule.number, rule.name) for rule in rules.RULES]
    assert {number for _, number in CASES.values()} == {rule.number for rule in rules.RULES}
