"""`sambasim validate`: predictions against what others have measured."""

import click

from sambasim.cli.terminal import show


@click.command("validate")
@click.option("--only", metavar="WORDS", help="Only rows whose name has these words.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def validate_command(only: str | None, as_json: bool) -> None:
    """Predict every published measurement of a device, and print how far off that is.

    Each model is captured on tensors without memory, cut into sections for the row's device and tiles, and priced. All
    rows take one to two minutes.

    \b
    Examples:
      sambasim validate
      sambasim validate --only "1 layer"
    """
    from sambasim.cli.progress import phases
    from sambasim.errors import OptionError
    from sambasim.published.rows import published_rows
    from sambasim.report.validation import validation_json, validation_table

    rows = [row for row in published_rows() if only is None or only.lower() in row.name.lower()]
    if not rows:
        names = ", ".join(dict.fromkeys(f'"{row.name}"' for row in published_rows()))
        raise OptionError(f"no published row has {only!r} in its name", remedy=f"they are {names}")
    with phases(quiet=as_json) as hear:
        from sambasim.cli.holding import hold

        held = hold(rows, hear)
    if as_json:
        print(validation_json(held))
    else:
        show(validation_table(held))
