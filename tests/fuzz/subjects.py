"""What is mutated: valid files of each kind, how they are changed, and what reads them."""

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from pydantic_core import to_json
from safetensors.torch import save_file

from sambasim import pef
from sambasim.data.arrays import open_file
from sambasim.errors import UserError
from sambasim.hardware.spec import load_cluster, load_device, shipped_text
from sambasim.options.compile import compile_options
from sambasim.pef.files import join
from sambasim.runtime.values.memory import fitting, read_tensors
from tests.faults.command import sambasim
from tests.fuzz.mutate import edit_json, mutate_bytes, mutate_json, to_bytes
from tests.pef.damage import pack, unpack
from tests.pef.samples import sample_program
from tests.support.deepspeed_configs import CONFIGS
from tests.support.mpi import ROOT

Mutation = Callable[[Random, bytes], bytes]
_DENSE = (
    "compile tests.zoo.own_data:WideAndDeep --pef-name dense --set loss.name=mse -b 4 --set data.source=synthetic "
    """--set 'data.inputs={items="int64[8] < 40", target="float32[]"}'"""
)
_GPT = (
    "compile examples.char_gpt:CharGPT --set 'model.args={layers=1, width=8, heads=2, length=6}' -b 4 "
    "--set data.source=examples.char_gpt:text --set data.args.length=6 --set optimizer.name=adamw"
)
_TRAIN = "run --pef dense --threads 1 --no-evaluate --steps 2"


@dataclass(frozen=True, slots=True)
class Subject:
    """A kind of file, or of a folder of files.

    `make_samples` makes valid ones in a folder and returns them. `mutations` change one file. `readers` take the path:
    each returns, or raises SambasimError; the first one that raises ends the mutant.
    """

    suffix: str
    make_samples: Callable[[Path], Sequence[Path]]
    mutations: Sequence[Mutation]
    readers: Sequence[Callable[[Path], object]]


def command(words: str) -> Callable[[Path], object]:
    """A reader that is a command line, in which FILE stands for the path."""

    def run(path: Path) -> None:
        outcome = sambasim([str(path) if word == "FILE" else word for word in words.split()], path.parent)
        text = outcome.stderr
        assert "Traceback" not in text, text[-1500:]
        assert outcome.returncode in (0, 2, 3), text[-1500:]
        if outcome.returncode:
            assert text.count("\nerror[") + text.startswith("error[") == 1, text[-1500:]
            assert len(text) < 4000, f"{len(text)} characters: {text[:1500]}"
            assert all(line.isprintable() for line in text.splitlines()), ascii(text[-1500:])
            raise UserError(text[:1000])

    return run


def _is_not_executed(path: Path) -> None:
    with pytest.raises(UserError):
        command("run --pef FILE --steps 1 --threads 1")(path)


def _typed(folder: Path, *lines: str) -> None:
    for line in lines:
        outcome = sambasim(shlex.split(line), folder)
        assert outcome.returncode == 0, outcome.stderr


def _pefs(folder: Path) -> Sequence[Path]:
    _typed(
        folder,
        f"{_DENSE} --set optimizer.name=sgd",
        f"{_DENSE} --inference --pef-name guess",
        f"{_GPT} --data-parallel --o1 --pef-name gpt",
    )
    made = {name: folder / "out" / name / f"{name}.pef" for name in ("dense", "guess", "gpt")}
    several = folder / "several.pef"
    join(several, {name: made[name] for name in ("dense", "guess")})
    return [*made.values(), several]


def _edit_manifest(random: Random, data: bytes) -> bytes:
    fields, weights = unpack(data)
    if random.random() < 0.5:  # one graph alone, or the symbols, so that nodes are changed often
        part = random.choice(["training", "evaluation", "symbols"])
        program = random.choice([*fields["graphs"].values()])["program"]
        program[part] = mutate_json(random, program[part])
    else:
        fields = mutate_json(random, fields)
    return pack(to_bytes(fields), weights)


def _edit_header(random: Random, data: bytes) -> bytes:
    """The header of a safetensors file, its length right or wrong."""
    length = int.from_bytes(data[:8], "little")
    text = to_bytes(mutate_json(random, json.loads(data[8 : 8 + length])))
    claimed = random.choice([len(text), len(text), length, 1 << 40])
    return claimed.to_bytes(8, "little") + text + data[8 + length :]


def _edit_weights(random: Random, data: bytes) -> bytes:
    fields, weights = unpack(data)
    weights = _edit_header(random, weights)
    return pack(to_bytes(fields | {"weights_sha256": hashlib.sha256(weights).hexdigest()}), weights)


def _checkpoints(folder: Path) -> Sequence[Path]:
    trained = f"{_TRAIN} --checkpoint-dir saved --emulate-replicas 2"
    _typed(folder, f"{_DENSE} --set optimizer.name=adamw --data-parallel", trained)
    return list((folder / "saved").glob("step-*"))


def sealed(fields: Any) -> Any:
    """With the digest that `fields` have now."""
    if isinstance(fields, dict):
        fields["digest"] = ""
        with suppress(ValueError):  # it nests too deeply, or holds text that is not Unicode
            fields["digest"] = hashlib.sha256(to_json(fields)).hexdigest()
    return fields


def _arrays(folder: Path) -> Sequence[Path]:
    np.savez(folder / "stored.npz", x=np.zeros((5, 3), np.float32), y=np.arange(5))
    np.savez_compressed(folder / "compressed.npz", x=np.zeros((500, 3)), y=np.arange(500))
    return [folder / "stored.npz", folder / "compressed.npz"]


def _tensors(folder: Path) -> Sequence[Path]:
    save_file({"lin_layer.weight": torch.zeros(2, 3), "steps": torch.tensor(3)}, folder / "tensors.safetensors")
    save_file({"x": torch.zeros(5, 3), "y": torch.arange(5)}, folder / "samples.safetensors")
    return [folder / "tensors.safetensors", folder / "samples.safetensors"]


def _written(folder: Path, suffix: str, *texts: str) -> Sequence[Path]:
    paths = [folder / f"{index}{suffix}" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def _tables(folder: Path) -> Sequence[Path]:
    shipped = [shipped_text("devices/sn30.toml"), shipped_text("clusters/sn30-8.toml")]
    return _written(folder, ".toml", (ROOT / "configs" / "char_gpt.toml").read_text(), *shipped)


def _edit_line(random: Random, data: bytes) -> bytes:
    """Another value in a line of a TOML file."""
    lines = data.splitlines()
    index = random.randrange(len(lines))
    value = random.choice([b'"x"', b"-1", b"1e400", b"[" * 3000, b"{", b"nan", b'"\\u001b[2K"', b"1979-05-27"])
    lines[index] = lines[index].partition(b"=")[0] + b"=" + value
    return b"\n".join(lines)


def _deepspeed_configs(folder: Path) -> Sequence[Path]:
    plain = ("CIFAR", "BLOOM", "OneCycle", "bfloat16 as it was", "instruction tuning, ZeRO-3 with offload")
    return _written(folder, ".json", *(json.dumps(json.loads(CONFIGS[name])) for name in plain))


def _records(folder: Path) -> Sequence[Path]:
    _typed(folder, f"{_DENSE} --set optimizer.name=sgd", f"{_TRAIN} --metrics run.jsonl")
    return [folder / "run.jsonl"]


def _edit_record(random: Random, data: bytes) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    edited = mutate_json(random, lines)
    return b"\n".join(map(to_bytes, edited if isinstance(edited, list) else [edited]))


def _samples_of(path: Path) -> None:
    dataset = open_file(path, None)
    dataset.__getitems__(range(min(len(dataset), 3)))


SUBJECTS: dict[str, Subject] = {
    "pef": Subject(
        ".pef", _pefs, (_edit_manifest, _edit_manifest, _edit_manifest, _edit_manifest, _edit_weights, mutate_bytes),
        (
            pef.read, lambda path: [tensor.sum() for tensor in pef.map_weights(path).values()], pef.check,
            command("verify FILE"), command("inspect FILE --all"), command("inspect FILE --json"),
            command("simulate FILE --replicas 1,4"), command("tilestat FILE"),
            command("report FILE --html page.html"), _is_not_executed,
        ),
    ),
    "checkpoint": Subject(
        "", _checkpoints, (edit_json(sealed), edit_json(sealed), _edit_header, mutate_bytes),
        (command("compare FILE FILE"),),
    ),
    "arrays": Subject(".npz", _arrays, (mutate_bytes,), (_samples_of,)),
    "tensors": Subject(
        ".safetensors", _tensors, (_edit_header, mutate_bytes),
        (_samples_of, lambda path: fitting(read_tensors(path, ""), sample_program(), "it")),
    ),
    "toml": Subject(
        ".toml", _tables, (_edit_line, mutate_bytes),
        (
            lambda path: compile_options(path, None, [], {}),
            lambda path: load_device.__wrapped__(str(path)),
            lambda path: getattr(load_cluster, "__wrapped__", load_cluster)(str(path)),
        ),
    ),
    "deepspeed": Subject(
        ".json", _deepspeed_configs, (edit_json(), edit_json(), mutate_bytes),
        (lambda path: compile_options(None, None, [], {"data_parallel": True, "world_size": 2, "deepspeed": path}),),
    ),
    "records": Subject(
        ".jsonl", _records, (_edit_record, _edit_record, mutate_bytes), (command("report FILE --html page.html"),)
    ),
}  # fmt: skip
