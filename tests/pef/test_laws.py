"""decode(encode(x)) == x, through the bytes of canonical JSON, for every document that a manifest can say."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sambasim import pef
from sambasim.errors import InternalError, PefError
from sambasim.ir.graph import Argument, Node, Ref, SourceLine, TorchConstant
from sambasim.pef.canonical import canonical_json, nesting
from sambasim.pef.decode import decode, decode_argument, decode_node
from sambasim.pef.document import PefDocument
from sambasim.pef.encode import encode, encode_argument, encode_node
from sambasim.pef.manifest import Manifest
from tests.pef import damage
from tests.pef.samples import write_sample
from tests.pef.strategies import arguments, documents, nodes


def exact(value: object) -> str:
    """A text that is equal only for equal values of equal types: -0.0 is not 0.0, 1 is not True, nan is nan."""
    return repr(value)


def through_bytes(value: object) -> object:
    return json.loads(canonical_json(value))


@given(arguments)
def test_arguments_come_back_with_their_types(argument: Argument) -> None:
    assert exact(decode_argument(through_bytes(encode_argument(argument)))) == exact(argument)


@given(nodes)
def test_nodes_come_back(node: Node) -> None:
    table: dict[SourceLine, int] = {}
    row = through_bytes(encode_node(node, table))
    assert exact(decode_node(row, list(table))) == exact(node)


@settings(max_examples=60)
@given(documents)
def test_documents_come_back(document: PefDocument) -> None:
    data = canonical_json(encode(document, 64).model_dump())
    assert canonical_json(json.loads(data)) == data
    found = decode(Manifest.model_validate_json(data))
    for graph, same in zip(found.program.graphs, document.program.graphs, strict=True):
        assert list(graph.values) == list(same.values)
    assert list(found.program.symbols) == list(document.program.symbols)
    assert exact(found.program) == exact(document.program)
    assert exact(sorted(found.metadata.items())) == exact(sorted(document.metadata.items()))
    for name in ("data_source", "compile_options", "training_defaults"):
        assert canonical_json(getattr(found, name)) == canonical_json(getattr(document, name))
    assert (found.digest, found.weights_sha256) == (document.digest, document.weights_sha256)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (None, b"null"),
        (True, b"true"),
        (1, b"1"),
        (1.0, b"1.0"),
        (-0.0, b"-0.0"),
        (1e-05, b"1e-05"),
        (math.inf, b'"=inf"'),
        (-math.inf, b'"=-inf"'),
        (math.nan, b'"=nan"'),
        ("mean", b'"\'mean"'),
        ("%mean", b'"\'%mean"'),
        (Ref("x"), b'"%x"'),
        (TorchConstant("dtype", "float32"), b'"@dtype:float32"'),
        (TorchConstant("device", "cpu"), b'"@device:cpu"'),
        ((1, (2, ())), b"[1,[2,[]]]"),
    ],
)
def test_spelling_of_arguments(argument: Argument, text: bytes) -> None:
    assert canonical_json(encode_argument(argument)) == text
    assert exact(decode_argument(json.loads(text))) == exact(argument)


def test_what_is_no_argument_is_our_mistake() -> None:
    constants = [TorchConstant("module", "os"), TorchConstant("dtype", "load"), TorchConstant("device", "cuda:0")]
    for value in (1j, [1], *constants):
        with pytest.raises(InternalError, match="is no argument that a PEF can say"):
            encode_argument(value)  # type: ignore[arg-type]


@given(st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=8))
def test_nesting_counts_levels(value: object) -> None:
    def levels(item: object) -> int:
        return 1 + max(map(levels, item), default=0) if isinstance(item, list) else 0

    assert nesting(value) == levels(value)


@pytest.mark.parametrize("seed", range(8))
def test_a_manifest_with_anything_in_any_place_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    """No damage makes anything but a PefError; forty manifests a seed, resealed so that the inner rules are reached."""
    path = write_sample(tmp_path)
    fields, weights = damage.unpack(path)
    places = list(_places(fields))
    replacements: list[object] = [None, True, 0, -1, 2**46, 2**70, 1.5, "", "%x", "=nan", "'", "group0", [], {}, [[]]]
    choose = random.Random(seed).choice
    refused = 0
    for _ in range(40):
        changed = json.loads(json.dumps(fields))
        *way, last = choose(places)
        target = changed
        for key in way:
            target = target[key]
        replacement = _at(fields, choose(places)) if choose((True, False)) else choose(replacements)
        target[last] = json.loads(json.dumps(replacement))
        path.write_bytes(damage.pack(damage.seal(changed), weights))
        try:
            pef.check(path)
        except PefError:
            refused += 1
    assert refused > 20


def _places(value: object, way: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [way] if way and way[0] not in ("format", "version", "digest") else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*way, key))
    return found


def _at(value: object, way: tuple[str | int, ...]) -> object:
    for key in way:
        value = value[key]  # type: ignore[index]
    return value


def test_digests_are_left_out_of_the_document_that_is_written(tmp_path: Path) -> None:
    path = write_sample(tmp_path)
    document = pef.read(path)
    assert replace(document, digest="", weights_sha256="").digest == ""
    fields, _ = damage.unpack(path)
    assert document.digest == fields["digest"]
    assert document.weights_sha256 == fields["weights"]["sha256"]
