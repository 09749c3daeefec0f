"""The parser of one command of an app: the library's flags, and the app's, which replace those of the same name."""

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from sambasim.errors import OptionError, SambasimError
from sambasim.pef import PefHeader, locate, peek
from sambasim.runtime.launcher import launched_rank
from sambasim.samba import context
from sambasim.samba.checks.place import app_line
from sambasim.samba.utils.flag import COMMANDS, COMPILE, RUN, TEST, WITH_PEF, Flag
from sambasim.samba.utils.flags import FLAGS

AddArguments = Callable[[argparse.ArgumentParser], object]
"""A function of the app that adds flags to the parser that it is given. What it returns is ignored."""

PARSED_BATCH_SIZE = "parsed_batch_size"
"""The -b of a compile, in the metadata of its PEF."""

_IN_A_BATCH_SIZE = ("mapping", "num_spatial_batches")
"""Flags from which apps compute a batch size, beside -b."""

_WIDTH = 100
_ONE_SAMPLE = 1  # the batch size without -b, where no PEF says another
_WORLD_SIZE_NAMES = next(flag.names for flag in FLAGS if flag.destination == "world_size")

_EXAMPLES = {
    COMPILE: ("compile --pef-name net -b 32", "compile --pef-name net -b 32 --data-parallel -ws 2"),
    RUN: (
        "run --pef out/net/net.pef -b 32",
        "mpirun -np 2 run --pef out/net/net.pef -b 32 --data-parallel --reduce-on-rdu",
    ),
    TEST: ("test --pef out/net/net.pef -b 32",),
    "measure-performance": ("measure-performance --pef out/net/net.pef -b 32 --json",),
    "measure-sections": ("measure-sections --pef out/net/net.pef -b 32 --json",),
}


class Arguments(argparse.Namespace):
    """What a command line gives. `vars` has the arguments alone, without these two:

    typed: the names of the arguments that were typed, and did not take their default
    parsed_batch_size: the batch size before the app changes it, as by `args.batch_size *= args.num_spatial_batches`;
        None if the app has a flag of its own for it
    """

    __slots__ = ("parsed_batch_size", "typed")
    typed: frozenset[str]
    parsed_batch_size: int | None


def by_name(args: argparse.Namespace | Mapping[str, object], function: str) -> Mapping[str, object]:
    """The arguments of an app by name. function: what was called with them, for the message

    Raises OptionError if `args` is neither a Namespace nor a dictionary."""
    if isinstance(args, argparse.Namespace):
        return vars(args)
    if isinstance(args, Mapping):
        return args
    raise OptionError(
        f"{function} was given args of type {type(args).__name__}, and takes what parse_app_args returned",
        where=app_line(),
        remedy=f"{function}(args, …) or {function}(vars(args), …)",
    )


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, which raises an OptionError with a remedy instead of leaving the process.

    `flags` are those of the library, without those that a flag of the app replaces.
    """

    flags: tuple[Flag, ...] = ()

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message}", remedy=f"{self.prog} --help") from None


def program_name() -> str:
    """How the app is called in help and messages: `python app.py`, or `sambasim app app.py`."""
    script, typed = sys.argv[0], context.typed_command()
    if script not in typed:  # whoever started it has made another path of what was typed
        script = next((word for word in typed if Path(word).name == Path(script).name), Path(script).name)
    if typed[:2] == ["sambasim", "app"]:
        return f"sambasim app {script}"
    return f"python -m sambasim {script}" if typed[1:3] == ["-m", "sambasim"] else f"python {script}"


def overview() -> str:
    """The help of an app before a command is named."""
    program = program_name()
    commands = "\n".join(f"  {name:<20} {what}" for name, what in COMMANDS.items())
    return (
        f"usage: {program} {{{','.join(COMMANDS)}}} …\n\ncommands:\n{commands}\n\n"
        f"{program} COMMAND --help tells the flags of a command.\n\n"
        f"examples:\n{_examples(program, (COMPILE, RUN))}\n"
    )


def command_parser(command: str, additions: Sequence[AddArguments]) -> CommandParser:
    """The parser of one command, with the app's own flags in it.

    additions: each is called with the parser; a flag that it adds replaces the library's of the same name
    """
    program = program_name()
    parser = CommandParser(
        prog=f"{program} {command}",
        description=COMMANDS[command],
        epilog=f"examples:\n{_examples(program, (command,))}",
        formatter_class=_formatter,
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    library = list(_add_library(parser, command))
    for add in additions:
        add(parser)
    taken_over = _give_way(parser, library)
    parser.flags = tuple(f for f in FLAGS if command in f.commands and f.destination not in taken_over)
    return parser


def respelled(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments, with `--pef_name` as `--pef-name` if the parser knows only that, and the reverse."""
    known = {_with_dashes(name): name for name in parser._option_string_actions}
    result = list(arguments)
    for index, argument in enumerate(result):
        if argument == "--":  # what follows is no flag, whatever it looks like
            break
        name, equals, value = argument.partition("=")
        if name.startswith("--") and name not in parser._option_string_actions:
            result[index] = known.get(_with_dashes(name), name) + equals + value
    return result


def parse(parser: CommandParser, command: str, arguments: Sequence[str]) -> Arguments:
    """The values of the arguments, of every other flag of the library by its default, and of `command`.

    Without -b the batch size is that of the compile. A PEF that cannot be read is left for `trace_graph` to report.
    With --pef and without --pef-name, compile gives the PEF that name.
    Raises OptionError for what cannot be parsed, and for unknown flags, with the nearest name.
    """
    words = respelled(parser, arguments)
    # Only the intermixed kind collects positional arguments that stand before and behind flags.
    intermixed = any(not action.option_strings for action in parser._actions)
    known_args = parser.parse_known_intermixed_args if intermixed else parser.parse_known_args
    namespace, unknown = known_args(words, Arguments())
    if unknown:
        raise _unknown(parser, command, unknown)
    namespace.command = command
    namespace.typed = frozenset(_typed_destinations(parser, words))
    for flag in FLAGS:
        if not hasattr(namespace, flag.destination):
            setattr(namespace, flag.destination, flag.default_for(command))
    of_library = {flag.destination for flag in parser.flags}
    if "pef" in of_library and namespace.pef is not None:
        _take_pef(namespace, of_library - namespace.typed)
    namespace.parsed_batch_size = namespace.batch_size if "batch_size" in of_library else None
    return namespace


def _take_pef(namespace: Arguments, free: Collection[str]) -> None:
    """Set those of the flags `free`, which were not typed, whose default depends on --pef."""
    if namespace.command == COMPILE:
        if "pef_name" in free:
            namespace.pef_name = Path(namespace.pef).stem
        if launched_rank(os.environ) == 0:
            sys.stderr.write(f"notice: --pef is for the other commands; compile writes the PEF {namespace.pef_name}\n")
    elif "batch_size" in free and namespace.batch_size == _ONE_SAMPLE:  # else the app has set another default
        with suppress(SambasimError):
            _take_batch_size(namespace, peek(locate(namespace.pef)), free)


def _take_batch_size(namespace: Arguments, pef: PefHeader, free: Collection[str]) -> None:
    """The batch size of a PEF; but where the app computed it from -b and other flags, as by
    `args.batch_size *= args.num_spatial_batches`, the values of these at the compile, as the app computes it again."""
    namespace.batch_size = pef.batch_size
    parsed = pef.metadata.get(PARSED_BATCH_SIZE, str(pef.batch_size))
    if parsed == str(pef.batch_size):
        return
    at_compile = {"batch_size": parsed, **{name: pef.metadata.get(name) for name in _IN_A_BATCH_SIZE}}
    for flag in FLAGS:
        if flag.destination in free and flag.destination in at_compile and flag.convert is not None:
            with suppress(argparse.ArgumentTypeError, ValueError):  # metadata may hold any text
                value = flag.convert(str(at_compile[flag.destination]))
                if flag.choices is None or value in flag.choices:
                    setattr(namespace, flag.destination, value)


def _typed_destinations(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Where the flags in `words` put their values. `-b8` is -b with its value, unless there is a flag -b8."""
    flags = parser._option_string_actions
    for word in words:
        if word == "--":
            return
        action = flags.get(word.partition("=")[0]) or (None if word.startswith("--") else flags.get(word[:2]))
        if action is not None:
            yield action.dest


def _add_library(parser: argparse.ArgumentParser, command: str) -> Iterator[argparse.Action]:
    """Add the library's flags of this command; yields each as it is added."""
    effective = parser.add_argument_group("flags of the library")
    inert = parser.add_argument_group("flags that are taken, and change nothing here")
    for flag in FLAGS:
        if command in flag.commands:
            yield _add_flag(inert if flag.inert else effective, flag, command)
    if command in WITH_PEF and "world_size" not in {action.dest for action in parser._actions}:
        yield parser.add_argument(*_WORLD_SIZE_NAMES, action=_RefuseWorldSize)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, command: str) -> argparse.Action:
    default = flag.default_for(command)
    told = "" if default is None or callable(flag.default) else f" Default: {default}."
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
        help=f"{flag.meaning}{told}",
    )


class _RefuseWorldSize(argparse.Action):
    """`-ws` where it is no flag: the number of replicas is not the app's to choose."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        raise OptionError(
            f"{option_string} is for compile, where it says the smallest number of replicas; "
            "here there are as many as mpirun starts",
            remedy=f"mpirun -np {values or 2} {parser.prog} … without {option_string}",
        )


def _give_way(parser: argparse.ArgumentParser, library: Sequence[argparse.Action]) -> set[str]:
    """Remove the library's flags that the app adds again, by name in either spelling or by destination. Returns the
    app's destinations.

    argparse removes only the name that the app's flag has. The library's flag would keep its other names and set the
    same attribute, and its default would come before the app's. So its other names become names of the app's flag.
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
    """The error for arguments that the parser does not know."""
    name = unknown[0].partition("=")[0]
    what = f"{command} takes no {name}" if name.startswith("-") else f"nothing takes the argument {shlex.quote(name)}"
    elsewhere = [flag for flag in FLAGS if _with_dashes(name) in flag.names]
    if elsewhere:
        return OptionError(f"{what}: it is a flag of {', '.join(elsewhere[0].commands)}", remedy=f"leave {name} out")
    known = [option for action in parser._actions for option in action.option_strings]
    spelled = _with_dashes(name)
    begun = [option for option in known if spelled.startswith("--") and _with_dashes(option).startswith(spelled)]
    near = begun or difflib.get_close_matches(spelled, known, n=1)
    return OptionError(what, remedy=f"did you mean {near[0]}?" if near else f"{parser.prog} --help")


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Line breaks of description and examples are kept, and flags have room beside their meaning."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=_WIDTH)


def _examples(program: str, commands: Sequence[str]) -> str:
    lines = (line for command in commands for line in _EXAMPLES[command])
    return "\n".join(f"  {_typed(program, line)}" for line in lines)


def _typed(program: str, example: str) -> str:
    """An example as it is typed: the program stands before the command, behind mpirun."""
    words = example.split()
    start = next(index for index, word in enumerate(words) if word in COMMANDS)
    return " ".join((*words[:start], program, *words[start:]))
