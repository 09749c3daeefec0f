"""What a flag of a SambaFlow app is, and the commands that an app has. The flags themselves are in `flags.py`."""

import logging
import math
import os
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass

COMPILE, RUN, TEST = "compile", "run", "test"
MEASURE_PERFORMANCE, MEASURE_SECTIONS = "measure-performance", "measure-sections"

COMMANDS: Mapping[str, str] = {
    COMPILE: "Compile the model into a PEF.",
    RUN: "Do what the app is for, with a compiled PEF: train, or predict.",
    TEST: "Compare what the PEF computes with what PyTorch computes.",
    MEASURE_PERFORMANCE: "Measure how long a step of the PEF takes.",
    MEASURE_SECTIONS: "Measure how long each section of the PEF takes.",
}
"""What an app can be told to do, and in a sentence what that is."""

EVERYWHERE = tuple(COMMANDS)
WITH_PEF = (RUN, TEST, MEASURE_PERFORMANCE, MEASURE_SECTIONS)
MEASURING = (MEASURE_PERFORMANCE, MEASURE_SECTIONS)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    names: as it is typed, the long spelling first; `--pef_name` is taken for `--pef-name` without being listed
    commands: where it can be given
    meaning: the line of the help
    default: its value where it is not given; a function is called for each command line
    convert: from the text that was typed to the value; None for a switch, which takes no text
    count: how many texts it takes, as argparse has it: None for one, "?" for one or none, "+" for one or more
    choices: the only values that it can have
    bare: its value where it was typed without a text, which `count` "?" permits
    required: the commands that must be given it
    placeholder: what stands for the value in the help
    inert: why it changes nothing here; None for a flag that does what it says
    """

    names: tuple[str, ...]
    commands: tuple[str, ...]
    meaning: str
    default: object | Callable[[], object] = None
    convert: Callable[[str], object] | None = str
    count: str | None = None
    choices: tuple[str, ...] | None = None
    bare: str | None = None
    required: tuple[str, ...] = ()
    placeholder: str = "TEXT"
    inert: str | None = None

    @property
    def destination(self) -> str:
        """The name of its value in the Namespace: `--pef-name` is `pef_name`."""
        return self.names[0].lstrip("-").replace("-", "_")

    def default_for(self, command: str) -> object:
        """Its value where `command` was given and the flag was not. Away from its commands nothing is made up."""
        if callable(self.default):
            return self.default() if command in self.commands else None
        return self.default


def at_least_one(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A length of time, finite and not negative. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def log_level(text: str) -> str:
    """The name of a level of Python's logging, in either case. Raises ArgumentTypeError."""
    levels = logging.getLevelNamesMapping()
    if text.upper() not in levels:
        raise ArgumentTypeError(f"{text!r} is no level of logging; they are {', '.join(levels).lower()}")
    return text


def number(text: str) -> float:
    """A finite number that is not negative. Raises ArgumentTypeError."""
    try:
        return seconds(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0") from None


def pef_name(text: str) -> str:
    """The name of a PEF without its suffix: `net.pef` is `net`."""
    return text.removesuffix(".pef")


def time_and_process() -> str:
    """The name of a PEF that was not named: `20240131_235959_4711`."""
    return f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"


def switch(names: tuple[str, ...], commands: tuple[str, ...], meaning: str, inert: str | None = None) -> Flag:
    """A flag that is there or not."""
    return Flag(names, commands, meaning, default=False, convert=None, inert=inert)
