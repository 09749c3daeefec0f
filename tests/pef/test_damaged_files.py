"""Every way in which a PEF can be damaged that we could think of, and what a reader says of it."""

import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sambasim import pef
from sambasim.errors import PefError
from sambasim.pef.archive import CENTRAL, CENTRAL_MARK, END, LOCAL
from sambasim.pef.rules import RULES
from tests.pef import damage
from tests.pef.damage import Fields
from tests.pef.samples import sample_weights, write_sample

Damage = Callable[[Path], object]


def rezip(
    names: tuple[str, ...] = ("pef.json", "weights.safetensors"), method: int = zipfile.ZIP_STORED, comment: bytes = b""
) -> Damage:
    """Pack the members again with Python's zipfile."""

    def apply(path: Path) -> None:
        fields, weights = damage.unpack(path)
        contents = {"pef.json": damage.seal(fields), "weights.safetensors": weights}
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.comment = comment
            for name in names:
                archive.writestr(zipfile.ZipInfo(name), contents.get(name, b"hidden"), method)

    return apply


def central(member: int, offset: int, new: bytes) -> Damage:
    """Overwrite bytes of one entry of the central directory."""

    def apply(path: Path) -> None:
        data = path.read_bytes()
        place = data.find(CENTRAL_MARK)
        for _ in range(member):
            place = data.find(CENTRAL_MARK, place + 1)
        damage.patch(path, place + offset, new)

    return apply


def fields(change: Callable[[Fields], object]) -> Damage:
    return lambda path: damage.change_fields(path, change)


def program(change: Callable[[Fields], object]) -> Damage:
    return fields(lambda all_fields: change(all_fields["program"]))


def node(index: int, column: int, value: object) -> Damage:
    return program(lambda p: p["training"]["nodes"][index].__setitem__(column, value))


def header(change: Callable[[Fields], object]) -> Damage:
    return lambda path: damage.change_header(path, change)


def manifest(old: bytes, new: bytes) -> Damage:
    return lambda path: damage.change_manifest(path, lambda data: data.replace(old, new, 1))


def weights(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: damage.change_weights(path, change)


def rename(old: bytes, new: bytes) -> Damage:
    """Rename a member, in both places where the archive names it."""
    return lambda path: damage.replace_bytes(path, old, new, -1)


def nested(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def overlap(path: Path) -> None:
    """The second member claims to lie where the first does, sizes and all."""
    data = path.read_bytes()
    central(1, 42, b"\0\0\0\0")(path)
    assert path.read_bytes() != data


def gap(path: Path) -> None:
    """Eight bytes that belong to nobody, before the central directory."""
    data = path.read_bytes()
    count, size, begin = struct.unpack("<H2I", data[-12:-2])
    end = data[-END.size :][:10] + struct.pack("<H2I", count, size, begin + 8) + b"\0\0"
    path.write_bytes(data[:begin] + b"whatever" + data[begin : -END.size] + end)


def swap_members(path: Path) -> None:
    rezip(("weights.safetensors", "pef.json"))(path)


def large_without_record(path: Path) -> None:
    damage.patch(path, -6, b"\xff\xff\xff\xff")


SIZE_CENTRAL, CRC_CENTRAL, FLAGS_CENTRAL, METHOD_CENTRAL = 20, 16, 8, 10
BOTH_SIZES = struct.pack("<2I", 1 << 31, 1 << 31)

CASES: dict[str, tuple[Damage, int, str]] = {
    "missing": (Path.unlink, 1, "cannot be read: No such file"),
    "a folder": (directory, 1, "not a regular file"),
    "a pipe": (pipe, 1, "not a regular file"),
    "empty": (lambda p: p.write_bytes(b""), 2, "it is empty, so it is no PEF"),
    "text": (lambda p: p.write_text("hello"), 2, "begins with b'hell'"),
    "a pickle": (lambda p: p.write_bytes(b"\x80\x04."), 2, "so it is no PEF"),
    "only a zip mark": (lambda p: p.write_bytes(b"PK\3\4"), 2, "cut short"),
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:-40]), 2, "cut short"),
    "bytes added": (lambda p: p.write_bytes(p.read_bytes() + b"\n"), 2, "something was added"),
    "a script before it": (lambda p: p.write_bytes(b"#!/bin/sh\n" + p.read_bytes()), 2, "begins with b'#!/b'"),
    "a zip comment": (rezip(comment=b"hi"), 2, "does not end as a zip does"),
    "zip64 without its record": (large_without_record, 2, "no zip64 end record"),
    "damaged directory": (central(0, 0, b"XX"), 2, "central directory is damaged"),
    "directory cut": (lambda p: damage.patch(p, -10, struct.pack("<I", 60)), 2, "central directory is damaged"),
    "one member": (rezip(("pef.json",)), 3, "it has 1 members"),
    "three members": (rezip(("pef.json", "weights.safetensors", "run.py")), 3, "it has 3 members"),
    "a name in disguise": (
        rename(b"weights.safetensors", b"pef.json".ljust(19, b"\0")),
        3, "its members are pef.json and pef.j",
    ),
    "twice pef.json": (rezip(("pef.json", "pef.json")), 3, "both its members are called pef.json"),
    "members swapped": (swap_members, 3, "its members are weights.safetensors and pef.json"),
    "a path as a name": (rename(b"pef.json", b"../.json"), 3, "its members are ../.json"),
    "compressed": (rezip(method=zipfile.ZIP_DEFLATED), 4, "pef.json is compressed (zip method 8)"),
    "claims to be compressed": (central(1, METHOD_CENTRAL, b"\x08\0"), 4, "weights.safetensors is compressed"),
    "two sizes": (central(1, SIZE_CENTRAL, b"\1\0\0\0"), 4, "claims 1 stored bytes for"),
    "encrypted": (central(1, FLAGS_CENTRAL, b"\1\0"), 5, "weights.safetensors is encrypted"),
    "data descriptor": (central(0, FLAGS_CENTRAL, b"\x08\0"), 5, "has the zip flags 0x0008"),
    "overlapping members": (overlap, 6, "weights.safetensors is at byte 0, and must be at"),
    "weights of a lying size": (central(1, SIZE_CENTRAL, BOTH_SIZES), 6, "the central directory is at byte"),
    "a gap": (gap, 6, "members neither overlap nor leave gaps"),
    "directory beyond the file": (lambda p: damage.patch(p, -6, b"\0\0\0\x7f"), 6, "its directory claims bytes"),
    "another timestamp": (central(0, 12, b"\1\0"), 7, "the central directory is not the one"),
    "another permission": (central(1, 38, b"\xff\xff\xff\xff"), 7, "the central directory is not the one"),
    "local header disagrees": (lambda p: damage.patch(p, 18, b"\1\0\0\0"), 7, "the header of pef.json is not the one"),
    "not aligned": (lambda p: damage.replace_bytes(p, b"\x35\xd9", b"\x36\xd9"), 7, "header of weights.safetensors"),
    "a huge manifest": (central(0, SIZE_CENTRAL, BOTH_SIZES), 8, "it claims 2.0 GiB; at most 256.0 MiB are read"),
    "a flipped bit of the manifest": (lambda p: damage.patch(p, LOCAL.size + 20, b"!"), 9, "checksum of the archive"),
    "not JSON": (lambda p: damage.change_manifest(p, lambda d: d[:-1]), 10, "it is not strict JSON"),
    "NaN": (manifest(b'"epochs":3', b'"epochs":NaN'), 10, "NaN is not JSON"),
    "a number beyond doubles": (manifest(b'"epochs":3', b'"epochs":1e999'), 10, "it is not strict JSON"),
    "not UTF-8": (manifest(b"logreg", b"\xff\xfe"), 10, "it is not strict JSON"),
    "a lone surrogate": (manifest(b"LogReg", b"\\ud800"), 10, "it is not strict JSON"),
    "a number of 5,000 digits": (manifest(b'"epochs":3', b'"epochs":' + b"3" * 5000), 10, "it is not strict JSON"),
    "an array": (lambda p: damage.change_manifest(p, lambda d: b"[]"), 10, "not a JSON object"),
    "deeply nested": (lambda p: damage.change_manifest(p, lambda d: b"[" * 200_000), 10, "nested too deeply"),
    "another format": (fields(lambda f: f.update(format="onnx")), 11, "so this is no PEF"),
    "no format": (fields(lambda f: f.pop("format")), 11, "so this is no PEF"),
    "newer major version": (
        fields(lambda f: f.update(version="2.0", writer="sambasim 3.1")),
        12, "written by sambasim 3.1",
    ),
    "newer minor version": (fields(lambda f: f.update(version="1.9")), 12, "a PEF of format 1.9"),
    "older major version": (fields(lambda f: f.update(version="0.4")), 12, "reads format 1.0 to 1.0"),
    "no version": (fields(lambda f: f.pop("version")), 12, "its format version is 'None'"),
    "a hostile version": (fields(lambda f: f.update(version="9" * 50 + ".0")), 12, "which is no version"),
    "spaces": (manifest(b'"format":', b'"format": '), 13, "not canonical JSON"),
    "a key twice": (manifest(b'"format":', b'"format":"x","format":'), 13, "a key is there twice"),
    "edited by hand": (manifest(b'"epochs":3', b'"epochs":9'), 14, "it was changed after it was written"),
    "no digest": (manifest(b'"digest":', b'"dihest":'), 14, "it was changed after it was written"),
    "an unknown key": (fields(lambda f: f.update(hook="os.system")), 15, "hook: Extra inputs are not permitted"),
    "a missing key": (fields(lambda f: f.pop("metadata")), 15, "metadata: Field required"),
    "text for a number": (
        program(lambda p: p.update(batch_size="4")),
        15, "program.batch_size: Input should be a valid integer",
    ),
    "an unknown kind": (program(lambda p: p["symbols"][0].update(kind="code")), 15, "program.symbols.0.kind"),
    "an unknown optimizer": (
        program(lambda p: p["optimizers"][0].update(kind="lion")),
        15, "program.optimizers.0.kind",
    ),
    "a negative address": (program(lambda p: p["symbols"][0].update(offset=-512)), 15, "greater than or equal to 0"),
    "an astronomical shape": (
        program(lambda p: p["symbols"][0].update(shape=[2**63])),
        15, "program.symbols.0.shape.0",
    ),
    "a thousand dimensions": (program(lambda p: p["symbols"][0].update(shape=[1] * 1000)), 15, "at most 64 items"),
    "a name that is a path": (program(lambda p: p.update(name="../../etc/passwd")), 15, "program.name"),
    "metadata that is no text": (fields(lambda f: f.update(metadata={"a": 1})), 15, "metadata.a"),
    "a short node": (program(lambda p: p["training"]["nodes"].__setitem__(0, ["t"])), 16, "a node is an array of 7"),
    "an object as argument": (node(0, 2, [{"py": "os"}]), 16, "an object is no argument"),
    "an untagged text": (node(0, 2, ["weight"]), 16, "'weight' is no argument"),
    "an unknown constant": (node(0, 2, ["@module:os"]), 16, "'@module:os' is no argument"),
    "a nested argument": (node(0, 2, nested(40)), 16, "nested more than 32 levels"),
    "a source that is not there": (node(0, 6, 99), 16, "node t has no source line 99"),
    "a source before the first": (node(0, 6, -1), 16, "node t has no source line -1"),
    "True as a source": (node(0, 6, True), 16, "node t has no source line True"),
    "results that are numbers": (node(0, 4, [1]), 16, "the results of node t are [1]"),
    "a keyword without a value": (node(0, 3, [["dim"]]), 16, "a keyword argument of node t"),
    "an optimizer without a group": (node(11, 2, []), 16, "node sgd updates no group"),
    "a symbol twice": (program(lambda p: p["symbols"].append(p["symbols"][0])), 16, "the symbol x is there twice"),
    "a value twice": (
        program(lambda p: p["training"]["values"].append(["t", "bool", []])),
        16, "the value t is there twice",
    ),
    "a region twice": (program(lambda p: p["groups"][0]["regions"].append(["gradient", 0])), 16, "the region gradient"),
    "a group without optimizer": (program(lambda p: p["groups"][0].update(optimizer=7)), 16, "names optimizer 7 of 1"),
    "nested options": (
        fields(lambda f: f["data_source"].update(a=nested(60))),
        16, "data_source is nested more than 32",
    ),
    "a forbidden operator": (node(0, 1, "aten.from_file.default"), 17, "invariant 3: node t is aten.from_file.default"),
    "a dangling reference": (node(0, 2, ["%nowhere"]), 17, "invariant 2: node t reads nowhere"),
    "a name of two lines": (
        node(0, 2, ["%nowhere\n  try:\trm\x1b[2K"]),
        17, "invariant 2: node t reads nowhere\\n  try:\\trm\\x1b[2K",
    ),
    "an unknown dtype": (
        program(lambda p: p["symbols"][0].update(dtype="complex64")),
        17, "invariant 12: x has the unknown",
    ),
    "overlapping symbols": (
        program(lambda p: p["symbols"][1].update(offset=0)),
        17, "invariant 7: x and target overlap",
    ),
    "weights of another size": (fields(lambda f: f["weights"].update(size_bytes=64)), 18, "and 64 were written"),
    "weights cut short": (weights(lambda w: w[:-8]), 22, "its tensors take"),
    "weights cut in the header": (weights(lambda w: w[:100]), 19, "ends inside its header, after 100 bytes"),
    "no weights at all": (weights(lambda w: b""), 19, "ends inside its header, after 0 bytes"),
    "a lying header length": (
        weights(lambda w: b"\xff" * 8 + w[8:]),
        19, "its header claims 18446744073709551615 bytes",
    ),
    "a header that is no JSON": (weights(lambda w: w[:8] + b"?" + w[9:]), 19, "its header is not JSON"),
    "a header that nests": (weights(lambda w: w[:8] + b"[" * 400 + w[408:]), 19, "its header is not JSON"),
    "an array as header": (weights(lambda w: w[:8] + b"[]".ljust(len(w) - 128) + w[-120:]), 19, "its header is not"),
    "header with other spaces": (
        weights(lambda w: w.replace(b'"format":"pt"', b'"format":"pu"')),
        19, "not canonical JSON",
    ),
    "an entry that is no object": (header(lambda h: h.update(logreg__mask=1)), 19, "its entry logreg__mask is not"),
    "a tensor missing": (header(lambda h: h.pop("logreg__mask")), 20, "it has no tensor logreg__mask"),
    "a tensor renamed": (
        header(lambda h: h.update(a=h.pop("logreg__mask"))),
        20, "its tensor 'a' belongs to no symbol",
    ),
    "another dtype": (header(lambda h: h["logreg__mask"].update(dtype="U8")), 21, "logreg__mask is not bool[3]"),
    "another shape": (
        header(lambda h: h["logreg__lin_layer__weight"].update(shape=[3, 2])),
        21, "is not float32[2, 3]",
    ),
    "overlapping tensors": (header(lambda h: h["logreg__mask"].update(data_offsets=[0, 3])), 22, "must lie at bytes"),
    "bytes after the tensors": (weights(lambda w: w + b"\0"), 22, "and it holds"),
    "a function as a dtype": (
        node(0, 2, ["@dtype:load"]),
        24, "'load' is no dtype that a PEF may name; it may name bfloat16, bool, float16,",
    ),
    "a dtype of no tensor": (node(0, 3, [["dtype", "@dtype:complex64"]]), 24, "'complex64' is no dtype that"),
    "a dtype without a name": (node(0, 2, ["@dtype:"]), 24, "'' is no dtype that a PEF may name"),
    "a sparse layout": (node(0, 2, ["@layout:sparse_coo"]), 24, "no layout that a PEF may name; it may name strided"),
    "a function as a memory format": (
        node(0, 2, [["@memory_format:hub"]]),
        24, "it may name channels_last, channels_last_3d, contiguous_format, preserve_format",
    ),
    "another device": (node(0, 2, ["@device:cuda:0"]), 24, "'cuda:0' is no device that a PEF may name; it may"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", CASES)
def test_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage_it, number, text = CASES[name]
    damage_it(path)
    for reader in (pef.read, pef.map_weights, pef.check):
        with pytest.raises(PefError, match=re.escape(text)) as caught:
            reader(path)
        rule = RULES[number - 1]
        assert f"logreg.pef breaks rule {number} of the PEF format ({rule.name})" in caught.value.what
        assert str(path) in str(caught.value.where)
        assert caught.value.what.isprintable()
        assert caught.value.remedy
        assert caught.value.exit_code == 3


SEEN_ON_WRITING_IT_AGAIN = {"a number beyond doubles", "a lone surrogate"}
SEEN_BY_PEEK = [name for name, (_, number, _) in CASES.items() if number <= 12 and name not in SEEN_ON_WRITING_IT_AGAIN]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", SEEN_BY_PEEK)
def test_peek_refuses_what_cannot_be_opened(name: str, tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage_it, number, _ = CASES[name]
    damage_it(path)
    with pytest.raises(PefError, match=f"breaks rule {number} "):
        pef.peek(path)


@pytest.mark.parametrize("key", ["name", "batch_size"])
def test_peek_refuses_a_manifest_without_its_keys(key: str, tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage.change_fields(path, lambda f: f["program"].pop(key))
    with pytest.raises(PefError, match=f"its key {key} is not of type"):
        pef.peek(path)


def test_peek_refuses_a_manifest_without_metadata(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage.change_fields(path, lambda f: f.pop("metadata"))
    with pytest.raises(PefError, match="its key metadata is not of type dict"):
        pef.peek(path)


@pytest.mark.parametrize("name", ["", "a/b", "x\n  try:\trm", "x\x9b2K", "x\u2028y", "x" * 256])
def test_a_program_is_called_as_a_file_can_be(name: str, tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage.change_fields(path, lambda f: f["program"].update(name=name))
    for reader in (pef.peek, pef.read):
        with pytest.raises(PefError, match=r"breaks rule 15 .*name"):
            reader(path)


def test_a_flipped_bit_of_the_weights_is_found_where_they_are_checked_or_mapped(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    good, stored = damage.unpack(path)
    damage.change_weights(path, lambda data: data[:-1] + b"\0")
    pef.read(path)
    for reader in (pef.check, pef.map_weights):
        with pytest.raises(PefError, match=r"breaks rule 23 .*was written") as caught:
            reader(path)
        assert str(caught.value.where).startswith("weights.safetensors, ")
    assert set(pef.map_weights(path, check=False)) == set(sample_weights())
    path.write_bytes(damage.pack(damage.seal(good), stored))
    pef.check(path)
    pef.map_weights(path)


def test_a_wrong_checksum_of_the_weights_is_found_by_check(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    crc32 = path.read_bytes()[-END.size - CENTRAL.size - 19 :][CRC_CENTRAL : CRC_CENTRAL + 4]
    assert path.read_bytes().count(crc32) == 2
    damage.replace_bytes(path, crc32, b"\1\2\3\4", 2)
    pef.read(path)
    for reader in (pef.check, pef.map_weights):
        with pytest.raises(PefError, match=r"rule 9 .*checksum of the archive") as caught:
            reader(path)
        assert "weights.safetensors" in str(caught.value.where)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        with pytest.raises(PefError, match="breaks rule 2 "):
            pef.read(path)


def test_another_version_says_who_wrote_it_and_what_to_do(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    damage.change_fields(path, lambda f: f.update(version="2.1", writer="sambasim 7.0.2"))
    with pytest.raises(PefError) as caught:
        pef.read(path)
    assert "a PEF of format 2.1, written by sambasim 7.0.2; sambasim 0.1.0 reads format 1.0 to 1.0" in caught.value.what
    assert caught.value.remedy == "compile the model again with sambasim 0.1.0, or run it with sambasim 7.0.2"
    assert str(caught.value.where).startswith("pef.json, ")
