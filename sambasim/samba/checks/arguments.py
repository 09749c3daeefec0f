"""AP02 and DP02: the command line against that of the compile, and against what is passed on to it."""

import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping

from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling

_AGREEING = ("batch_size", "grad_accumulation_steps", "inference")
"""Arguments of the library that compile and run both have, and that must say the same. Another --dtype is refused, by
`trace_graph`."""

_OF_THE_GRAPH = ("batch_size", "inference")
"""Those of them that a graph depends on."""

_IS_TYPED = re.compile("True|False|[0-9]{1,18}")
"""Values of these. A stranger's PEF may hold others, and what is told is typed into a shell."""

_PASSED_ON: Mapping[str, object] = {
    "data_parallel": False, "world_size": 1, "o0": False, "o1": False, "inference": False,
    "dtype": None, "enable_stoc_rounding": False,
}  # fmt: skip
"""Arguments that session.compile must be given, each with its default."""


def note_not_passed_on(typed: Namespace | None, config: Mapping[str, object], *, inference: bool) -> None:
    """Tell which flags were typed and are not in `config`, which session.compile was given (DP02)."""
    if typed is None or typed.command != "compile":
        return
    given = {**config, "inference": inference}
    missing = [
        name
        for name, default in _PASSED_ON.items()
        if getattr(typed, name, default) != default and given.get(name, default) == default
    ]
    if missing:
        what = f"{', '.join(map(_flag, missing))} was typed, but session.compile is not told"
        telling.tell(Finding("DP02", what, app_line(), "session.compile(…, config_dict=vars(args))"))


def note_changed(typed: Namespace | None, metadata: Mapping[str, str], batch_size: int) -> None:
    """Tell the arguments of the library that are not what the PEF, of `batch_size`, was compiled with (AP02)."""
    for name, before, now in changed(typed, metadata):
        # A PEF whose metadata lack the -b of the compile gives a run its own batch size, if no -b is typed.
        if name in _AGREEING and (name, now) != ("batch_size", str(batch_size)):
            what = f"{_flag(name)} was {before} when the PEF was compiled, and now is {now}"
            remedy = f"{_flag(name)} as then, or compile again"
            telling.tell(Finding("AP02", what, app_line(), remedy))


def changed(typed: Namespace | None, metadata: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Name, value then and value now of each argument of the app, and of those of the library that must agree, which
    `metadata`, that the app gave when it was compiled, has otherwise than the command line. What only one of the two
    has is left out."""
    if typed is None:
        return
    free = _free_to_differ(typed.command)
    for name, value in sorted(vars(typed).items()):
        before = metadata.get(name)
        predicts = name == "inference" and value is True  # which a training PEF does too
        if before is not None and before != str(value) and name not in free and value is not None and not predicts:
            yield name, before, str(value)


def _free_to_differ(command: str) -> Collection[str]:
    """Arguments that say nothing of the graph: a compile has all flags of the library, by their defaults."""
    from sambasim.samba.utils.flag import MEASURING  # its package imports the session, which imports this
    from sambasim.samba.utils.flags import FLAGS

    free = {"command", *(flag.destination for flag in FLAGS)}.difference(_AGREEING)
    return free | {"inference"} if command in MEASURING else free  # there it says what is measured of a PEF


def likely_cause(typed: Namespace | None, metadata: Mapping[str, str]) -> str:
    """What is added to the refusal of another graph: the arguments that changed, or nothing. What an app's own mean
    nobody here knows, and they are told as what they are."""
    likely = [one for one in changed(typed, metadata) if one[0] in _OF_THE_GRAPH or one[0] not in _AGREEING]
    of_graph = [_then_and_now(*one) for one in likely if one[0] in _OF_THE_GRAPH]
    of_app = [_then_and_now(*one) for one in likely if one[0] not in _OF_THE_GRAPH]
    told = [*of_graph, *([f"of the app's own, {', '.join(of_app)}"] if of_app else [])]
    return f" (AP02: {'; '.join(told)})" if told else ""


def _then_and_now(name: str, before: str, now: str) -> str:
    return f"{_flag(name)} was {before} at the compile, and is {now}"


def as_compiled(typed: Namespace | None, metadata: Mapping[str, str]) -> str | None:
    """What to type so that the library's arguments make the graph of the compile; None if they do, or
    if the PEF does not say what can be typed."""
    of_graph = [(name, before) for name, before, _ in changed(typed, metadata) if name in _OF_THE_GRAPH]
    told = [_typed(name, before) for name, before in of_graph if _IS_TYPED.fullmatch(before)]
    return ", ".join(told) or None


def _typed(name: str, value: str) -> str:
    return _flag(name) if value == "True" else f"{_flag(name)} {value}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
