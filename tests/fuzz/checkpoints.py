"""Checkpoints, which are folders: packed into one file to be changed, and unpacked where they are read.

8 bytes of length, checkpoint.json, 8 bytes of length, a shard, …
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.fuzz.json_edits import edit
from tests.fuzz.pefs import command
from tests.fuzz.subject import MIB, Subject, Way

from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.checkpoint.reader import check, read
from tests.faults.command import sambasim
from tests.runtime.checkpoint.samples import sealed
from tests.support.mpi import mpirun, run_job

_COMPILE = (
    "compile tests.fuzz.nets:Dense --data-parallel --set data.source=tests.fuzz.nets:rows "
    "--set loss.name=cross_entropy --set optimizer.name=adamw -b 4"
)
_STEPS = 4
_RUN = "run --pef dense --threads 1 --no-evaluate --data synthetic --set data.samples=64"


def pack(files: Sequence[bytes]) -> bytes:
    """One file of several."""
    return b"".join(len(data).to_bytes(8, "little") + data for data in files)


def parts(data: bytes) -> list[bytes]:
    """The files again; of what is damaged, something."""
    found, at = [], 0
    while at < len(data):
        length = min(int.from_bytes(data[at : at + 8], "little"), len(data))
        found.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def unpack(path: Path) -> Path:
    """The checkpoint that is packed in the file `path`, in a folder beside it."""
    place = path.parent / "saved" / "step-0000000002"
    place.mkdir(parents=True, exist_ok=True)
    for left in place.iterdir():  # of the mutant before
        left.unlink()
    manifest, *shards = parts(path.read_bytes()) or [b""]
    (place / MANIFEST_FILE).write_bytes(manifest)
    for index, shard in enumerate(shards[:16]):
        (place / f"shard-{index:05}-of-{len(shards):05}.safetensors").write_bytes(shard)
    return place


def _samples(folder: Path) -> Sequence[Path]:
    """Of two replicas that are ranks, of two that are emulated, and of one alone."""
    _compile(folder)
    flags = f"{_RUN} --steps 2 --checkpoint-dir"
    runs = {
        "ranks": [mpirun(), "-np", "2", *_typed(f"{flags} ranks --reduce-on-rdu")],
        "emulated": _typed(f"{flags} emulated --emulate-replicas 2"),
        "alone": _typed(f"{flags} alone"),
    }
    made = []
    for name, words in runs.items():
        run_job(words, cwd=folder, timeout=120).check()
        (place,) = (folder / name).glob("step-*")
        files = [(place / MANIFEST_FILE).read_bytes(), *(path.read_bytes() for path in sorted(place.glob("shard-*")))]
        made.append(folder / f"{name}.checkpoint")
        made[-1].write_bytes(pack(files))
    return made


def _typed(words: str) -> list[str]:
    return [sys.executable, "-m", "sambasim", *words.split()]


def _compile(folder: Path) -> None:
    outcome = sambasim(_COMPILE.split(), folder)
    assert outcome.exit_code == 0, outcome.stderr


def edited_manifest(random: Random, samples: Sequence[bytes]) -> bytes:
    """Other values in checkpoint.json, with its digest mended."""
    manifest, *shards = parts(random.choice(samples))
    fields = json.loads(manifest)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        edit(random, fields)
    return pack([_sealed(fields), *shards])


def edited_shard(random: Random, samples: Sequence[bytes]) -> bytes:
    """Other bytes in a shard, often in its header, with size and digests mended."""
    manifest, *shards = parts(random.choice(samples))
    index = random.randrange(len(shards))
    data = bytearray(shards[index])
    for _ in range(random.choice([1, 1, 4, 32])):
        at = random.randrange(min(len(data), random.choice([16, 600, len(data)])))
        data[at] = random.randrange(256)
    if random.random() < 0.3:
        data = data[: random.randrange(len(data))] if random.random() < 0.5 else data + random.randbytes(64)
    shards[index] = bytes(data)
    return pack([_mended(json.loads(manifest), shards), *shards])


def edited_both(random: Random, samples: Sequence[bytes]) -> bytes:
    """Another manifest, whose sizes and digests are those of the shards."""
    manifest, *shards = parts(edited_manifest(random, samples))
    with suppress(ValueError, RecursionError):
        return pack([_mended(json.loads(manifest), shards), *shards])
    return pack([manifest, *shards])


def other_shards(random: Random, samples: Sequence[bytes]) -> bytes:
    """Shards of another checkpoint, in another order, too few or too many."""
    manifest, *shards = parts(random.choice(samples))
    _, *others = parts(random.choice(samples))
    pool = [*shards, *others, b""]
    chosen = [random.choice(pool) for _ in range(random.choice([0, 1, 2, 2, 3]))]
    return pack([_mended(json.loads(manifest), chosen), *chosen])


def _mended(fields: object, shards: Sequence[bytes]) -> bytes:
    """`fields` with the sizes and digests that the shards have, as far as it still has places for them."""
    stated = fields.get("shards") if isinstance(fields, dict) else None
    for one, shard in zip(stated.values() if isinstance(stated, dict) else (), shards, strict=False):
        if isinstance(one, dict):
            one.update(size_bytes=len(shard), sha256=hashlib.sha256(shard).hexdigest())
    return _sealed(fields)


def _sealed(fields: object) -> bytes:
    """JSON with the right digest, if it is a manifest."""
    try:
        return json.dumps(sealed(fields) if isinstance(fields, dict) else fields, default=str).encode(errors="replace")
    except RecursionError:
        return b"[" * 100_000


def _read(path: Path) -> None:
    read(unpack(path))


def _sum(path: Path) -> None:
    for _, tensor in check(unpack(path)).tensors():
        tensor.sum()


def _resume(path: Path) -> None:
    """Go on from it, by a PEF that is compiled where the first mutant of a process is read."""
    if not (path.parent / "out").exists():
        _compile(path.parent)
    where = str(unpack(path))
    words = (*_RUN.split(), "--steps", str(_STEPS), "--resume", where)
    command(*words)(path)
    command(*words, "--emulate-replicas", "2")(path)


CHECKPOINT = Subject(
    name="checkpoint",
    suffix=".checkpoint",
    make_samples=_samples,
    mutations=(edited_manifest, edited_manifest, edited_both, edited_shard, other_shards),
    ways=(
        Way("read", _read),
        Way("tensors", _sum),
        Way("resume", _resume, seconds=30, constant_bytes=512 * MIB),
        Way("compare", lambda path: command("compare", str(unpack(path)), str(unpack(path)))(path)),
    ),
)
