"""Damaged PEFs: each rule of the format is broken, and the error names it."""

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sambasim import pef
from sambasim.errors import PefError
from sambasim.pef.archive import Rule
from tests.pef import damage
from tests.pef.damage import Fields
from tests.pef.samples import sample_weights, write_sample

Damage = Callable[[Path], object]
README = (Path(pef.__file__).parent / "README.md").read_text()


def rezip(
    names: tuple[str, ...] = ("weights.safetensors", "pef.json"), method: int = zipfile.ZIP_STORED, comment: bytes = b""
) -> Damage:
    """Pack the members again with Python's zipfile."""

    def apply(path: Path) -> None:
        with zipfile.ZipFile(path) as old:
            contents = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w", method) as new:
            new.comment = comment
            for name in names:
                new.writestr(zipfile.ZipInfo(name), contents.get(name, b"hidden"), method)

    return apply


def central(member: int, offset: int, value: bytes) -> Damage:
    """Overwrite bytes of one entry of the central directory."""

    def apply(path: Path) -> None:
        data = bytearray(path.read_bytes())
        begin = [found.start() for found in re.finditer(b"PK\1\2", data)][member] + offset
        data[begin : begin + len(value)] = value
        path.write_bytes(data)

    return apply


def fields(change: Callable[[Fields], object]) -> Damage:
    return lambda path: damage.change_fields(path, change)


def program(change: Callable[[Fields], object]) -> Damage:
    return fields(lambda everything: change(everything["graphs"]["logreg"]["program"]))


def node(index: int, **changed: object) -> Damage:
    return program(lambda p: p["training"]["nodes"][index].update(changed))


def manifest(old: bytes, new: bytes) -> Damage:
    return lambda path: damage.change_members(path, manifest=lambda data: data.replace(old, new, 1))


def weights(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: damage.change_members(path, weights=change)


def header(change: Callable[[Fields], object]) -> Damage:
    """Change the safetensors header, which keeps its length."""

    def rewrite(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        change(entries)
        text = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return weights(rewrite)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def gap(path: Path) -> None:
    """Eight bytes that belong to no member, before the central directory."""
    data = path.read_bytes()
    count, size, begin = struct.unpack("<H2I", data[-12:-2])
    end = data[-22:-12] + struct.pack("<H2I", count, size, begin + 8) + b"\0\0"
    path.write_bytes(data[:begin] + b"whatever" + data[begin:-22] + end)


SIZES = 20  # where sizes are in an entry of the central directory

CASES: dict[str, tuple[Damage, int, str]] = {
    "missing": (Path.unlink, 1, "cannot be read: No such file"),
    "a pipe": (pipe, 1, "not a regular file"),
    "only a zip mark": (lambda p: p.write_bytes(b"PK\3\4"), 2, "cut short"),
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:-40]), 2, "cut short"),
    "bytes added": (lambda p: p.write_bytes(p.read_bytes() + b"\n"), 2, "something was added"),
    "damaged directory": (central(0, 0, b"XX"), 2, "damaged zip archive"),
    "one member": (rezip(("pef.json",)), 3, "it has 1 members ('pef.json')"),
    "members swapped": (rezip(("pef.json", "weights.safetensors")), 3, "it has 2 members ('pef.json', 'weights"),
    "compressed": (rezip(method=zipfile.ZIP_DEFLATED), 3, "weights.safetensors is compressed or encrypted"),
    "weights that are not aligned": (rezip(), 4, "do not follow one another, aligned"),
    "a lying size": (central(0, SIZES, struct.pack("<2I", 1 << 31, 1 << 31)), 4, "do not follow one another"),
    "a gap": (gap, 4, "do not follow one another"),
    "a huge manifest": (central(1, SIZES, struct.pack("<2I", 1 << 31, 1 << 31)), 5, "2.0 GiB, and at most 64.0 MiB"),
    "a flipped bit": (lambda p: damage.replace_bytes(p, b'"batch_size":4', b'"batch_size":8'), 6, "it is damaged"),
    "another format": (fields(lambda f: f.update(format="onnx")), 7, "so this is no PEF"),
    "a newer version": (
        fields(lambda f: f.update(version="9", writer="sambasim 3.1", news=1)),
        8, "it is a PEF of format 9, written by sambasim 3.1; sambasim 0.1.0 reads format 4",
    ),
    "a hostile version": (fields(lambda f: f.update(version="\x1b[2K" * 90)), 8, r"it is a PEF of format \x1b[2K"),
    "not JSON": (lambda p: damage.change_members(p, manifest=lambda d: d[:-1]), 9, "the whole: Invalid JSON"),
    "a number of 5,000 digits": (manifest(b'"epochs":3', b'"epochs":' + b"3" * 5000), 9, "the whole: Invalid JSON"),
    "a key twice": (manifest(b'"epochs":3', b'"epochs":3,"epoch\\u0073":3'), 9, "epochs is given twice in one table"),
    "deeply nested": (
        lambda p: damage.change_members(p, manifest=lambda d: b"[" * 200_000), 9, "recursion limit",
    ),
    "an unknown key": (fields(lambda f: f.update(hook="os.system")), 9, "hook: Unexpected keyword argument"),
    "text for a number": (program(lambda p: p.update(batch_size="4")), 9, "logreg.program.batch_size: Input should be"),
    "an unknown kind": (program(lambda p: p["symbols"]["x"].update(kind="code")), 9, "logreg.program.symbols.x.kind"),
    "a keyword without a value": (node(0, kwargs=[["dim"]]), 9, "logreg.program.training.nodes.0.kwargs.0"),
    "a name that is a path": (program(lambda p: p.update(name="../../etc/passwd")), 9, "program.name"),
    "a forbidden operator": (node(0, operator="aten.from_file.default"), 10, "invariant 3: node t is aten.from_file"),
    "a forbidden constant": (
        node(0, kwargs=[["dtype", {"kind": "dtype", "name": "load"}]]), 10, "invariant 3: node t takes the dtype load",
    ),
    "an astronomical shape": (
        program(lambda p: p["symbols"]["loss"]["type"].update(shape=[2**46, 9])), 10, "invariant 12: loss would need",
    ),
    "an extent out of bounds": (
        program(lambda p: p["symbols"]["loss"]["type"].update(shape=[2**63])), 9,
        "program.symbols.loss.type.shape.0 = 9223372036854775808: Input should be less than or equal to 703687",
    ),
    "a mesh of more ranks than any job": (
        program(lambda p: p["mesh"][0].update(size=10**7)), 9, "program.mesh.0.size = 10000000: Input should be less",
    ),
    "no graph": (fields(lambda f: f.update(graphs={})), 9, "graphs: Dictionary should have at least 1 item"),
    "a key missing": (fields(lambda f: f.pop("data_source")), 9, "data_source: Field required"),
    "a digest of itself": (fields(lambda f: f.update(digest="0" * 64)), 9, "digest: String should have at most 0 ch"),
    "an empty digest": (fields(lambda f: f.update(digest="")), 9, "digest: String should have at least 1 char"),
    "a graph alone by another name": (
        fields(lambda f: f.update(graphs={"x": f["graphs"]["logreg"]})), 9, "a graph alone is called as its program",
    ),
    "a dangling reference": (
        node(0, args=[{"name": "nowhere\n  try:\trm\x1b[2K"}]),
        10, "invariant 2: node t reads nowhere\\n  try:\\trm\\x1b[2K",
    ),
    "weights of its own": (
        fields(lambda f: f["graphs"]["logreg"].update(own=["logreg__mask"])), 10, "first graph has no weights of its",
    ),
    "weights cut short": (weights(lambda w: w[:-8]), 11, "bytes, and header and tensors take"),
    "a lying header length": (weights(lambda w: b"\xff" * 8 + w[8:]), 11, "its header is not the one"),
    "a header that nests": (weights(lambda w: w[:8] + b"[" * 400 + w[408:]), 11, "its header is not the one"),
    "a tensor missing": (header(lambda h: h.pop("logreg__mask")), 11, "its header is not the one"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", CASES)
def test_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage_it, number, text = CASES[name]
    damage_it(path)
    readers: list[Callable[[Path], object]] = [pef.read, pef.map_weights, pef.check]
    readers += [pef.digest_of] if number <= 6 else []
    for reader in readers:
        with pytest.raises(PefError, match=re.escape(text)) as caught:
            reader(path)
        rule = Rule(number)
        assert f"logreg.pef breaks rule {number} of the PEF format ({rule.name.lower()})" in caught.value.what
        assert caught.value.where == f"{rule.part}, {path}"
        assert caught.value.what.isprintable()
        assert caught.value.remedy
        assert caught.value.exit_code == 3


def test_a_flipped_bit_of_the_weights_is_found_where_they_are_checked_or_mapped(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage.change_members(path, weights=lambda data: data[:-1] + b"\0")
    pef.read(path)
    for reader in (pef.check, pef.map_weights):
        with pytest.raises(PefError, match=r"breaks rule 12 .*was written") as caught:
            reader(path)
        assert str(caught.value.where).startswith("weights.safetensors, ")
    assert set(pef.map_weights(path, check=False)) == set(sample_weights())


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        with pytest.raises(PefError, match="breaks rule 2 "):
            pef.read(path)


def test_a_million_bad_items_take_no_memory_for_errors(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage.change_members(path, manifest=lambda data: data.replace(b'"args":[', b'"args":[' + b"{}," * 1_000_000, 1))
    with pytest.raises(PefError, match=r"program\.training\.nodes\.0\.args\.0") as caught:
        pef.read(path)
    assert len(str(caught.value)) < 2000


def test_the_readme_numbers_the_rules_and_each_is_broken_here() -> None:
    found = re.findall(r"^(\d+)\. \*\*(\w+)\*\*:", README, re.MULTILINE)
    assert [(int(number), name) for number, name in found] == [(rule, rule.name.lower()) for rule in Rule]
    assert {number for _, number, _ in CASES.values()} | {Rule.CONTENT} == set(Rule)
