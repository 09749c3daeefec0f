"""A PEF that is written is read back, for any program; same input, same bytes; on an error nothing is left."""

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from sambasim import pef
from sambasim.errors import InternalError, InvariantError, MachineError, PefError, SambasimError, UserError
from sambasim.ir.graph import TORCH_CONSTANTS, Argument, ComplexNumber, Ref, TorchConstant
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Program
from sambasim.pef.archive import open_pef, weights_layout, write_archive
from sambasim.pef.digests import PARTS, part_digests
from sambasim.pef.document import PefDocument, manifest_json, parse
from tests.pef.samples import inference_program, sample_document, sample_program, sample_weights, write_sample


def with_argument(argument: Argument) -> Program:
    program = inference_program()
    node = replace(program.evaluation.nodes[0], args=(argument,))
    return replace(program, evaluation=replace(program.evaluation, nodes=(node,)))


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
names_of_torch = [(kind, name) for kind, names in TORCH_CONSTANTS.items() for name in sorted(names)]
constants = st.sampled_from([TorchConstant(kind, name) for kind, name in names_of_torch])
others = st.builds(Ref, st.text(max_size=6)) | st.builds(ComplexNumber, st.floats(), st.floats())
arguments = st.recursive(scalars | others | constants, lambda each: st.lists(each, max_size=3).map(tuple), max_leaves=6)


@given(arguments)
def test_arguments_come_back_with_their_types(argument: Argument) -> None:
    program = with_argument(argument)
    document = replace(sample_document().only(program=program), weights_sha256="0" * 64)
    found = parse(manifest_json(document)).program
    assert repr(found) == repr(program), "1 is not True, -0.0 is not 0.0, nan is nan"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "logreg.pef"
    written = pef.write(path, sample_document(), sample_weights())
    assert pef.read(path) == pef.check(path) == written
    assert replace(written, digest="", weights_sha256="") == sample_document()
    mapped, expected = pef.map_weights(path), sample_weights()
    assert {name: tensor.dtype for name, tensor in mapped.items()} == {n: t.dtype for n, t in expected.items()}
    assert all(torch.equal(mapped[name], tensor) for name, tensor in expected.items())
    assert torch.signbit(mapped["logreg__lin_layer__bias"])[1]


def test_a_pef_for_inference_and_who_wrote_it(tmp_path: Path) -> None:
    pef.write(tmp_path / "x.pef", sample_document().only(program=inference_program()), sample_weights())
    document = pef.read(tmp_path / "x.pef")
    assert document.program == inference_program()
    assert (document.version, document.writer) == ("4", "sambasim 0.1.0")
    assert pef.digest_of(tmp_path / "x.pef") == document.digest


def test_same_input_same_bytes(tmp_path: Path) -> None:
    first = write_sample(tmp_path).read_bytes()
    document = sample_document()
    shuffled = document.only(metadata=dict(reversed(list(document.metadata.items()))))
    pef.write(tmp_path / "other.pef", shuffled, dict(reversed(list(sample_weights().items()))))
    assert (tmp_path / "other.pef").read_bytes() == first


def test_ordinary_tools_can_read_it(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["weights.safetensors", "pef.json"]
        manifest = json.loads(archive.read("pef.json"))
        tensors = safetensors.torch.load(archive.read("weights.safetensors"))
    assert manifest["graphs"]["logreg"]["program"]["name"] == "logreg"
    assert all(torch.equal(tensors[name], tensor) for name, tensor in sample_weights().items())


def test_tensor_data_is_aligned_in_the_file(tmp_path: Path) -> None:
    for length in range(0, 70, 3):
        path = tmp_path / "x.pef"
        pef.write(path, sample_document().only(metadata={"pad": "x" * length}), sample_weights())
        with open_pef(path) as opened:
            begin = opened.weights_offset + len(weights_layout(sample_program().symbols.values()).header)
        assert begin % 64 == 0
        assert path.read_bytes()[begin : begin + 8] == (2**60).to_bytes(8, "little")


def test_a_document_that_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sample(tmp_path)
    document = pef.read(path)
    with monkeypatch.context() as patched:
        patched.setattr("sambasim.pef.files._parsed", None)
        assert pef.map_weights(path, document).keys() == sample_weights().keys()
    pef.write(path, sample_document().only(metadata={"other": "1"}), sample_weights())
    with pytest.raises(PefError, match="it was replaced since it was read"):
        pef.map_weights(path, document)


def test_mapped_weights_share_pages_and_never_change_the_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    before = path.read_bytes()
    weight = pef.map_weights(path)["logreg__lin_layer__weight"]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    low, high = (int(part, 16) for part in mapped[0].split()[0].split("-"))
    assert low <= weight.data_ptr() < high
    weight.fill_(7.0)
    assert path.read_bytes() == before
    assert pef.map_weights(path)["logreg__lin_layer__weight"][0, 1] == 1.0
    assert torch.equal(weight, torch.full((2, 3), 7.0))


def of_graph(**changes: Any) -> Mapping[str, Any]:
    """What changes in the sample, if its graph does."""
    return {"graphs": sample_document().only(**changes).graphs}


def of_program(**changes: Any) -> Mapping[str, Any]:
    return of_graph(program=replace(sample_program(), **changes))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"data_source": {"rate": float("nan")}}, UserError, "cannot be written as JSON: Out of range float values"),
        (of_graph(metadata={"path": "\ud800"}), UserError, "is not Unicode: "),
        (of_graph(metadata={"path": 1}), UserError, "cannot be written as JSON: "),
        (of_program(name="a/b"), InternalError, "'a/b' cannot be the name of a program"),
        (of_program(device_bytes=64), InvariantError, "invariant 7"),
    ],
)
def test_wrong_documents_are_refused(change: Any, error: type[SambasimError], text: str, tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        pef.write(tmp_path / "x.pef", replace(sample_document(), **change), sample_weights())
    assert text in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_sample(tmp_path).read_bytes()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "writestr", fail)
    with pytest.raises(KeyboardInterrupt):
        write_sample(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["logreg.pef"]
    assert (tmp_path / "logreg.pef").read_bytes() == old


def test_a_full_disk_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MachineError, match="No space left on device") as caught:
        write_sample(tmp_path)
    assert "choose another folder with --output-folder" in str(caught.value.remedy)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_more_than_four_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without so many bytes: 32-bit fields are made to hold less."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    path = tmp_path / "x.pef"
    with path.open("wb") as file:
        digests = write_archive(file, [memoryview(b"w" * 3000)], 3000, lambda sha256: sha256.encode())
    monkeypatch.undo()
    assert b"PK\6\6" in path.read_bytes()
    with open_pef(path) as opened:
        assert (opened.digest, opened.weights_sha256()) == digests
        assert opened.manifest.decode() == digests[1]
        assert (opened.weights_offset % 64, opened.weights_bytes) == (0, 3000)


def document(**changed: object) -> PefDocument:
    written = replace(sample_document(), weights_sha256="a" * 64, digest="b" * 64)
    return replace(written, **changed)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("graph", document(**of_program(batch_size=99))),
        ("weights", document(weights_sha256="c" * 64)),
        ("data_source", document(data_source={"target": "other.py:dataset"})),
        ("compile_options", document(**of_program(mesh=(Axis("dp", 8, at_run_time=True),)))),
        ("training_defaults", document(training_defaults={"epochs": 4})),
        ("metadata", document(**of_graph(metadata={}))),
    ],
)
def test_a_change_shows_in_its_part(part: str, changed: PefDocument) -> None:
    before, after = part_digests(document()), part_digests(changed)
    apart = {name for name in PARTS if before[name] != after[name]}
    assert apart == {part}
