"""HTML that cannot be injected into: whatever is no `Html` is escaped where it enters."""

import html
import json
from collections.abc import Iterable, Mapping


class Html(str):
    """Text that is HTML already. Only this file and the template make it."""

    __slots__ = ()


_VOID = ("br", "input", "meta")
_DIGITS = 7


def element(name: str, /, *children: str, **attributes: str | int | bool | None) -> Html:
    """`<name attributes>children</name>`. `class_` is spelled `class`, `data_x` is `data-x`; None and False are left
    out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelled = key.rstrip("_").replace("_", "-")
        parts.append(spelled if value is True else f'{spelled}="{html.escape(visible(str(value)))}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in _VOID else f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[str], between: str = "") -> Html:
    """One after the other, each escaped unless it is HTML."""
    return Html(_escaped(between).join(map(_escaped, children)))


def for_script(data: object) -> Html:
    """JSON that cannot end the script element in which it stands; numbers have the digits that a figure can show.
    Raises ValueError for what is not finite."""
    text = json.dumps(_rounded(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _rounded(data: object) -> object:
    if isinstance(data, float):
        return float(f"{data:.{_DIGITS}g}")
    if isinstance(data, Mapping):
        return {key: _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list | tuple) else data


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(visible(text))


def visible(text: str) -> str:
    """Without controls, marks that turn the direction of text, and half characters, which no file of UTF-8 can hold.
    Line breaks stay, and tabs are blanks."""
    spaced = text.replace("\t", " ")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in spaced)
