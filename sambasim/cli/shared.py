"""What commands share: click options, most of them made from `options.flags`, and imports of large packages."""

import gc
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from sambasim.bounded import one_line
from sambasim.errors import MachineError, OptionError

if TYPE_CHECKING:
    from sambasim.options.flags import Command, Setting

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
_FIRST_PANEL = "Most used"
_ONE_PEF = "name one PEF: a path, or a name found as out/NAME/NAME.pef"


class PanelOption(click.Option):
    def __init__(self, *args: Any, panel: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.panel = panel


class PanelCommand(click.Command):
    """A command whose help shows its options in panels, with the `first` ones on top."""

    def __init__(self, *args: Any, first: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first = first

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from sambasim.options.flags import OTHER, PANELS

        panels = (_FIRST_PANEL, *PANELS)
        records: dict[str, list[tuple[str, str]]] = {panel: [] for panel in panels}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                is_first = not set(self._first).isdisjoint(parameter.opts)
                records[_FIRST_PANEL if is_first else getattr(parameter, "panel", OTHER)].append(record)
        for panel in filter(records.get, panels):
            with formatter.section(panel):
                formatter.write_dl(records[panel])


def field_options(command: "Command") -> Callable[[F], F]:
    """A decorator that gives a command one option for each flag of `sambasim.options.flags`."""
    from sambasim.options.flags import flags_of

    options = [option for setting in flags_of(command).values() for option in _options(setting)]

    def decorated(function: F) -> F:
        for option in reversed(options):  # the order in which decorators are applied
            function = option(function)
        return function

    return decorated


def _options(setting: "Setting") -> Iterator[Callable[[Any], Any]]:
    """The option of a flag, or one for each of its choices. None is its value where it is not given."""
    flag, kind = setting.flag, setting.kind
    for choice, text in flag.choices.items():
        shown = f"{text}  [default]" if choice == setting.default else text
        yield click.option(
            f"--{choice}", setting.keyword, flag_value=choice, help=shown, cls=PanelOption, panel=flag.panel
        )
    if flag.choices:
        return
    # With any default, None too, click would forget that an option is required.
    extra: dict[str, Any] = (
        {"required": True} if setting.default is ... and "." not in setting.name else {"default": None}
    )
    if kind is bool:
        extra["is_flag"] = True
    elif get_origin(kind) is Literal:
        extra["type"] = click.Choice(get_args(kind), case_sensitive=False)
    else:
        extra["type"] = FILE if kind is Path else kind
    if flag.bare is not None:
        extra |= {"is_flag": False, "flag_value": flag.bare}
    default = "as compiled" if setting.name.startswith("overrides.") else flag.default or _shown_default(setting)
    text = f"{flag.help}  [default: {default}]" if default else flag.help
    if setting.name == "pef":
        extra["shell_complete"] = pef_names
    yield click.option(
        *flag.names, setting.keyword, metavar=flag.metavar, help=text, cls=PanelOption, panel=flag.panel, **extra
    )


def _shown_default(setting: "Setting") -> str | None:
    if setting.default in (None, False, ...):
        return None
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def pef_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For completion: the names of the PEFs in the output folder; without one that fits, any file."""
    folder = Path(ctx.params.get("output_folder") or "out")
    found = [] if "/" in incomplete else folder.glob(f"{escape(incomplete)}*/*.pef")
    names = sorted(path.stem for path in found if path.stem == path.parent.name)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def no_argument(flag: str) -> Callable[[F], F]:
    """A decorator for a command without arguments: the error about one names `flag`, which takes its value."""

    def refuse(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> None:
        if given:
            what = f"{ctx.command_path} takes no argument, and {one_line(given[0])!r} is one"
            raise OptionError(what, remedy=f"use {flag} {shlex.quote(one_line(given[0]))}")

    # Eager: a required option that is missing is the next error.
    argument = click.argument("words", metavar="", nargs=-1, is_eager=True, expose_value=False, callback=refuse)
    return lambda function: argument(function)


def pef_argument(function: F) -> F:
    """A decorator for a command with the required flag `--pef NAME`: NAME may also be an argument."""

    def take(ctx: click.Context, parameter: click.Parameter, given: str | None) -> None:
        if given is not None:
            ctx.default_map = {"pef": given}

    # Eager: known before the flag asks for its default.
    argument = click.argument(
        "given",
        metavar="[PEF]",
        required=False,
        is_eager=True,
        expose_value=False,
        callback=take,
        shell_complete=pef_names,
    )
    return argument(function)


def check_one_pef() -> None:
    """Raises UsageError if a command with `pef_argument` was given an argument and the flag."""
    ctx = click.get_current_context()
    if ctx.default_map and ctx.get_parameter_source("pef") is ParameterSource.COMMANDLINE:
        raise click.UsageError(_ONE_PEF, ctx)


pef_flag = click.option(
    "-p", "--pef", "named", shell_complete=pef_names, help="The same as the argument, spelled as in `run`."
)

output_folder = click.option(
    "--output-folder",
    type=FILE,
    default=Path("out"),
    show_default=True,
    help="Folder in which a PEF is found by name.",
)

arch = click.option("--arch", help="Device: sn10, sn30, sn40 or a TOML file.  [default: as compiled]")

num_tiles = click.option(
    "--num-tiles", type=int, help="Tiles of the device that one replica has.  [default: as compiled, else all]"
)

cluster = click.option("--cluster", help="Nodes and links: a name that `sambasim devices` lists, or a TOML file.")


def one_pef(argument: str | None, flag: str | None) -> str:
    given = [name for name in (argument, flag) if name is not None]
    if len(given) != 1:
        raise click.UsageError(_ONE_PEF, click.get_current_context())
    return given[0]


def write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = "free disk space there, or name another place"
        raise MachineError(f"{file} cannot be written: {error.strerror}", remedy=remedy) from error


def write_all(texts: Mapping[Path, str], *, quiet: bool = False) -> None:
    """Write each file, and, unless `quiet`, say so."""
    for file, text in texts.items():
        write(file, text)
        hint = ": open it in a browser" if file.suffix == ".html" else ""
        if not quiet:
            print(f"{file} written{hint}")


@contextmanager
def kept_imports() -> Iterator[None]:
    """Exempt all objects that exist at the end of the block from garbage collection. Only for a command that has not
    yet run user code: the globals of a running script would never be collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
