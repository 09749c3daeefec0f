"""The rules of the PEF format as a table: what README.md numbers, readers enforce and messages name.

A test holds this table and the README equal. `refusal` makes the one error that a broken rule gives.
"""

from pathlib import Path
from typing import NamedTuple

from sambasim.bounded import shortened
from sambasim.errors import PefError

MANIFEST_MEMBER = "pef.json"
WEIGHTS_MEMBER = "weights.safetensors"
COMPILE_AGAIN = "compile the model again: sambasim compile"


class Rule(NamedTuple):
    """One rule: its number, the short name that messages use, and the part of the file that it is about."""

    number: int
    name: str
    part: str


READABLE = Rule(1, "readable", "the file")
ARCHIVE = Rule(2, "archive", "the file")
MEMBERS = Rule(3, "members", "the file")
STORED = Rule(4, "stored", "the file")
PLAIN = Rule(5, "plain", "the file")
CONTIGUOUS = Rule(6, "contiguous", "the file")
FRAMING = Rule(7, "framing", "the file")
BOUNDED = Rule(8, "bounded", MANIFEST_MEMBER)
CHECKSUM = Rule(9, "checksum", "the file")
JSON = Rule(10, "json", MANIFEST_MEMBER)
FORMAT = Rule(11, "format", MANIFEST_MEMBER)
VERSION = Rule(12, "version", MANIFEST_MEMBER)
CANONICAL = Rule(13, "canonical", MANIFEST_MEMBER)
DIGEST = Rule(14, "digest", MANIFEST_MEMBER)
SCHEMA = Rule(15, "schema", MANIFEST_MEMBER)
NODES = Rule(16, "nodes", MANIFEST_MEMBER)
PROGRAM = Rule(17, "program", MANIFEST_MEMBER)
SIZE = Rule(18, "size", WEIGHTS_MEMBER)
HEADER = Rule(19, "header", WEIGHTS_MEMBER)
TENSORS = Rule(20, "tensors", WEIGHTS_MEMBER)
TYPES = Rule(21, "types", WEIGHTS_MEMBER)
LAYOUT = Rule(22, "layout", WEIGHTS_MEMBER)
CONTENT = Rule(23, "content", WEIGHTS_MEMBER)

CONSTANTS = Rule(24, "constants", MANIFEST_MEMBER)

RULES = (
    READABLE, ARCHIVE, MEMBERS, STORED, PLAIN, CONTIGUOUS, FRAMING, BOUNDED, CHECKSUM, JSON, FORMAT, VERSION,
    CANONICAL, DIGEST, SCHEMA, NODES, PROGRAM, SIZE, HEADER, TENSORS, TYPES, LAYOUT, CONTENT,
    CONSTANTS,
)  # fmt: skip


def refusal(path: Path, rule: Rule, what: str, *, part: str | None = None, remedy: str = COMPILE_AGAIN) -> PefError:
    """The error for a file at `path` that breaks `rule`; `part` is the member at fault if the rule is about several."""
    return PefError(
        f"{path.name} breaks rule {rule.number} of the PEF format ({rule.name}): {shortened(what)}",
        where=f"{part or rule.part}, {path}",
        remedy=remedy,
    )
