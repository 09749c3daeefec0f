"""PEFs as a subject: what a hostile author does to them, digests and checksums mended, and the ways in."""

import io
import json
import shlex
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from sambasim import pef
from sambasim.ir.operators import OPERATORS
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.pef.layout import WEIGHT_KINDS, weights_layout
from tests.faults.command import sambasim
from tests.fuzz.json_edits import NUMBERS, TEXTS, edit
from tests.fuzz.nets import COMPILATIONS
from tests.fuzz.subject import MIB, Mutation, Subject, Way
from tests.pef.damage import Fields, pack, seal

FORBIDDEN = (
    "aten.from_file.default", "aten.save.default", "aten.as_strided.default", "aten.set_.source_Storage",
    "aten.resize_.default", "aten.copy_.default", "prim.device.default", "aten._local_scalar_dense.default",
    "profiler._record_function_enter_new.default", "sambasim.linear.default", "sambasim.sgd", "aten", "..",
    "os.system.x",
)  # fmt: skip
_LARGEST_MENDED = 1 << 22


def make_samples(folder: Path) -> Sequence[Path]:
    """Compiles the models of `nets`."""
    paths = []
    for name, words in COMPILATIONS.items():
        model, data, *rest = shlex.split(words)
        sources = [f"tests.fuzz.nets:{model}", "--set", f"data.source=tests.fuzz.nets:{data}"]
        outcome = sambasim(["compile", *sources, "-b", "4", "--pef-name", name, *rest], folder)
        assert outcome.exit_code == 0, outcome.stderr
        paths.append(folder / "out" / name / f"{name}.pef")
    return paths


def take_apart(data: bytes) -> tuple[Fields, bytes]:
    """The manifest's fields, and the member with the weights, of a sound PEF."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return json.loads(archive.read("pef.json")), archive.read("weights.safetensors")


def put_together(fields: Fields, weights: bytes) -> bytes:
    """A PEF whose digests and checksums are right, whatever it holds; as far as JSON can say it."""
    with suppress(KeyError, TypeError):  # an edit has put something else there
        fields["weights"] = fields["weights"] | {"size_bytes": len(weights), "sha256": sha256(weights).hexdigest()}
    try:
        return pack(seal(fields), weights)
    except (ValueError, TypeError, RecursionError, AttributeError):
        # What Python's own JSON cannot say is said by hand: a program that is nothing but brackets.
        return pack(b'{"format":"sambasim-pef","program":' + b"[" * 3000 + b"]" * 3000 + b',"version":"1.0"}', weights)


def _with(random: Random, samples: Sequence[bytes], change: Callable[[Random, Fields], object]) -> bytes:
    fields, weights = take_apart(random.choice(samples))
    change(random, fields)
    if random.random() < 0.5:
        weights = _mended(fields, weights)
    return put_together(fields, weights)


def _mended(fields: Fields, weights: bytes) -> bytes:
    """The weights that the symbols ask for now, with the old bytes as far as they go."""
    try:
        symbols = [
            Symbol(s["name"], SymbolKind(s["kind"]), TensorType(s["dtype"], tuple(s["shape"])))
            for s in fields["program"]["symbols"]
        ]
        wanted = sum(s.type.size_bytes for s in symbols if s.kind in WEIGHT_KINDS)
        layout = weights_layout(symbols) if 0 <= wanted <= _LARGEST_MENDED else None
    except Exception:  # whatever the edits have made of the symbols
        return weights
    if layout is None or layout.header == weights[: len(layout.header)]:
        return weights
    data = weights[8 + int.from_bytes(weights[:8], "little") :]
    return layout.header + data[: layout.data_bytes].ljust(layout.data_bytes, b"\0")


def edited(random: Random, samples: Sequence[bytes]) -> bytes:
    """Any edits of `pef.json`."""

    def change(random: Random, fields: Fields) -> None:
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            edit(random, fields)

    return _with(random, samples, change)


def edited_program(random: Random, samples: Sequence[bytes]) -> bytes:
    """Edits of one part of the program: symbols, groups, sections, …"""

    def change(random: Random, fields: Fields) -> None:
        part = random.choice([part for part in fields["program"].values() if isinstance(part, list | dict) and part])
        for _ in range(random.choice([1, 1, 2])):
            edit(random, part)

    return _with(random, samples, change)


def _graphs(fields: Fields) -> list[Any]:
    return [graph for key in ("training", "evaluation", "single") if (graph := fields["program"][key])]


def edited_node(random: Random, samples: Sequence[bytes]) -> bytes:
    """Another operator, other arguments, other results of one node."""

    def change(random: Random, fields: Fields) -> None:
        graph = random.choice(_graphs(fields))
        for _ in range(random.choice([1, 1, 2])):
            node = random.choice(graph["nodes"])
            match random.randrange(6):
                case 0:
                    node[1] = random.choice([*OPERATORS])
                case 1:
                    node[1] = random.choice(FORBIDDEN)
                case 2 | 3:
                    _change_arguments(random, node[2], graph, fields)
                case 4:
                    edit(random, node[2:5])
                case 5:
                    other = random.choice(graph["nodes"])
                    node[1:4] = json.loads(json.dumps(other[1:4]))

    return _with(random, samples, change)


def _change_arguments(random: Random, arguments: list[Any], graph: Any, fields: Fields) -> None:
    """A reference becomes another one, a number another number."""
    names = [name for name, *_ in graph["values"]] + [symbol["name"] for symbol in fields["program"]["symbols"]]
    for index, value in enumerate(arguments):
        if random.random() < 0.4:
            continue
        if isinstance(value, str) and value.startswith("%"):
            arguments[index] = f"%{random.choice(names)}"
        elif isinstance(value, list) and value:
            _change_arguments(random, value, graph, fields)
        elif isinstance(value, bool):
            arguments[index] = not value
        elif isinstance(value, int | float):
            arguments[index] = random.choice([*NUMBERS[:20], value + 1, -value])


def edited_types(random: Random, samples: Sequence[bytes]) -> bytes:
    """A value, or a symbol, of another type: stated sizes that are a lie."""

    def change(random: Random, fields: Fields) -> None:
        graph = random.choice(_graphs(fields))
        rows = [*graph["values"]]
        for _ in range(random.choice([1, 1, 3])):
            row = random.choice(rows)
            if random.random() < 0.3:
                row[1] = random.choice(["float64", "int64", "bool", "uint8", "bfloat16", "complex64", "quint8"])
            elif row[2] and random.random() < 0.7:
                row[2][random.randrange(len(row[2]))] = random.choice([0, 1, 2, 3, 1 << 20, 1 << 40, 1 << 46])
            else:
                row[2] = random.choice([[], [0], [1], [1 << 46], [1 << 23, 1 << 23], [1] * 64, [1] * 65, [0, 1 << 46]])

    return _with(random, samples, change)


def edited_options(random: Random, samples: Sequence[bytes]) -> bytes:
    """What a run takes from the PEF's options, data source and defaults."""

    def change(random: Random, fields: Fields) -> None:
        match random.randrange(6):
            case 0:
                fields["data_source"]["source"] = random.choice(["canary:f", "canary.py:f", "/canary.npz", "os:system"])
            case 1:
                fields["compile_options"]["arch"] = random.choice(["/canary.toml", "canary.toml", "sn10", *TEXTS])
            case 2:
                fields["compile_options"]["num_tiles"] = random.choice([*NUMBERS, None, "1"])
            case 3:
                edit(random, fields["training_defaults"])
            case 4:
                edit(random, fields["data_source"])
            case 5:
                edit(random, fields["compile_options"])

    return _with(random, samples, change)


def spliced_members(random: Random, samples: Sequence[bytes]) -> bytes:
    """The manifest of one PEF and the weights of another."""
    fields, _ = take_apart(random.choice(samples))
    _, weights = take_apart(random.choice(samples))
    return put_together(fields, weights)


def spliced_parts(random: Random, samples: Sequence[bytes]) -> bytes:
    """Parts of the program of another PEF."""
    fields, weights = take_apart(random.choice(samples))
    other, _ = take_apart(random.choice(samples))
    for key in random.sample(sorted(fields["program"]), random.choice([1, 1, 2, 4])):
        fields["program"][key] = other["program"][key]
    return put_together(fields, weights)


def other_weights(random: Random, samples: Sequence[bytes]) -> bytes:
    """Sound, but for what the tensors hold: numbers that no training gives, indices far outside."""
    fields, weights = take_apart(random.choice(samples))
    begin = 8 + int.from_bytes(weights[:8], "little")
    count = len(weights) - begin
    fill = random.choice([b"\xff", b"\x7f", b"\0", b"\x80", bytes([random.randrange(256)]), random.randbytes(64)])
    return put_together(fields, weights[:begin] + (fill * (count // len(fill) + 1))[:count])


def edited_header(random: Random, samples: Sequence[bytes]) -> bytes:
    """The safetensors header."""
    fields, weights = take_apart(random.choice(samples))
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    edit(random, header)
    try:
        text = json.dumps(header).encode()
    except (RecursionError, UnicodeEncodeError, ValueError):
        text = b"[" * length
    length = random.choice([len(text), len(text), length, 0, (1 << 64) - 1])
    return put_together(fields, length.to_bytes(8, "little") + text + weights[8 + length :])


def edited_text(random: Random, samples: Sequence[bytes]) -> bytes:
    """The bytes of `pef.json`, sealed by nothing but the archive's checksum."""
    fields, weights = take_apart(random.choice(samples))
    text = seal(fields)
    place = random.randrange(len(text))
    new = random.choice([b"[" * 100_000, b"NaN", b"1e999", b"9" * 5000, b'"\xff"', b"{", b"}", b'"\\ud800"', b"\0"])
    return pack(text[:place] + new + text[place + random.choice([0, 1, len(new)]) :], weights)


def zip_tricks(random: Random, samples: Sequence[bytes]) -> bytes:
    """What archives can be made to do: bombs, names that climb, members there twice, compressed or encrypted."""
    fields, weights = take_apart(random.choice(samples))
    names = random.choice(
        [
            ("pef.json", "weights.safetensors", "extra"),
            ("pef.json", "pef.json"),
            ("../pef.json", "weights.safetensors"),
            ("/etc/canary", "weights.safetensors"),
            ("weights.safetensors", "pef.json"),
            ("pef.json", "weights.safetensors"),
        ]
    )
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", random.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    ) as made:
        for name in names:
            member = {"pef.json": seal(fields), "weights.safetensors": weights}.get(name, b"\0" * MIB)
            made.writestr(zipfile.ZipInfo(name), member, made.compression)
    data = bytearray(file.getvalue())
    directory = data.find(b"PK\1\2")
    if random.random() < 0.6:  # one field of the directory or of a local header
        place = random.choice([0, directory, data.rfind(b"PK\1\2"), len(data) - 22]) + random.randrange(4, 46)
        data[place % len(data)] = random.randrange(256)
    return bytes(data)


MUTATIONS: Sequence[Mutation] = (
    edited, edited, edited_program, edited_program,
    edited_node, edited_node, edited_node, edited_types, edited_options,
    spliced_members, spliced_parts, other_weights, edited_header, edited_text, zip_tricks,
)  # fmt: skip


def command(*words: str) -> Callable[[Path], None]:
    """A way in by a command line, in which PEF stands for the file: exit code and form are those of a told error."""

    def enter(path: Path) -> None:
        outcome = sambasim([str(path) if word == "PEF" else word for word in words], path.parent)
        told = outcome.stderr
        assert "Traceback" not in told, told[-1500:]
        assert outcome.exit_code in (0, 2, 3), told[-1500:]
        if outcome.exit_code:
            assert told.count("\nerror[") + told.startswith("error[") == 1, told[-1500:]
            assert len(told) < 4000, f"{len(told)} characters: {told[:1500]}"
            assert all(line.isprintable() for line in told.splitlines()), ascii(told[-1500:])

    return enter


def _map(path: Path) -> None:
    for tensor in pef.map_weights(path).values():
        tensor.sum()


PEF = Subject(
    name="pef",
    suffix=".pef",
    make_samples=make_samples,
    mutations=MUTATIONS,
    ways=(
        Way("peek", lambda path: void(pef.peek(path))),
        Way("read", lambda path: void(pef.read(path))),
        Way("map_weights", _map),
        Way("check", lambda path: void(pef.check(path))),
        Way("verify", command("verify", "PEF")),
        Way("inspect", command("inspect", "PEF", "--all"), if_sound=True),
        Way("inspect as JSON", command("inspect", "PEF", "--json"), if_sound=True),
        Way("tilestat", command("tilestat", "PEF"), if_sound=True),
        Way("simulate", command("simulate", "PEF", "--replicas", "1,4"), seconds=30, if_sound=True),
        Way("report", command("report", "PEF", "--html", "page.html"), seconds=30, if_sound=True),
        Way("run unasked", command("run", "--pef", "PEF", "--steps", "1", "--threads", "1"), if_sound=True),
    ),
)


def void(value: object) -> None:
    """Nobody wants what a way in gives."""
