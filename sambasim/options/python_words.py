"""Messages that speak of flags, in words of the Python API: `--lr 1e-3` is `lr=1e-3`, and `--set loss.name=mse` is
`set={"loss.name": "mse"}`. What is known of a flag is its `Setting`, see `flag.py`."""

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Literal, get_args, get_origin

from sambasim.optimizers import OPTIMIZERS
from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.flag import Setting
from sambasim.options.grammar import LOSS_ARGUMENTS

_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|[^\s;,)]*[^\s;,:.)]|"""
_FLAG = re.compile(rf"(?<![\w-])(?P<flag>--?[A-Za-z][\w-]*)(?:[ =](?!--?[A-Za-z])(?P<value>{_VALUE}))?")
_SET = re.compile(rf"--set (?P<name>[\w.\"]+)=(?P<value>{_VALUE})")
_PLACEHOLDER = re.compile(r"[A-Z]+|[\d.,]*…")
_NUMBER = re.compile(r"-?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?")
_BEGIN, _END = "\x01", "\x02"  # around what was translated, until all is

_INSTEAD = {
    "add --inference": "call sambasim.predict",
    "leave out --inference": "call sambasim.run",
    "--inference": "sambasim.predict",
    "--pef": "the PEF",
    "emulate_replicas": "replicas",
}
"""What sambasim.run and sambasim.predict have in place of flags."""


@cache
def _words() -> Mapping[str, tuple[Setting, str | None]]:
    """The setting of each flag as it is typed, and of a switch its value, as Python has it."""
    words: dict[str, tuple[Setting, str | None]] = {}
    for setting in (*COMPILE_FLAGS.values(), *RUN_FLAGS.values()):
        for word in (part for name in setting.flag.names for part in name.split("/")):
            fixed = str(not word.startswith("--no-")) if setting.kind is bool else None
            words[word] = setting, f'"{word.strip("-")}"' if setting.flag.choices else fixed
    return words


def in_python(text: str, *, compiles: bool, typed: Collection[str] = ()) -> str:
    """`text` of a message, for a caller of `sambasim.compile` if `compiles`, else of `run` or `predict`. Words in
    `typed`, which somebody else has typed, stay as they are."""
    for flag, instead in {} if compiles else _INSTEAD.items():
        text = re.sub(rf"(?<![\w-]){flag}(?![\w-])", instead, text)
    text = text.replace("sambasim compile … ", "sambasim.compile(…) with ")
    text = re.sub(r"`sambasim (compile|run|simulate)`", r"`sambasim.\1`", text)
    text = _SET.sub(_set, re.sub(r"--set '([\w.]+=\[[^\]]*\])'", r"--set \1", text))
    text = _FLAG.sub(lambda found: found[0] if found["flag"] in typed else _translated(found), text)
    text = re.sub(f"{_END} {_BEGIN}", ", ", text)
    text = re.sub(rf"(python [^;\n]*?) {_BEGIN}", r"\1, with ", text)
    return text.replace(_BEGIN, "").replace(_END, "")


def _set(found: re.Match[str]) -> str:
    name = found["name"].replace('"', '\\"')
    return _marked(f'set={{"{name}": {_value(found["value"])}}}')


def _translated(found: re.Match[str]) -> str:
    word, value = found["flag"], found["value"]
    rest = found[0][len(word) :]
    if word == "--set":
        return f"set{rest}"
    setting, fixed = _words().get(word, (None, None))
    if setting is None:
        return found[0]
    keyword = setting.keyword.replace("emulate_replicas", "replicas")
    if fixed is not None:
        return _marked(f"{keyword}={fixed}") + rest
    is_all = found[0] == found.string  # as in a remedy
    if value is None or not (is_all or _is_value(value, setting)):
        return f"{keyword}{rest}"
    return _marked(f"{keyword}={_value(value)}")


def _is_value(text: str, setting: Setting) -> bool:
    """Whether `text`, which follows a flag in a sentence, is its value and no other word."""
    if _PLACEHOLDER.fullmatch(text) or any(character.isdigit() for character in text):
        return True
    if get_origin(setting.kind) is Literal:
        return text in get_args(setting.kind)
    choices = re.findall(r"[\w-]+", setting.flag.metavar or "")
    return bool(re.search(r"[/.]|^[A-Z]", text)) or text in (*choices, *OPTIMIZERS, *LOSS_ARGUMENTS)


def _value(text: str) -> str:
    """A value as Python has it: of a word a string, of nothing None."""
    known = {"": "None", "true": "True", "false": "False"}
    if text in known or _NUMBER.fullmatch(text) or _PLACEHOLDER.fullmatch(text) or text[0] in "\"'[":
        return known.get(text, text)
    return f'"{text}"'


def _marked(text: str) -> str:
    return f"{_BEGIN}{text}{_END}"
