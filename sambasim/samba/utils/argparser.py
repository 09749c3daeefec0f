"""The settings of an app: `parse_app_args` for a command line, and the same from a YAML file or from keywords."""

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist
import yaml

from sambasim.errors import LaunchError, OptionError, failing_with
from sambasim.runtime.machine.launcher import check_compiles_alone, find_launcher
from sambasim.runtime.machine.process import bring_up, bring_up_on_demand, take_down
from sambasim.samba.ending import communicator
from sambasim.samba.flags import COMMANDS, COMPILE, FLAGS, MEASURING, RUN, TEST, WITH_PEF
from sambasim.samba.notices import checks_keywords, say_once
from sambasim.samba.process import current, print_notice, type_error
from sambasim.samba.utils.parser import (
    AddArguments,
    Arguments,
    CommandParser,
    command_parser,
    overview,
    parse,
    program_name,
)


class SNConfig(argparse.Namespace):
    """Settings from any keywords, `SNConfig(batch_size=32, pef_name="net")`, for `samba.session.setup`."""


class SambaConfig(Arguments):
    """Arguments made from keywords, `SambaConfig("compile", batch_size=32, hidden=64)`, or copied from those that
    `parse_app_args` returned, `SambaConfig(args, SNConfig)`; an SNConfig adds settings that `args` does not have. Flags
    of the library are checked, and have their defaults. Raises OptionError for an unknown command or value."""

    def __init__(self, command: str | argparse.Namespace, settings: object = None, /, **values: object) -> None:
        super().__init__()
        self.parser = CommandParser()
        if isinstance(settings, argparse.Namespace):
            vars(self).update(vars(settings))
        if isinstance(command, argparse.Namespace):
            vars(self).update(vars(command), **values)
        else:
            vars(self).update(vars(_from_values(command, values)))

    def get_all_params(self) -> dict[str, object]:
        return dict(vars(self))


@checks_keywords("parse_app_args")
def parse_app_args(
    argv: Sequence[str] | None = None,
    dev_mode: bool = False,
    common_parser_fn: AddArguments | None = None,
    compile_parser_fn: AddArguments | None = None,
    test_parser_fn: AddArguments | None = None,
    run_parser_fn: AddArguments | None = None,
) -> argparse.Namespace:
    """Parses the command line of an app: a command, the flags of the library, and the app's.

    argv: the words after the name of the program, or with it; None for the command line of this process
    common_parser_fn and the others: add the app's flags of every command, or of one

    Returns a Namespace with `command`, every flag of the library (also those of other commands, with their defaults),
    and the app's flags of this command. A flag of the app replaces the library's.

    With --data-parallel, on every command but compile, it is collective: it connects the ranks, initializes
    `torch.distributed`, and sets `world_size` to the number of ranks, unless the app has a flag of that name.
    Raises OptionError for a wrong command line; LaunchError and MachineError if the ranks cannot be connected."""
    if argv is not None and (isinstance(argv, str) or not isinstance(argv, Sequence)):
        remedy = "parse_app_args(argv=sys.argv[1:], …)"
        raise type_error(OptionError, "argv of parse_app_args must be a list of words", argv, remedy)
    words = sys.argv if argv is None else [str(word) for word in argv]
    with_program = len(words) > 1 and words[0] not in COMMANDS and words[1] in COMMANDS
    words = words[1:] if with_program or words[:1] == sys.argv[:1] else words
    if words and words[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        sys.exit(0)
    command = _checked_command(words[0] if words else None)
    of_command = {COMPILE: compile_parser_fn, TEST: test_parser_fn, RUN: run_parser_fn}

    def parser_of(command: str) -> CommandParser:
        return command_parser(command, [add for add in (common_parser_fn, of_command.get(command)) if add is not None])

    arguments = parse(parser_of(command), command, words[1:])
    arguments.parser.of_run = partial(parser_of, RUN)
    _enter(arguments)
    return arguments


def parse_yaml_to_args(path: str | os.PathLike[str], args_cli: argparse.Namespace | str | None = None) -> SambaConfig:
    """Does what `parse_app_args` does, from a YAML file of flags and values, alone or beside a command line.

    path: a file of `name: value`, of flags and the app's own, and of `command: run`; what is below `run:` is for run
    args_cli: what `parse_app_args` returned: its command and typed flags win over the file, and the file over
        defaults; or a command, which wins over the file's

    Raises OptionError, with the file, for a wrong value; otherwise as `parse_app_args`."""
    file, content = os.fspath(path), _read_yaml(path)
    named = content.pop("command", None)
    cli = args_cli if isinstance(args_cli, argparse.Namespace) else argparse.Namespace(command=args_cli)
    chosen = _checked_command(cli.command or (None if named is None else str(named)))
    of_commands = {name: content.pop(name) for name in COMMANDS if isinstance(content.get(name), dict)}
    values = content | _named_values(of_commands.get(chosen, {}), f"{file}, {chosen}")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    parser = cli.parser if isinstance(cli, Arguments) else CommandParser()
    for name, default in vars(cli).items():
        if name in parser.typed:
            values.pop(name, None)
        elif isinstance(values.get(name), str) and isinstance(default, float):
            with suppress(ValueError):
                values[name] = float(str(values[name]))  # YAML reads 1e-3 as text
    try:
        config = SambaConfig(chosen, **{"pef": getattr(cli, "pef", None), **values})
    except OptionError as error:
        raise OptionError(error.what, where=file, remedy=error.remedy) from None
    for name, value in vars(cli).items():
        if name not in values:
            setattr(config, name, value)
    config.command, config.parser = chosen, parser
    _enter(config)
    return config


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, object]:
    file = Path(path)
    try:
        with failing_with(OptionError, f"the file {file} cannot be read", "check the path"):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        what = getattr(error, "problem", None) or "it holds a character that is not allowed"
        where = str(file) if mark is None else f"{file}:{mark.line + 1}"
        raise OptionError(f"this is not plain YAML: {what}", where=where, remedy="correct that line") from None
    return {} if content is None else _named_values(content, str(file))


def _named_values(content: object, where: str) -> dict[str, object]:
    """`content`, which must be a mapping, with text as keys, which YAML may have read as numbers."""
    if not isinstance(content, dict):
        what = f"this YAML has {content!r} instead of names with values"
        raise OptionError(what, where=where, remedy="one `name: value` in each line")
    return {str(name): value for name, value in content.items()}


def _checked_command(word: str | None) -> str:
    if word in COMMANDS:
        return str(word)
    what = "a command is missing" if word is None else f"{word!r} is not a command"
    raise OptionError(f"{what}; commands are {', '.join(COMMANDS)}", remedy=f"{program_name()} compile --help")


def _from_values(command: str, values: Mapping[str, object]) -> argparse.Namespace:
    """The arguments of a command line with these `values`; values that are not flags are added to it."""
    command = _checked_command(command)
    spelled = {name.replace("-", "_"): value for name, value in values.items()}
    words: list[str] = []
    for flag in FLAGS:
        if command in flag.commands and spelled.get(flag.destination) is not None:
            name, value = flag.names[0], spelled.pop(flag.destination)
            if flag.convert is not None:
                words += [name, *map(str, value)] if isinstance(value, list | tuple) else [f"{name}={value}"]
            elif isinstance(value, bool):
                words += [name] * value
            else:
                raise OptionError(f"{name} must be true or false, not {value!r}", remedy=f"{flag.destination}: true")
    namespace = parse(command_parser(command, ()), command, words)
    for name, value in spelled.items():
        if value is not None or not hasattr(namespace, name):
            setattr(namespace, name, value)
    return namespace


def _enter(arguments: Arguments) -> None:
    """Makes `arguments` those of this process, prints a notice of flags without an effect, sets the log level, and
    connects the ranks, which is collective."""
    command, typed = arguments.command, arguments.parser.typed  # nothing is typed if they come from keywords
    library = [one for one in FLAGS if command in one.commands and one.destination not in arguments.parser.of_app]
    given = {one.destination: one for one in library if getattr(arguments, one.destination) != one.default_for(command)}
    levels = [f"--{level}" for level in ("o0", "o1", "o3") if level in given]
    if len(levels) > 1:
        raise OptionError(f"{' and '.join(levels)} exclude each other", remedy=f"leave out all but {levels[-1]}")
    if "log_level" in given:
        logging.getLogger("sambaflow").setLevel(arguments.log_level.upper())  # that of sambaflow.logging.samba_logger
    shown = (flag for name, flag in given.items() if flag.inert and (not typed or name in typed))
    if inert := [f"  {flag.names[0]}: {flag.inert}" for flag in shown]:
        print_notice("\n".join(["accepted, without an effect here:", *inert]))
    rounds = arguments.dtype == "bf16" and not arguments.inference
    # An RDU computes in bf16 by default, so existing command lines have this flag without --dtype.
    if "enable_stoc_rounding" in given and not rounds:
        arguments.enable_stoc_rounding = False
        say_once("--enable-stoc-rounding", "only optimizer steps with --dtype bf16 round stochastically")
    if command == COMPILE:
        check_compiles_alone()
    launcher, context = find_launcher(), current()
    context.command, context.arguments = command, arguments
    arguments.parsed_batch_size = None if "batch_size" in arguments.parser.of_app else arguments.batch_size
    is_single = launcher is None or launcher.world_size == 1  # such apps use torch.distributed too
    context.alone = command in WITH_PEF and is_single and not arguments.data_parallel
    if context.alone:
        bring_up_on_demand(lambda: communicator() if current().alone else None)
    if command in WITH_PEF and arguments.data_parallel:
        _connect(arguments)


@atexit.register
def _note_unmeasured() -> None:
    """A notice of a command that measures and has run no step of a PEF."""
    context = current()
    is_told = context.has_run or context.has_left or hasattr(sys, "last_value")
    if context.command in MEASURING and not is_told:
        remedy = "samba.utils.common.common_app_driver(args, model, inputs, optim) for all commands but run and test"
        print_notice(f"{context.command} has measured nothing\n  try:   {remedy}")


def _connect(arguments: Arguments) -> None:
    """Connects the ranks, initializes `torch.distributed`, and sets `world_size`, the least number of replicas, to the
    number of ranks, unless it is the app's own. Collective. Raises LaunchError, and what `communicator` raises."""
    world = communicator()
    if "world_size" not in arguments.parser.of_app:
        started, wanted = world.world_size, arguments.world_size
        if started < wanted:
            replicas = "1 was started" if started == 1 else f"{started} were started"
            what = f"-ws {wanted} asks for at least {wanted} replicas, and {replicas}"
            raise LaunchError(what, remedy=f"mpirun -np {wanted} before the same command, or a smaller -ws")
        arguments.world_size = started
    if not dist.is_initialized():
        bring_up(world)
        atexit.register(take_down)
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        what = f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, and MPI says rank "
        what += f"{world.rank} of {world.world_size}: the app has started torch.distributed by itself"
        remedy = "leave init_process_group out of the app: parse_app_args calls it when --data-parallel is given"
        raise LaunchError(what, remedy=remedy)
