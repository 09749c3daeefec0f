"""What is written is read back; every kind of damage is refused, with the file and a remedy."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from sambasim.errors import CheckpointError, MachineError, OptionError
from sambasim.runtime.checkpoint.content import MAX_MANIFEST_BYTES, Checkpoint
from sambasim.runtime.checkpoint.folder import LOCK_FILE, MANIFEST_FILE, claim
from sambasim.runtime.machine.communicator import single_rank
from tests.runtime.checkpoint import samples
from tests.runtime.checkpoint.samples import SHARD, Fields, change_bytes, change_fields, flip_a_bit, write_sample

ALONE = single_rank("here")
Damage = Callable[[Path], object]


def fields(change: Callable[[Fields], object]) -> Damage:
    return lambda path: change_fields(path, change)


def in_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: change_bytes(path, name, change)


def _piped(path: Path) -> None:
    (path / MANIFEST_FILE).unlink()
    os.mkfifo(path / MANIFEST_FILE)


def _other_header(path: Path, before: bytes, after: bytes) -> None:
    """Change the header of the shard, and state the digest of the changed file."""
    change_bytes(path, SHARD, lambda data: data.replace(before, after))
    sha256 = hashlib.sha256((path / SHARD).read_bytes()).hexdigest()
    change_fields(path, lambda found: found["shards"][SHARD].update(sha256=sha256))


def tensor(**changed: object) -> Damage:
    return fields(lambda found: found["tensors"]["net__bias"]["type"].update(changed))


def cut(*parts: int) -> Damage:
    cuts = [{"axis": "tp", "dim": 0, "parts": number} for number in parts]
    return fields(lambda found: found["tensors"]["net__bias"].update(cuts=cuts))


CASES: dict[str, tuple[Damage, str]] = {
    "no manifest": (lambda path: (path / MANIFEST_FILE).unlink(), "checkpoint.json: it is not there"),
    "no shard": (lambda path: (path / SHARD).unlink(), f"{SHARD}: it is not there"),
    "a manifest that is a pipe": (_piped, "not a regular file"),
    "a huge manifest": (in_file(MANIFEST_FILE, lambda data: data + b" " * MAX_MANIFEST_BYTES), "larger than"),
    "a manifest cut short": (in_file(MANIFEST_FILE, lambda data: data[:-20]), "Invalid JSON"),
    "another format": (fields(lambda found: found.update(format="zip")), 'its key "format" is not'),
    "another version": (fields(lambda found: found.update(version="3.9")), "a checkpoint of format 3.9"),
    "a changed step": (in_file(MANIFEST_FILE, lambda data: data.replace(b'"step":50', b'"step":51')), "digest differs"),
    "a key twice": (
        in_file(MANIFEST_FILE, lambda data: data.replace(b'"step":50', b'"step":50,"step":50')),
        "step is given twice in one table",
    ),
    "an unknown key": (fields(lambda found: found.update(code="import os")), "code: Extra inputs"),
    "too many skipped steps": (fields(lambda found: found["progress"].update(skipped_steps=51)), "51 steps skipped"),
    "too many samples": (fields(lambda found: found["position"].update(used=10**6)), "1000000 samples used"),
    "a shard elsewhere": (fields(lambda found: found["shards"].update({f"../{SHARD}": found["shards"][SHARD]})), ".."),
    "an unknown tensor": (fields(lambda found: found["tensors"].pop("net__bias")), "net__bias[0:10] is no piece"),
    "a third replica": (fields(lambda found: found["run"].update(replicas=3)), "elements of replica 2/net__steps"),
    "too many chips": (fields(lambda found: found["run"].update(chips=16_384)), "2 replicas of 16384 chips"),
    "a dtype that is none": (tensor(dtype="load"), "tensors.net__bias is load[10]"),
    "another dtype": (tensor(dtype="int32"), "does not fit"),
    "a shorter tensor": (tensor(shape=[9]), "10 of 9 elements"),
    "too many dimensions": (tensor(shape=[1] * 65), "tensors.net__bias is float32[1, 1, "),
    "no size": (tensor(shape=[-1]), "tensors.net__bias.type.shape.0 = -1: Input should be greater"),
    "too many parts": (cut(1 << 40), f"cuts.0.parts = {1 << 40}: Input"),
    "another name": (
        fields(lambda found: found["tensors"]["net__bias"].update(name="gone")),
        "tensors.net__bias is called gone",
    ),
    "too many cuts": (cut(2, 5), "tensors.net__bias is float32[10], with 2 cuts"),
    "a gap": (lambda path: _other_header(path, b"t[64:100]", b"t[65:101]"), "element 64 is next"),
    "no piece": (lambda path: _other_header(path, b"net__bias[0:10]", b"net__bias{0:10}"), "is no piece of a tensor"),
    "a shard cut short": (in_file(SHARD, lambda data: data[:-1]), f"{SHARD}: it has "),
    "a header that claims more": (in_file(SHARD, lambda data: b"\xff" * 8 + data[8:]), "not a safetensors file"),
    "a bit of a tensor": (flip_a_bit, f"{SHARD}: its content is not what was written"),
}


@pytest.mark.parametrize("name", CASES)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    damage, caught = CASES[name]
    path = write_sample(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(path)
    assert caught in refused.value.what
    assert refused.value.is_damage == ("version" not in name)
    assert path.name in refused.value.what
    assert str(path) in str(refused.value.where)
    assert refused.value.remedy
    assert len(refused.value.what) < 400


def test_what_was_written_is_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_sample(tmp_path))
    found = dict(checkpoint.tensors())
    right = samples.tensors()
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], value) for name, value in right.items())
    part = torch.empty(20)
    checkpoint.read("net__weight", 60, part)  # from both of its pieces
    assert torch.equal(part, right["net__weight"][60:80])
    assert (checkpoint.manifest.position.step, checkpoint.manifest.progress.loss_first) == (50, float("inf"))


def test_other_tools_read_the_shards_and_the_same_state_has_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_sample(tmp_path / name) for name in ("a", "b"))
    loaded = load_file(first / SHARD)
    assert all(torch.equal(loaded[name], piece) for name, piece in samples.pieces({}).items())
    os.umask(umask := os.umask(0))
    for name in (MANIFEST_FILE, SHARD):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(MachineError, match="Input/output error"):
        write_sample(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_claim_cleans_up_after_runs_that_died(tmp_path: Path) -> None:
    complete = write_sample(tmp_path, 20)
    (tmp_path / ".step-0000000030.0123456789abcdef" / "step-0000000030").mkdir(parents=True)
    held = claim(tmp_path, ALONE)
    assert held is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_FILE, complete.name]
    held.close()


def test_a_folder_that_cannot_be_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = OSError(errno.EACCES, os.strerror(errno.EACCES))  # which POSIX allows instead of EAGAIN
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.lockf", Mock(side_effect=locked))
        with pytest.raises(OptionError, match="another run is writing its checkpoints into"):
            claim(tmp_path, ALONE)
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(MachineError, match=r"no checkpoint can be written into .*: Is a directory") as caught:
        claim(tmp_path, ALONE)
    assert caught.value.where == str(tmp_path / LOCK_FILE)
