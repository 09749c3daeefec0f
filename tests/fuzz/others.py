"""Files beside the PEF that may be a stranger's: data, weights, configs, devices, records of a run."""

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save_file

from sambasim.data.files import open_file
from sambasim.hardware.spec import load_cluster, load_device, shipped_text
from sambasim.options.compile import compile_options
from sambasim.runtime.weights import load_weights
from tests.faults.command import sambasim
from tests.fuzz.json_edits import NUMBERS, TEXTS, edit
from tests.fuzz.pefs import command
from tests.fuzz.subject import MIB, Subject, Way
from tests.pef.samples import sample_program
from tests.support.mpi import ROOT


def _tensors(folder: Path) -> Sequence[Path]:
    path = folder / "tensors.safetensors"
    save_file({"lin_layer.weight": torch.zeros(2, 3), "lin_layer.bias": torch.ones(2), "steps": torch.tensor(3)}, path)
    save_file({"x": torch.zeros(5, 3), "y": torch.arange(5)}, folder / "samples.safetensors")
    return path, folder / "samples.safetensors"


def edited_header(random: Random, samples: Sequence[bytes]) -> bytes:
    """The header of a safetensors file, its length right or wrong."""
    data = random.choice(samples)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for _ in range(random.choice([1, 1, 2])):
        edit(random, header)
    try:
        text = json.dumps(header).encode()
    except (RecursionError, ValueError):
        text = b"[" * 100_000
    said = random.choice([len(text), len(text), len(text), length, 1 << 40])
    return said.to_bytes(8, "little") + text + data[8 + length :]


def _arrays(folder: Path) -> Sequence[Path]:
    paths = [folder / "stored.npz", folder / "compressed.npz"]
    np.savez(paths[0], x=np.zeros((5, 3), np.float32), y=np.arange(5))
    np.savez_compressed(paths[1], x=np.zeros((500, 3)), y=np.arange(500))
    return paths


def edited_arrays(random: Random, samples: Sequence[bytes]) -> bytes:
    """Members whose headers lie, or that are other than arrays, in an archive that is sound or is none."""
    with zipfile.ZipFile(io.BytesIO(random.choice(samples))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    data = members[name]
    headers: Sequence[tuple[bytes, bytes]] = (
        (b"(5, 3)", b"(5, 9999999999, 3)"), (b"(5,)", b"(-5,)"), (b"<f4", b"|O"), (b"<i8", b">i8"),
        (b"<f8", b"|S99999"), (b"False", b"__import__('os')"), (b"shape", b"shapes"),
        (b"500", b"900"), (b"descr", b"desc\xff"),
    )  # fmt: skip
    old, new = random.choice(headers)
    changed = data.replace(old, new)
    length = len(changed) - len(data)
    # The length of the header is mended, so that what it says is read.
    members[name] = (
        changed[:8] + ((int.from_bytes(data[8:10], "little") + length) % 65536).to_bytes(2, "little") + changed[10:]
    )
    if random.random() < 0.2:
        members[name] = random.choice([b"", b"\x80\x04cos\nsystem\n.", data[:20], bytes(4 * MIB)])
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
    ) as made:
        for one, content in members.items():
            made.writestr(zipfile.ZipInfo(one), content, made.compression)
    return file.getvalue()


def _texts(folder: Path) -> Sequence[Path]:
    texts = [
        (ROOT / "configs" / "char_gpt.toml").read_text(),
        shipped_text("devices/sn30.toml"),
        shipped_text("clusters/sn30-8.toml"),
    ]
    paths = [folder / f"{index}.toml" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def edited_lines(random: Random, samples: Sequence[bytes]) -> bytes:
    """Other values in some lines of a TOML file."""
    lines = random.choice(samples).decode().splitlines()
    for _ in range(random.choice([1, 1, 2, 5])):
        index = random.randrange(len(lines))
        name, equals, _ = lines[index].partition("=")
        text = random.choice(TEXTS).encode(errors="replace").decode()
        value = random.choice(
            [json.dumps(text), str(random.choice(NUMBERS)), "[" * 3000, "{", "true", "nan", "-inf", "1979-05-27"]
        )
        lines[index] = f"{name}= {value}" if equals else random.choice(["", text, "[" + "a." * 3000 + "b]", "[[x]]"])
    return "\n".join(lines).encode()


def _records(folder: Path) -> Sequence[Path]:
    words = "compile tests.fuzz.nets:Dense --set data.source=tests.fuzz.nets:rows --set loss.name=cross_entropy"
    for line in (f"{words} --set optimizer.name=sgd -b 4", "run --pef dense --metrics run.jsonl --threads 1"):
        outcome = sambasim(line.split(), folder)
        assert outcome.exit_code == 0, outcome.stderr
    return (folder / "run.jsonl",)


def edited_records(random: Random, samples: Sequence[bytes]) -> bytes:
    """Lines of JSON, one of them edited."""
    lines = [json.loads(line) for line in random.choice(samples).splitlines()]
    edit(random, lines)
    kept = []
    for line in lines:
        try:
            kept.append(json.dumps(line))
        except (RecursionError, ValueError):
            kept.append("[" * 100_000)
    return "\n".join([*kept, ""]).encode(errors="replace")


def _data(path: Path) -> None:
    dataset = open_file(path, None)
    dataset.__getitems__(range(min(len(dataset), 3)))


def _ways(*ways: tuple[str, Callable[[Path], object]]) -> Sequence[Way]:
    return tuple(Way(name, partial(_enter, enter)) for name, enter in ways)


def _enter(enter: Callable[[Path], object], path: Path) -> None:
    enter(path)


TENSORS = Subject(
    "tensors", ".safetensors", _tensors, (edited_header,),
    _ways(("data", _data), ("weights", lambda path: load_weights(path, sample_program()))),
)  # fmt: skip
ARRAYS = Subject("arrays", ".npz", _arrays, (edited_arrays,), _ways(("data", _data)))
TEXT = Subject(
    "toml", ".toml", _texts, (edited_lines,),
    _ways(
        ("config", lambda path: compile_options(path, None, [], {})),
        ("device", lambda path: load_device.__wrapped__(str(path))),
        ("cluster", lambda path: getattr(load_cluster, "__wrapped__", load_cluster)(str(path))),
    ),
)  # fmt: skip
RECORDS = Subject(
    "records", ".jsonl", _records, (edited_records,),
    (Way("report", command("report", "PEF", "--html", "page.html"), seconds=30),),
)  # fmt: skip
