"""The command line of an app: `parse_app_args`, and the same from a YAML file or from keywords."""

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from sambasim.errors import OptionError
from sambasim.runtime.launcher import find_launcher, launched_rank
from sambasim.samba import context
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.notices import say_once
from sambasim.samba.utils.flag import COMMANDS, COMPILE, RUN, TEST, WITH_PEF, Flag
from sambasim.samba.utils.flags import FLAGS
from sambasim.samba.utils.next_run import NextRun
from sambasim.samba.utils.parser import AddArguments, Arguments, command_parser, overview, parse, program_name
from sambasim.samba.utils.yaml_file import named_values, read_yaml

_LEVELS = ("o0", "o1", "o3")
_LOGGER = "sambaflow"  # that of sambaflow.logging.samba_logger


class SambaConfig(Arguments):
    """What `parse_app_args` returns, made from keywords: `SambaConfig("compile", batch_size=32, hidden=64)`; or a copy
    of what it returned: `SambaConfig(args, SNConfig)`.

    settings: an SNConfig whose settings are added where `args` has none of that name; a class adds nothing

    Keywords that are flags of the library are checked as those are, the others are the app's own. The library's flags
    that are not named have their defaults. Nothing is started: `parse_yaml_to_args` does that.
    Raises OptionError for an unknown command, and for a value that the flag cannot have.
    """

    def __init__(self, command: str | argparse.Namespace, settings: object = None, /, **values: object) -> None:
        super().__init__()
        self.typed = frozenset()
        if isinstance(settings, argparse.Namespace):
            vars(self).update(vars(settings))
        if isinstance(command, argparse.Namespace):
            vars(self).update(vars(command), **values)
        else:
            vars(self).update(vars(_from_values(command, values)))
        self.parsed_batch_size = getattr(self, "batch_size", None)

    def get_all_params(self) -> dict[str, object]:
        """All settings by name."""
        return dict(vars(self))


@checks_keywords_beside("parse_app_args", ())
def parse_app_args(
    argv: Sequence[str] | None = None,
    dev_mode: bool = False,
    common_parser_fn: AddArguments | None = None,
    compile_parser_fn: AddArguments | None = None,
    test_parser_fn: AddArguments | None = None,
    run_parser_fn: AddArguments | None = None,
) -> argparse.Namespace:
    """Parse the command line of an app: a command, its flags, and the app's own.

    argv: the words behind the name of the program, or with it; None is what this process was started with
    dev_mode: there is nothing that it would add: every flag is taken without it
    common_parser_fn: adds the app's flags for every command
    compile_parser_fn, test_parser_fn, run_parser_fn: add those of one command

    Returns a Namespace with `command` and every flag of the library, by its default where it was not given, so that
    code that all commands share may read any of them; and with the app's flags of this command. Where app and library
    have the same flag, the app's counts.

    With --data-parallel, on every command but compile, it is collective: when it returns, this process has found the
    other ranks, `torch.distributed` is up, and `world_size` is the number of ranks that mpirun started. A process that
    is alone has `torch.distributed` too, as soon as the app needs it.

    Raises OptionError for what is typed wrong; LaunchError and MachineError if the ranks cannot find each other.
    """
    words = _words_of(argv)
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        sys.exit(0)
    command = _checked_command(words[0] if words else None)
    of_command = {COMPILE: compile_parser_fn, TEST: test_parser_fn, RUN: run_parser_fn}.get(command)
    additions = [add for add in (common_parser_fn, of_command) if add is not None]
    parser = command_parser(command, additions)
    arguments = parse(parser, command, words[1:])
    typed = context.typed_command()
    if command == COMPILE and typed[-len(words) :] == words:
        additions = [add for add in (common_parser_fn, run_parser_fn) if add is not None]
        context.current().next_run = NextRun(typed[: -len(words)], words[1:], parser, additions)
    _enter(arguments, parser.flags)
    return arguments


def _words_of(argv: Sequence[str] | None) -> list[str]:
    """The command and what follows it."""
    if argv is None:
        return sys.argv[1:]
    if isinstance(argv, str) or not isinstance(argv, Sequence):
        raise OptionError(
            f"parse_app_args was given argv of type {type(argv).__name__}, and argv is a list of words",
            where=app_line(),
            remedy="parse_app_args(argv=sys.argv[1:], …)",
        )
    words = [str(word) for word in argv]
    with_program = len(words) > 1 and words[0] not in COMMANDS and words[1] in COMMANDS
    return words[1:] if with_program or words[:1] == sys.argv[:1] else words


def parse_yaml_to_args(path: str | os.PathLike[str], args_cli: argparse.Namespace | str | None = None) -> SambaConfig:
    """What `parse_app_args` returns and does, from a YAML file of flags and values, alone or beside a command line.

    path: of a file such as

        command: run
        batch_size: 32
        hidden: 64            # no flag of the library: the app's own
        run:                  # holds for run alone
          pef: out/net/net.pef

    args_cli: what `parse_app_args` returned. Its command counts, and what was typed; for all else the value of the
        file counts before a default. Or the command alone, where the file does not name it or names another.

    Raises OptionError, with the file, for a wrong value; otherwise as `parse_app_args`.
    """
    file = os.fspath(path)
    content = read_yaml(path)
    named = content.pop("command", None)
    cli = args_cli if isinstance(args_cli, argparse.Namespace) else argparse.Namespace(command=args_cli)
    chosen = _checked_command(cli.command or (None if named is None else str(named)))
    of_commands = {name for name, value in content.items() if name in COMMANDS and isinstance(value, dict)}
    values = {name: value for name, value in content.items() if name not in of_commands}
    if chosen in of_commands:
        values |= named_values(content[chosen], f"{file}, {chosen}")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    typed = cli.typed if isinstance(cli, Arguments) else frozenset()
    for name, default in vars(cli).items():
        if name in typed:
            values.pop(name, None)
        elif isinstance(values.get(name), str) and isinstance(default, float):
            values[name] = _as_float(values[name])  # YAML reads 1e-3 as text
    try:
        config = SambaConfig(chosen, **{"pef": getattr(cli, "pef", None), **values})
    except OptionError as error:
        raise OptionError(error.what, where=file, remedy=error.remedy) from None
    for name, value in vars(cli).items():
        if name not in values:
            setattr(config, name, value)
    config.command = chosen
    config.parsed_batch_size = config.batch_size
    _enter(config, [flag for flag in FLAGS if chosen in flag.commands])
    return config


def _as_float(text: object) -> object:
    try:
        return float(str(text))
    except ValueError:
        return text


def _checked_command(word: str | None) -> str:
    if word in COMMANDS:
        return str(word)
    what = "no command is named" if word is None else f"{word!r} is no command"
    raise OptionError(f"{what}; they are {', '.join(COMMANDS)}", remedy=f"{program_name()} compile --help")


def _from_values(command: str, values: Mapping[str, object]) -> argparse.Namespace:
    """The Namespace of a command line that says what `values` say; those that are no flags of it are laid over it."""
    command = _checked_command(command)
    spelled = {name.replace("-", "_"): value for name, value in values.items()}
    words: list[str] = []
    for flag in FLAGS:
        if command in flag.commands and spelled.get(flag.destination) is not None:
            words += _words(flag.names[0], spelled.pop(flag.destination), switch=flag.convert is None)
    namespace = parse(command_parser(command, ()), command, words)
    for name, value in spelled.items():
        if value is not None or not hasattr(namespace, name):
            setattr(namespace, name, value)
    return namespace


def _words(name: str, value: object, *, switch: bool) -> list[str]:
    """What would be typed to give a flag this value. Raises OptionError if nothing would."""
    if switch:
        if not isinstance(value, bool):
            raise OptionError(f"{name} is true or false, not {value!r}", remedy=f"{name[2:].replace('-', '_')}: true")
        return [name] if value else []
    if isinstance(value, list | tuple):
        return [name, *map(str, value)]
    return [f"{name}={value}"]


def _enter(arguments: argparse.Namespace, flags: Sequence[Flag]) -> None:
    """Refuse what cannot be, tell what changes nothing, log as asked, and find the other ranks if there are to be any.

    flags: those of the library, for which `arguments` has the values; what an app's own flags mean is not known here
    """
    destinations = {flag.destination for flag in flags}
    levels = [f"--{level}" for level in _LEVELS if level in destinations and getattr(arguments, level)]
    if len(levels) > 1:
        raise OptionError(f"{' and '.join(levels)} exclude each other", remedy=f"leave out all but {levels[-1]}")
    if "log_level" in destinations and arguments.log_level is not None:
        logging.getLogger(_LOGGER).setLevel(arguments.log_level.upper())
    _tell_inert(arguments, [flag for flag in flags if flag.inert])
    rounds = arguments.dtype == "bf16" and not arguments.inference
    # An RDU computes in bf16 unless told otherwise, so existing command lines have this flag without --dtype.
    if "enable_stoc_rounding" in destinations and arguments.enable_stoc_rounding and not rounds:
        arguments.enable_stoc_rounding = False
        say_once("--enable-stoc-rounding", "only optimizer steps of --dtype bf16 round at random")
    launcher = find_launcher(os.environ)
    alone = launcher is None or launcher.world_size == 1  # such apps, too, ask torch.distributed for their rank
    runs, replicated = arguments.command in WITH_PEF, bool(arguments.data_parallel)
    context.enter(arguments, connected=runs and replicated, alone=runs and alone and not replicated)


def _tell_inert(arguments: argparse.Namespace, flags: Sequence[Flag]) -> None:
    """One notice on stderr, of rank 0, that names each given flag that has no effect."""
    typed = arguments.typed if isinstance(arguments, Arguments) else ()  # empty where the values are not of typed words
    given = [
        flag
        for flag in flags
        if getattr(arguments, flag.destination) != flag.default_for(arguments.command)
        and (not typed or flag.destination in typed)
    ]
    if given and launched_rank(os.environ) == 0:
        lines = "".join(f"  {flag.names[0]}: {flag.inert}\n" for flag in given)
        sys.stderr.write(f"notice: taken, and without effect here:\n{lines}")
