"""The parser of a command of an app.

A flag of the app replaces the library's flag of the same name.
"""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sambasim.errors import OptionError, SambasimError
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.pef import PefHeader, locate, peek
from sambasim.runtime.machine.launcher import launched_rank
from sambasim.samba import process
from sambasim.samba.flags import COMMANDS, COMPILE, FLAGS, MEASURE_PERFORMANCE, MEASURE_SECTIONS, RUN, TEST, Flag

AddArguments = Callable[[argparse.ArgumentParser], object]
"""A function of the app that adds flags to a parser."""

PARSED_BATCH_SIZE = "parsed_batch_size"
"""The key of the -b of a compile in the metadata of its PEF."""

_IN_A_BATCH_SIZE = ("mapping", "num_spatial_batches")
"""Flags, besides -b, from which apps compute a batch size."""

_ONE_SAMPLE = 1  # the batch size without -b, where no PEF says another

_EXAMPLES = {
    COMPILE: ("{} compile --pef-name net -b 32", "{} compile --pef-name net -b 32 --data-parallel -ws 2"),
    RUN: (
        "{} run --pef out/net/net.pef -b 32",
        "mpirun -np 2 {} run --pef out/net/net.pef -b 32 --data-parallel --reduce-on-rdu",
    ),
    TEST: ("{} test --pef out/net/net.pef -b 32",),
    MEASURE_PERFORMANCE: ("{} measure-performance --pef out/net/net.pef -b 32 --json",),
    MEASURE_SECTIONS: ("{} measure-sections --pef out/net/net.pef -b 32 --json",),
}


class Arguments(argparse.Namespace):
    """The parsed arguments. `vars` does not contain these three:

    typed: the names of the arguments that were typed
    of_app: the names of the app's own flags
    parsed_batch_size: the batch size before the app changes it, as by `args.batch_size *= args.num_spatial_batches`;
        None if the app has a flag of its own for it
    """

    __slots__ = ("of_app", "parsed_batch_size", "typed")
    typed: frozenset[str]
    of_app: frozenset[str]
    parsed_batch_size: int | None


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionError instead of exiting.

    flags: those of the library that no flag of the app replaces
    of_app: the names of the app's own flags
    """

    flags: tuple[Flag, ...] = ()
    of_app: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.typed: set[str] = set()
        """The destinations that the arguments set. Parsing without defaults would run the app's actions twice."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings or arg_strings:
            self.typed.add(action.dest)
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message}", remedy=f"{self.prog} --help") from None


def program_name() -> str:
    """How help and messages name the app: `python app.py`, or `sambasim app app.py`."""
    script, typed = sys.argv[0], process.typed_command()
    if script not in typed:  # the launcher may have changed the path
        script = next((word for word in typed if Path(word).name == Path(script).name), Path(script).name)
    if typed[:2] == ["sambasim", "app"]:
        return f"sambasim app {script}"
    return f"python -m sambasim {script}" if typed[1:3] == ["-m", "sambasim"] else f"python {script}"


def overview() -> str:
    program = program_name()
    commands = "\n".join(f"  {name:<20} {what}" for name, what in COMMANDS.items())
    return (
        f"usage: {program} {{{','.join(COMMANDS)}}} …\n\ncommands:\n{commands}\n\n"
        f"{program} COMMAND --help lists the flags of a command.\n\n"
        f"examples:\n{_examples(program, (COMPILE, RUN))}\n"
    )


def command_parser(command: str, additions: Sequence[AddArguments]) -> CommandParser:
    """The parser of one command, with the flags that the app's functions `additions` add."""
    program = program_name()
    parser = CommandParser(
        prog=f"{program} {command}",
        description=COMMANDS[command],
        epilog=f"examples:\n{_examples(program, (command,))}",
        # Keeps line breaks of the examples, and leaves a wide column for flags.
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=100),
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    effective = parser.add_argument_group("flags of the library")
    inert = parser.add_argument_group("flags that are accepted, and have no effect here")
    of_command = [flag for flag in FLAGS if command in flag.commands]
    library = [_add_flag(inert if flag.inert else effective, flag, command) for flag in of_command]
    for add in additions:
        add(parser)
    parser.of_app = frozenset(_give_way(parser, library))
    parser.flags = tuple(flag for flag in of_command if flag.destination not in parser.of_app)
    return parser


def respelled(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, with dashes and underscores in names as the parser knows them: `--pef_name` as `--pef-name`."""
    known = {_with_dashes(name): name for name in parser._option_string_actions}
    result = list(arguments)
    for index, argument in enumerate(result):
        if argument == "--":  # no flags follow
            break
        name, equals, value = argument.partition("=")
        if name.startswith("--") and name not in parser._option_string_actions:
            result[index] = known.get(_with_dashes(name), name) + equals + value
    return result


def parse(parser: CommandParser, command: str, arguments: Sequence[str]) -> Arguments:
    """The typed arguments, the defaults of all other flags of the library, and `command`.

    Without -b the batch size is that of the compile; `trace_graph` reports a PEF that cannot be read. Compile takes
    --pef as --pef-name if that is not typed.
    Raises OptionError for arguments that cannot be parsed, and for unknown flags, with the nearest name.
    """
    words = respelled(parser, arguments)
    # Only the intermixed kind accepts positional arguments both before and after flags.
    intermixed = any(not action.option_strings for action in parser._actions)
    known_args = parser.parse_known_intermixed_args if intermixed else parser.parse_known_args
    namespace, unknown = known_args(words, Arguments())
    if unknown:
        raise _unknown(parser, command, unknown)
    namespace.command, namespace.of_app = command, parser.of_app
    namespace.typed = frozenset(parser.typed)
    for flag in FLAGS:
        if not hasattr(namespace, flag.destination):
            setattr(namespace, flag.destination, flag.default_for(command))
    of_library = {flag.destination for flag in parser.flags}
    if "pef" in of_library and namespace.pef is not None:
        _take_pef(namespace, of_library - namespace.typed)
    namespace.parsed_batch_size = namespace.batch_size if "batch_size" in of_library else None
    return namespace


def _take_pef(namespace: Arguments, free: Collection[str]) -> None:
    """Sets the flags whose default depends on --pef. free: the flags of the library that were not typed"""
    if namespace.command == COMPILE:
        if "pef_name" in free:
            namespace.pef_name = Path(namespace.pef).stem
        if launched_rank(os.environ) == 0:
            sys.stderr.write(f"notice: --pef is for the other commands; compile writes the PEF {namespace.pef_name}\n")
    elif "batch_size" in free and namespace.batch_size == _ONE_SAMPLE:  # else the app has its own default
        with suppress(SambasimError):
            _take_batch_size(namespace, peek(locate(namespace.pef)), free)


def _take_batch_size(namespace: Arguments, pef: PefHeader, free: Collection[str]) -> None:
    """Takes the batch size of a PEF. Where the app computed it from -b and other flags, as by
    `args.batch_size *= args.num_spatial_batches`, takes the values that these flags had at the compile: the app
    computes it again."""
    namespace.batch_size = batch_size = pef.batch_size * pef.replica.size(DATA_PARALLEL)
    parsed = pef.metadata.get(PARSED_BATCH_SIZE, str(batch_size))
    if parsed == str(batch_size):
        return
    at_compile = {"batch_size": parsed, **{name: pef.metadata.get(name) for name in _IN_A_BATCH_SIZE}}
    for flag in FLAGS:
        if flag.destination in free and flag.destination in at_compile and flag.convert is not None:
            with suppress(argparse.ArgumentTypeError, ValueError):  # metadata may hold any text
                value = flag.convert(str(at_compile[flag.destination]))
                if flag.choices is None or value in flag.choices:
                    setattr(namespace, flag.destination, value)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, command: str) -> argparse.Action:
    default = flag.default_for(command)
    default_text = "" if default is None or callable(flag.default) else f" Default: {default}."
    if flag.convert is None:
        return group.add_argument(*flag.names, action="store_true", help=flag.meaning)
    return group.add_argument(
        *flag.names,
        type=flag.convert,
        nargs=flag.count,
        const=flag.bare,
        default=default,
        choices=flag.choices,
        required=command in flag.required,
        metavar=None if flag.choices else flag.placeholder,
        help=f"{flag.meaning}{default_text}",
    )


def _give_way(parser: argparse.ArgumentParser, library: Sequence[argparse.Action]) -> set[str]:
    """Removes the library's flags whose name, in either spelling, or destination is also the app's. Returns the app's
    destinations.

    argparse removes only the names that the app's flag has. The library's flag would keep its others, and its default
    would win over the app's. So its other names become names of the app's flag.
    """
    own = [action for action in parser._actions if action.option_strings and action not in library]
    claimed = {_with_dashes(name) for action in own for name in action.option_strings}
    successors = {action.dest: action for action in own}
    for action in library:
        successor = successors.get(action.dest)
        for name in tuple(action.option_strings):
            if successor is None and _with_dashes(name) not in claimed:
                continue
            parser._handle_conflict_resolve(action, [(name, action)])
            if successor is not None and _with_dashes(name) not in claimed:
                successor.option_strings = [*successor.option_strings, name]
                parser._option_string_actions[name] = successor
    return set(successors)


def _unknown(parser: argparse.ArgumentParser, command: str, unknown: Sequence[str]) -> OptionError:
    """The error for arguments unknown to the parser."""
    name = unknown[0].partition("=")[0]
    what = f"{command} has no flag {name}" if name.startswith("-") else f"unexpected argument {shlex.quote(name)}"
    elsewhere = [flag for flag in FLAGS if _with_dashes(name) in flag.names]
    if elsewhere:
        return OptionError(f"{what}: it is a flag of {', '.join(elsewhere[0].commands)}", remedy=f"leave {name} out")
    known = [option for action in parser._actions for option in action.option_strings]
    spelled = _with_dashes(name)
    longer = [option for option in known if spelled.startswith("--") and _with_dashes(option).startswith(spelled)]
    near = longer or difflib.get_close_matches(spelled, known, n=1)
    return OptionError(what, remedy=f"did you mean {near[0]}?" if near else f"{parser.prog} --help")


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _examples(program: str, commands: Sequence[str]) -> str:
    lines = (line for command in commands for line in _EXAMPLES[command])
    return "\n".join(f"  {line.format(program)}" for line in lines)
