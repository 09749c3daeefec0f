"""The rules of the checkpoint format as a table: what README.md numbers, the reader enforces and messages name.

A test holds this table and the README equal. `refusal` makes the one error that a broken rule gives.
"""

from pathlib import Path
from typing import NamedTuple

from sambasim.errors import CheckpointError
from sambasim.units import MIB

MANIFEST_FILE = "checkpoint.json"
LARGEST_MANIFEST_BYTES = 16 * MIB
"""GPT-2 small takes some 30 KiB."""

ANOTHER = "take another checkpoint; run --resume auto takes the newest that is whole"


class Rule(NamedTuple):
    """One rule: its number, the short name that messages use, and the file that it is about."""

    number: int
    name: str
    part: str


FOLDER = Rule(1, "folder", "the folder")
BOUNDED = Rule(2, "bounded", MANIFEST_FILE)
JSON = Rule(3, "json", MANIFEST_FILE)
FORMAT = Rule(4, "format", MANIFEST_FILE)
VERSION = Rule(5, "version", MANIFEST_FILE)
CANONICAL = Rule(6, "canonical", MANIFEST_FILE)
DIGEST = Rule(7, "digest", MANIFEST_FILE)
SCHEMA = Rule(8, "schema", MANIFEST_FILE)
GROUPS = Rule(9, "groups", MANIFEST_FILE)
SPANS = Rule(10, "spans", MANIFEST_FILE)
REPLICAS = Rule(11, "replicas", MANIFEST_FILE)
SIZE = Rule(12, "size", "a shard")
HEADER = Rule(13, "header", "a shard")
CONTENT = Rule(14, "content", "a shard")

RULES = (
    FOLDER, BOUNDED, JSON, FORMAT, VERSION, CANONICAL, DIGEST, SCHEMA, GROUPS, SPANS, REPLICAS, SIZE, HEADER, CONTENT,
)  # fmt: skip


def refusal(
    path: Path,
    rule: Rule,
    what: str,
    *,
    part: str | None = None,
    remedy: str = ANOTHER,
    is_damage: bool = True,
) -> CheckpointError:
    """The error for a checkpoint at `path` that breaks `rule`; `part` is the file at fault, where there are several."""
    return CheckpointError(
        f"{path.name} breaks rule {rule.number} of the checkpoint format ({rule.name}): {what}",
        where=f"{part or rule.part}, {path}",
        remedy=remedy,
        is_damage=is_damage,
    )
