"""Options that several commands have."""

from pathlib import Path

import click

pef_flag = click.option("-p", "--pef", "named", help="The same as the argument, as `run` spells it.")

output_folder = click.option(
    "--output-folder",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    help="Where a PEF that is given by name is looked for.",
)

arch = click.option(
    "--arch", help="The device: sn10, sn30, sn40, or a TOML file. Default: the one it was compiled for."
)

num_tiles = click.option(
    "--num-tiles", type=int, help="Tiles of it that one replica has. Default: as compiled, else all."
)

cluster = click.option("--cluster", help="Nodes and links: a name that `sambasim devices` lists, or a TOML file.")


def one_pef(argument: str | None, flag: str | None) -> str:
    """The PEF that was named, by argument or by `--pef`. Raises UsageError if none or both were given."""
    given = [name for name in (argument, flag) if name is not None]
    if len(given) != 1:
        raise click.UsageError(
            "name one PEF: a path, or a name found as out/NAME/NAME.pef", click.get_current_context()
        )
    return given[0]
