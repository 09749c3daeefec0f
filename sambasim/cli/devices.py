"""`sambasim devices` and `validate`: the devices that predictions are about, and how good they are."""

from pathlib import Path

import click

from sambasim.bounded import MOST_REPLICAS
from sambasim.cli import shared
from sambasim.terminal.output import phases, show


@click.command("devices")
@shared.pef(required=False, text="Take device and tiles from this PEF.")
@click.option("--cluster", metavar="NAME|FILE", help="Show only this cluster.  [default: all]")
@click.option("--arch", metavar="NAME|FILE", help="Show only this device.  [default: all]")
@click.option("--num-tiles", type=int, help="Tiles that one replica has.  [default: as in the PEF, else all of an RDU]")
@click.option(
    "--replicas",
    type=click.IntRange(1, MOST_REPLICAS),
    help="Number of replicas.  [default: as many as fit on one node]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line, in SI base units.")
@shared.output_folder
def devices_command(
    pef: str | None,
    cluster: str | None,
    arch: str | None,
    num_tiles: int | None,
    replicas: int | None,
    as_json: bool,
    output_folder: Path,
) -> None:
    """List devices and clusters, and the placement of replicas on RDUs, or of the ranks of a PEF's replicas.

    Each figure has its source. If nobody published it, the source is "estimate", or how it was derived. A run with
    `--cluster` has the same placement, on one simulated node for each node of the MPI job.

    \b
    Examples:
      sambasim devices
      sambasim devices --arch sn30 --num-tiles 4 --replicas 20
      sambasim devices --pef digits --cluster farm.toml --json
    """
    from sambasim.commands.devices import placed
    from sambasim.pef import locate
    from sambasim.report.devices import inventory_json, inventory_report

    found = placed(None if pef is None else locate(pef, output_folder), arch, num_tiles, cluster, replicas)
    if as_json:
        print(inventory_json(found))
    else:
        show(*inventory_report(found))


@click.command("validate")
@click.argument("words", required=False)
@click.option("--only", metavar="WORDS", help="Only rows with these words in their name, as the argument.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of a table.")
def validate_command(words: str | None, only: str | None, as_json: bool) -> None:
    """Compare predictions with published measurements.

    Each model is captured on tensors without memory and predicted on the device and tiles of the measurement. All rows
    take one to two minutes.

    \b
    Examples:
      sambasim validate
      sambasim validate --only "1 layer"
    """
    from sambasim.commands.devices import validated
    from sambasim.report.devices import validation_table

    with phases(quiet=as_json) as on_phase:
        record = validated(only or words, on_phase)
    if as_json:
        print(record.model_dump_json())
    else:
        show(validation_table(record))
