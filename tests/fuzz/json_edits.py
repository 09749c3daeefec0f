"""Edits of a JSON value, at places and by values that are drawn."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias

Place: TypeAlias = "tuple[Any, Any]"
"""A container, and the key or index of one value in it."""

NUMBERS = (
    0, 1, -1, 2, 3, 7, 63, 64, 65, 255, 512, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 46, (1 << 46) + 1,
    (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -1e308, 1e308, 5e-324, 1e-9,
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "x", "%", "%x", "'", "'%s %n {0} {0.__class__}", "=nan", "=inf", "@dtype:load", "@device:cuda",
    "../../etc/passwd", "/dev/zero", "-rf", "\u202e\u2066", "\ud7ff", "\U0010ffff", "e\u0301" * 50, "A" * 100_000,
    "[bold]x[/bold]", "[/]", "<script>alert(1)</script>", "\x1b[31m\x1b]0;x\x07", "$(touch canary)", "canary:function",
    "os:system", "canary.py:f", "__class__", "nan", "1e999", "None", "\n\r\t", "error[internal]: forged",
)  # fmt: skip


def places(value: object) -> Iterator[Place]:
    """Every place in `value`, each container before what it holds."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, dict | list):
            for key in inner if isinstance(inner, dict) else range(len(inner)):
                yield inner, key
                stack.append(inner[key])


def edit(random: Random, fields: Any) -> None:
    """One edit somewhere in `fields`; shallow places are as likely as all the deep ones of a branch together."""
    container: Any = fields
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        if not keys:
            return
        key = random.choice(keys)
        inner = container[key]
        if isinstance(inner, dict | list) and inner and random.random() < 0.85:
            container = inner
            continue
        break
    with suppress(RecursionError):  # an edit before this one has nested it more deeply than can be copied
        random.choice(_EDITS)(random, container, key, fields)


def _other_number(random: Random, container: Any, key: Any, fields: Any) -> None:
    value = container[key]
    near = isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.5
    container[key] = value + random.choice([-1, 1, 64, -64, 512]) if near else random.choice(NUMBERS)


def _other_text(random: Random, container: Any, key: Any, fields: Any) -> None:
    value = container[key]
    if isinstance(value, str) and value and random.random() < 0.5:
        place = random.randrange(len(value))
        container[key] = value[:place] + random.choice(["", "x", "%", "é", "\0", value]) + value[place + 1 :]
    else:
        container[key] = random.choice(TEXTS)


def _other_type(random: Random, container: Any, key: Any, fields: Any) -> None:
    value = container[key]
    container[key] = random.choice(
        [None, True, False, [], {}, [value], {"x": value}, str(value)[:100], 1, 1.0, [[]], [None] * 3]
    )


def _emptied(random: Random, container: Any, key: Any, fields: Any) -> None:
    container[key] = type(container[key])()


def _doubled(random: Random, container: Any, key: Any, fields: Any) -> None:
    value = container[key]
    if isinstance(value, list | str):
        container[key] = value * random.choice([2, 2, 3, 100])
    elif isinstance(container, list):
        container.insert(key, copy.deepcopy(value))


def _removed(random: Random, container: Any, key: Any, fields: Any) -> None:
    del container[key]


def _added(random: Random, container: Any, key: Any, fields: Any) -> None:
    if isinstance(container, dict):
        container[random.choice([*TEXTS[:10], f"{key}x", "__class__"])] = copy.deepcopy(container[key])
    else:
        container.insert(random.randrange(len(container) + 1), copy.deepcopy(container[key]))


def _renamed(random: Random, container: Any, key: Any, fields: Any) -> None:
    if isinstance(container, dict):
        container[f"{key}{random.choice(['', 'x', ' '])}".upper()] = container.pop(key)


def _swapped(random: Random, container: Any, key: Any, fields: Any) -> None:
    other = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
    container[key], container[other] = container[other], container[key]


def _from_elsewhere(random: Random, container: Any, key: Any, fields: Any) -> None:
    """A value of the same type from another place of the same file: what looks right, and is not."""
    alike = [
        inner[k] for inner, k in _some(random, list(places(fields)), 2000) if type(inner[k]) is type(container[key])
    ]
    if alike:
        container[key] = copy.deepcopy(random.choice(alike))


def _nested(random: Random, container: Any, key: Any, fields: Any) -> None:
    value = container[key]
    for _ in range(random.choice([3, 33, 100, 900, 3000])):
        value = [value] if random.random() < 0.5 else {"x": value}
    container[key] = value


def _some(random: Random, items: list[Place], most: int) -> list[Place]:
    return items if len(items) <= most else random.sample(items, most)


_EDITS: Sequence[Callable[[Random, Any, Any, Any], None]] = (
    _other_number, _other_number, _other_text, _other_text, _other_type, _emptied, _doubled, _removed, _added, _renamed,
    _swapped, _from_elsewhere, _from_elsewhere, _from_elsewhere, _nested,
)  # fmt: skip
