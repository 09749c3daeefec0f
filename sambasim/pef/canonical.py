"""Canonical JSON: one sequence of bytes for one value, so that a digest of it means something.

Keys are sorted, nothing is between the tokens, text is UTF-8, and NaN and the infinities have no spelling.
"""

import hashlib
import json
from collections.abc import Mapping

from pydantic import JsonValue

DEEPEST_NESTING = 32
"""Levels of arrays and objects in free JSON objects and in arguments of nodes; real ones have three or four."""


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a JSON value.

    Raises ValueError for NaN, an infinity or text that is not Unicode, TypeError for what JSON cannot say.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def manifest_digest(manifest: Mapping[str, object]) -> str:
    """The SHA-256, in hex, of the canonical JSON of `manifest` without its key `digest`: the PEF's digest."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(canonical_json(body)).hexdigest()


def parse_json(data: bytes) -> object:
    """The JSON value that `data` spells. Raises ValueError for what is not strict JSON or nested too deeply."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("arrays and objects are nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def nesting(value: object) -> int:
    """Levels of arrays and objects in a JSON value: 0 for a number, 1 for a list of numbers. It does not recurse."""
    depth = 0
    level: list[object] = [value]
    while level := [item for item in level if isinstance(item, (dict, list, tuple))]:
        depth += 1
        if depth > DEEPEST_NESTING:
            break
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def check_json_object(name: str, value: Mapping[str, JsonValue]) -> None:
    """Raises ValueError if the free JSON object called `name` is nested more deeply than a PEF may say."""
    if nesting(dict(value)) > DEEPEST_NESTING:
        raise ValueError(f"{name} is nested more than {DEEPEST_NESTING} levels deep")
