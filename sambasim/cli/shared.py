"""What commands share: click options, most of them made from flags of fields, output, and imports of large packages."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce, wraps
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from sambasim.errors import LARGEST_COUNT, MOST_REPLICAS, MachineError, failing_with, say, say_json
from sambasim.options.flag import DATA, OTHER, PANELS
from sambasim.terminal.output import show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sambasim.options.flag import Setting

F = TypeVar("F", bound=Callable[..., Any])

FILE, COUNT, REPLICAS = click.Path(path_type=Path), click.IntRange(1, LARGEST_COUNT), click.IntRange(1, MOST_REPLICAS)
_FIRST_PANEL = "Most used"
_PEF = "The PEF: a path, or NAME for OUT/NAME/NAME.pef."


class PanelOption(click.Option):
    """An option in a `panel` of the help, which may come from `text`, when it is needed."""

    def __init__(self, *args: Any, panel: str = OTHER, text: Callable[[], str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.panel, self._text = panel, text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        if self._text is not None:
            self.help = self._text()
        return super().get_help_record(ctx)


class PanelCommand(click.Command):
    """A command whose help shows its options in panels, with the `first` ones on top."""

    def __init__(self, *args: Any, first: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first = first

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {panel: [] for panel in (_FIRST_PANEL, *PANELS)}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                is_first = not set(self._first).isdisjoint(parameter.opts)
                records[_FIRST_PANEL if is_first else getattr(parameter, "panel", OTHER)].append(record)
        for panel in filter(records.get, records):
            with formatter.section(panel):
                formatter.write_dl(records[panel])


def field_options(flags: "Mapping[str, Setting]") -> Callable[[F], F]:
    """A decorator that gives a command one option for each of these flags, but for `--pef`, which `pef` makes."""
    options = [option for setting in flags.values() if setting.name != "pef" for option in _options(setting)]
    # Reversed, as decorators are applied.
    return lambda function: reduce(lambda command, option: option(command), reversed(options), function)


def _options(setting: "Setting") -> Iterator[Callable[[Any], Any]]:
    """The option of a flag, or one for each of its choices. None is its value where it is not given."""
    flag, kind = setting.flag, setting.kind
    option = partial(click.option, cls=PanelOption, panel=setting.panel)
    for choice, text in flag.choices.items():
        shown = f"{text}  [default]" if choice == setting.default else text
        yield option(f"--{choice}", setting.keyword, flag_value=choice, help=shown)
    if flag.choices:
        return
    extra: dict[str, Any] = {"is_flag": True} if kind is bool else {"type": FILE if kind is Path else kind}
    if get_origin(kind) is Literal:
        extra = {"type": click.Choice(get_args(kind), case_sensitive=False)}
    if flag.bare is not None:
        extra |= {"is_flag": False, "flag_value": flag.bare}
    text_of = partial(_help, setting)
    yield option(*flag.names, setting.keyword, metavar=flag.metavar, text=text_of, default=None, **extra)


def _help(setting: "Setting") -> str:
    default = setting.flag.default
    if setting.name.startswith("overrides."):
        default = "as compiled"
    elif default is None and setting.default not in (None, False, ...):
        default = f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
    return f"{setting.help}  [default: {default}]" if default else setting.help


def pef_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For completion: the names of the PEFs in the output folder; without one that fits, any file."""
    folder = Path(ctx.params.get("output_folder") or "out")
    files = [] if "/" in incomplete else folder.glob(f"{escape(incomplete)}*/*.pef")
    names = sorted(path.stem for path in files if path.stem == path.parent.name)
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def pef(
    keyword: str = "pef", metavar: str = "[PEF]", text: str = _PEF, *, required: bool = True
) -> Callable[[F], Callable[..., Any]]:
    """A decorator for a command about a PEF, an argument or the flag `--pef`, which the command gets as `keyword`; and
    the folder in which it is found by name."""

    def decorator(function: F) -> Callable[..., Any]:
        @wraps(function)
        def command(*, argument: str | None, **options: Any) -> Any:
            named = [name for name in (argument, options[keyword]) if name is not None]
            if len(named) > 1 or (required and not named):
                what = "name one PEF: a path, or a name found as out/NAME/NAME.pef"
                raise click.UsageError(what, click.get_current_context())
            return function(**{**options, keyword: named[0] if named else None})

        shown: dict[str, Any] = {"cls": PanelOption, "panel": DATA, "metavar": "PEF", "shell_complete": pef_names}
        with_flag = click.option("-p", "--pef", keyword, help=text, **shown)(output_folder()(command))
        return click.argument("argument", metavar=metavar, required=False, shell_complete=pef_names)(with_flag)

    return decorator


def overrides(text: str, panel: str = OTHER) -> Callable[[F], F]:
    option = partial(click.option, "--set", "overrides", multiple=True, metavar="NAME=VALUE")
    return option(help=text, cls=PanelOption, panel=panel)


def output_folder(text: str = "Folder in which a PEF is found by name.") -> Callable[[F], F]:
    option = partial(click.option, "--output-folder", type=FILE, default=Path("out"), show_default=True)
    return option(help=text, cls=PanelOption, panel=DATA)


def as_json(text: str) -> Callable[[F], F]:
    return click.option("--json", "as_json", is_flag=True, help=text)


def _in_lower_case(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """The name of a device, in any case; a file as it is."""
    return name if name is None or name.endswith(".toml") or "/" in name else name.lower()


_TILES = "Tiles of the device that one replica has.  [default: as compiled, else all]"
_ARCH = "Device: sn10, sn20, sn30, sn40 or a TOML file.  [default: as compiled]"
arch = click.option("--arch", callback=_in_lower_case, help=_ARCH)
num_tiles = click.option("--num-tiles", type=int, help=_TILES)
cluster = click.option("--cluster", help="Nodes and links: a name that `sambasim devices` lists, or a TOML file.")


def answer(as_json: bool, line: Callable[[], str], parts: "Callable[[], Iterable[RenderableType]]") -> None:
    """Print the line that `--json` asks for, else show text and tables."""
    if as_json:
        say_json(line())
    else:
        show(*parts())


def write_all(texts: Mapping[Path, str], *, quiet: bool = False) -> None:
    """Write each file, and, unless `quiet`, say so."""
    from sambasim.files import write_whole

    for file, text in texts.items():
        with failing_with(MachineError, f"{file} cannot be written", "free disk space there, or name another place"):
            write_whole(file, text)
        if not quiet:
            say(f"{file} written{': open it in a browser' * (file.suffix == '.html')}")


@contextmanager
def kept_imports() -> Iterator[None]:
    """Exempt what exists at its end from garbage collection: not after user code, whose globals would stay for ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
