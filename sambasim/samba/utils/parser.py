"""The parser of a command of an app, whose flags replace the library's of the same name; and the metadata of a PEF."""

import argparse
import ast
import difflib
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import JsonValue
from torch import nn

from sambasim import __version__
from sambasim.errors import OptionError, SambasimError
from sambasim.pef import PefDocument, locate, read
from sambasim.samba.flags import COMMANDS, COMPILE, FLAGS, RUN, Flag
from sambasim.samba.process import app_error, print_notice, typed_command
from sambasim.samba.request import as_mapping

__all__ = ["get_pef_info", "get_pefmeta", "get_pefmeta_dict"]
"""What `samba.utils.pef_utils` exports."""

AddArguments = Callable[[argparse.ArgumentParser], object]
"""A function of the app that adds flags to a parser."""

_EXAMPLES = {
    COMPILE: ("{} compile --pef-name net -b 32", "{} compile --pef-name net -b 32 --data-parallel -ws 2"),
    RUN: (
        "{} run --pef out/net/net.pef -b 32",
        "mpirun -np 2 {} run --pef out/net/net.pef -b 32 --data-parallel --reduce-on-rdu",
    ),
}


class Arguments(Namespace):
    """The parsed arguments. `vars` does not contain these two: the parser of the command line; and the batch size
    before the app changes it, None if the app has a flag of its own for it."""

    __slots__ = ("parsed_batch_size", "parser")
    parsed_batch_size: int | None
    parser: "CommandParser"


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionError instead of exiting. A copy or pickle of it has what was typed alone."""

    of_app: frozenset[str] = frozenset()
    """The names of the app's own flags."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.words: Sequence[str] = ()
        self.typed: dict[str, list[str]] = {}
        """The words that set each destination. Parsing without defaults would run the app's actions twice."""
        self.of_run: Callable[[], CommandParser] = CommandParser

    def __reduce__(self) -> tuple[Any, ...]:
        return CommandParser, (), {"typed": self.typed, "of_app": self.of_app}

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings or arg_strings:
            self.typed.setdefault(action.dest, []).extend(self._to_type(action, arg_strings))
        return super()._get_values(action, arg_strings)

    def _to_type(self, action: argparse.Action, values: Sequence[str]) -> list[str]:
        """The flag, as it was typed or by its first name, and these values; one with a - would be read as a flag."""
        typed = [word.partition("=")[0] for word in self.words]
        names = [one for one in typed if self._option_string_actions.get(one) is action] or action.option_strings[:1]
        words = [*names[-1:], *values]
        return ["=".join(words)] if names and len(values) == 1 and values[0].startswith("-") else words

    def words_of_run(self) -> dict[str, list[str]]:
        """What to type, by destination, for a run of what was compiled: what run requires, and of the words that were
        typed for the compile, those that it takes too."""
        # Positional ones first: a flag may take all that follows.
        actions = sorted(self.of_run()._actions, key=lambda one: (bool(one.option_strings), not one.required))
        shown = [one for one in actions if one.required or one.dest in self.typed]
        return {one.dest: self.typed.get(one.dest, [*one.option_strings[:1], one.dest.upper()]) for one in shown}

    def flag(self, name: str) -> str:
        """How the argument of this destination is typed: as it was, or by its first name."""
        names = [option for one in self._actions if one.dest == name for option in one.option_strings]
        return [*(word for word in self.typed.get(name, ()) if word in self._option_string_actions), *names, name][0]

    def setting(self, name: str, value: str) -> tuple[str, str]:
        """What to run it `with`, or `without`, so that the argument of this destination has this value, as text."""
        flag, action = self.flag(name), next((one for one in self._actions if one.dest == name), None)
        if action is None:  # the app made it, or it comes from a file or a keyword
            return "with", f"{name}={value}"
        if isinstance(action, argparse.BooleanOptionalAction):
            return "with", next(one for one in action.option_strings if one.startswith("--no-") is (value == "False"))
        if action.nargs == 0 or value == "None":
            is_count = action.const is None and value.isdecimal()
            times = int(value) - (action.default or 0) if is_count else int(value == str(action.const) != "None")
            return ("with", " ".join([flag] * times)) if times > 0 else ("without", flag)
        values, repeats = [value], isinstance(action, argparse._AppendAction)
        if repeats or action.nargs not in (None, "?"):
            with suppress(SyntaxError, TypeError, ValueError):  # a value that is no literal stays as it is
                values = [*map(str, ast.literal_eval(value))]
        groups = [[one] for one in values] if repeats else [values]
        return "with", " ".join(shlex.join(self._to_type(action, group)) for group in groups)

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{self.prog}: {message}", remedy=f"{self.prog} --help") from None


def program_name() -> str:
    """How help and messages name the app: `python app.py`, or `sambasim app app.py`."""
    script, typed = sys.argv[0], typed_command()
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
        f"{program} COMMAND --help lists the flags of a command.\n\n{_examples(program, COMPILE, RUN)}\n"
    )


def command_parser(command: str, additions: Sequence[AddArguments]) -> CommandParser:
    """The parser of one command, with the flags that the app's functions `additions` add."""
    program = program_name()
    parser = CommandParser(
        prog=f"{program} {command}",
        description=COMMANDS[command],
        epilog=_examples(program, command),
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
    for name, action in [*parser._option_string_actions.items()]:
        for spelled in (_with_dashes(name), f"--{name[2:].replace('-', '_')}") if name.startswith("--") else ():
            parser._option_string_actions.setdefault(spelled, action)
    return parser


def parse(parser: CommandParser, command: str, arguments: Sequence[str]) -> Arguments:
    """The typed arguments, the defaults of all other flags of the library, and `command`. Without -b the batch size is
    that of the compile; `trace_graph` reports a PEF that cannot be read. Compile takes --pef as --pef-name."""
    # Only the intermixed kind accepts positional arguments both before and after flags.
    intermixed = any(not action.option_strings for action in parser._actions)
    known_args = parser.parse_known_intermixed_args if intermixed else parser.parse_known_args
    parser.words = arguments
    namespace, unknown = known_args(arguments, Arguments())
    if unknown:
        raise _unknown(parser, command, unknown)
    namespace.command, namespace.parser = command, parser
    for flag in FLAGS:
        if not hasattr(namespace, flag.destination):
            setattr(namespace, flag.destination, flag.default_for(command))
    of_library = {flag.destination for flag in FLAGS if command in flag.commands} - parser.of_app
    free = of_library - parser.typed.keys()  # their defaults may depend on --pef
    has_pef = "pef" in of_library and namespace.pef is not None
    if has_pef and command == COMPILE:
        if "pef_name" in free:
            namespace.pef_name = Path(namespace.pef).stem
        print_notice(f"--pef is for the other commands; compile writes the PEF {namespace.pef_name}")
    elif has_pef and "batch_size" in free and namespace.batch_size == 1:  # else the app has its own default
        with suppress(SambasimError):
            _take_batch_size(namespace, read(locate(namespace.pef)), free)
    return namespace


def _take_batch_size(namespace: Arguments, pef: PefDocument, free: Collection[str]) -> None:
    """Takes the batch size of a PEF; or where the app computed it, as by `args.batch_size *= args.num_spatial_batches`,
    the values that these flags had at the compile: the app computes it again. free: flags that were not typed"""
    namespace.batch_size = batch_size = pef.program.batch_size * pef.program.chips
    parsed = pef.metadata.get("parsed_batch_size", str(batch_size))
    if parsed == str(batch_size):
        return
    for flag in FLAGS:
        if flag.destination in {"batch_size", "mapping", "num_spatial_batches"} & set(free) and flag.convert:
            at_compile = parsed if flag.destination == "batch_size" else pef.metadata.get(flag.destination)
            with suppress(argparse.ArgumentTypeError, ValueError):  # metadata may hold any text
                value = flag.convert(str(at_compile))
                if flag.choices is None or value in flag.choices:
                    setattr(namespace, flag.destination, value)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, command: str) -> argparse.Action:
    if flag.convert is None:
        return group.add_argument(*flag.names, action="store_true", help=flag.meaning)
    default = flag.default_for(command)
    return group.add_argument(
        *flag.names,
        type=flag.convert,
        nargs=flag.count,
        const=flag.bare,
        default=default,
        choices=flag.choices,
        required=command in flag.required,
        metavar=None if flag.choices else flag.placeholder,
        help=flag.meaning + ("" if default is None or callable(flag.default) else f" Default: {default}."),
    )


def _give_way(parser: argparse.ArgumentParser, library: Sequence[argparse.Action]) -> set[str]:
    """Removes the library's flags whose name, in either spelling, or destination is also the app's, and gives their
    other names to the app's flag: argparse removes only the names that both have. Returns the app's destinations."""
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
    name = unknown[0].partition("=")[0]
    spelled = _with_dashes(name)
    what = f"{command} has no flag {name}" if name.startswith("-") else f"unexpected argument {shlex.quote(name)}"
    elsewhere = next((flag for flag in FLAGS if spelled in flag.names), None)
    if elsewhere is not None:
        return OptionError(f"{what}: it is a flag of {', '.join(elsewhere.commands)}", remedy=f"leave {name} out")
    known = [option for action in parser._actions for option in action.option_strings]
    longer = [option for option in known if spelled.startswith("--") and _with_dashes(option).startswith(spelled)]
    near = longer or difflib.get_close_matches(spelled, known, n=1)
    return OptionError(what, remedy=f"did you mean {near[0]}?" if near else f"{parser.prog} --help")


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _examples(program: str, *commands: str) -> str:
    lines = (line for name in commands for line in _EXAMPLES.get(name, (f"{{}} {name} --pef out/net/net.pef",)))
    return "\n".join(["examples:", *(f"  {line.format(program)}" for line in lines)])


def get_pefmeta(args: Namespace | Mapping[str, object], model: nn.Module) -> dict[str, str]:
    """The metadata of a PEF as text: every argument of the app, the `repr` of the model, and versions."""
    facts = {"model_repr": repr(model), "sambasim_version": __version__, "torch_version": torch.__version__}
    return {name: str(value) for name, value in [*sorted(as_mapping("args", args).items()), *facts.items()]}


def get_pefmeta_dict(
    pef: Mapping[str, object] | str | os.PathLike[str], model: nn.Module | None = None
) -> dict[str, str]:
    """`get_pefmeta` for a dictionary of arguments and a model; for the path or the name of a PEF, the metadata in it.
    Raises OptionError if there is no such PEF or no model beside the dictionary, PefError if the PEF is damaged."""
    if not isinstance(pef, Mapping):
        return dict(read(locate(os.fspath(pef))).metadata)
    if model is None:
        raise app_error(OptionError, "get_pefmeta_dict needs a model, too", "get_pefmeta_dict(vars(args), model)")
    return get_pefmeta(pef, model)


def get_pef_info(pef: str | os.PathLike[str]) -> dict[str, JsonValue]:
    """The content of a PEF, as `sambasim inspect --json` prints it. Raises OptionError if there is no such PEF,
    PefError if it is damaged."""
    path = locate(os.fspath(pef))
    from sambasim.report.inspect import contents  # the tables of the terminal take long to import

    information: dict[str, JsonValue] = contents(path, read(path)).model_dump(mode="json")
    return information
