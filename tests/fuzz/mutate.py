"""Changing files: any file by its bytes, JSON in files by its values."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 63, 64, 1 << 31, 1 << 46, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**400, -0.0, 0.5,
    1e308, float("nan"), float("inf"), "", "x", "\0", "nan", "1", "../../etc/passwd", "/dev/zero", "os:system",
    "\u202e\u2066", "A" * 100_000, "[bold]x[/bold]", "\x1b[31m\x1b]0;x\x07", "error[internal]: forged\n", "load",
    "cuda", "complex64", [], {}, [[]], [None] * 3, {"name": "x"}, {"kind": "dtype", "name": "load"}, [1] * 65,
    [1 << 46] * 3,
)  # fmt: skip
"""Values that a reader may not expect."""


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """`data` with one damage that knows nothing of its format."""
    changed = bytearray(data)
    place = random.randrange(len(changed))
    match random.randrange(5):
        case 0:
            for _ in range(random.choice([1, 1, 2, 8, 64])):
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        case 1:
            del changed[place:]
        case 2:
            del changed[place : place + random.choice([1, 8, 64, 4096])]
        case 3:
            changed[place:place] = random.choice([b"\0", b"PK\5\6", b"[" * 10_000, random.randbytes(100), data[:1000]])
        case 4:  # a number, where formats like to have sizes
            width = random.choice([2, 4, 8])
            place = random.choice([random.randrange(200), len(data) - random.randrange(1, 200)]) % len(data)
            number = random.choice([0, 1, 1 << 31, (1 << 8 * width) - 1, 1 << (8 * width - 1), len(data)])
            changed[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(changed)


def mutate_json(random: Random, fields: Any) -> Any:
    """`fields` with one to four edits, made in place."""
    root = [fields]
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        _edit(random, root)
    return root[0]


def to_bytes(fields: Any) -> bytes:
    """JSON as Python writes it; brackets for what nests too deeply even for that."""
    try:
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    except RecursionError:
        return b"[" * 100_000


def edit_json(seal: Callable[[Any], Any] = lambda fields: fields) -> Callable[[Random, bytes], bytes]:
    """A mutation of files that are JSON; `seal` makes right what depends on the rest, as far as it can."""
    return lambda random, data: to_bytes(seal(mutate_json(random, json.loads(data))))


def _edit(random: Random, root: list[Any]) -> None:
    """One edit somewhere; shallow places are as likely as all the deep ones of a branch together."""
    container: Any = root
    key: Any = 0
    while isinstance(inner := container[key], dict | list) and inner and random.random() < 0.9:
        container = inner
        key = random.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    value = container[key]
    match random.randrange(8):
        case 0 | 1:
            container[key] = random.choice(_VALUES)
        case 2 if isinstance(value, int):
            container[key] = value + random.choice([-1, 1, 64, -64, 512])
        case 3 if isinstance(value, str | list) and len(value) < 1000:
            container[key] = value * random.choice([0, 2, 100])
        case 4 if container is not root:
            del container[key]
        case 5 if isinstance(container, dict):
            container[random.choice(["", "x", f"{key}x", "__class__"])] = value
        case 6:
            for _ in range(random.choice([3, 33, 150, 250])):
                value = [value] if random.random() < 0.5 else {"x": value}
            container[key] = value
        case _:  # a value from another place, which looks right and is not
            other: Any = root[0]
            while isinstance(other, dict | list) and other and random.random() < 0.9:
                other = random.choice(list(other.values()) if isinstance(other, dict) else other)
            with suppress(RecursionError):  # edits before this one have nested it too deeply
                container[key] = copy.deepcopy(other)
