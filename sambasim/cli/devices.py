"""`sambasim devices`: the simulated machine, and which replica sits where on it."""

from pathlib import Path

import click

from sambasim.cli import shared
from sambasim.cli.terminal import show


@click.command("devices")
@click.option("--cluster", metavar="NAME|FILE", help="Show this one alone. Default: all, replicas on the device's own.")
@click.option("--arch", metavar="NAME|FILE", help="Show this device alone. Default: all, replicas on an SN30.")
@click.option("--num-tiles", type=int, help="Tiles that a replica has. Default: as in the PEF, else all of an RDU.")
@click.option("--replicas", type=click.IntRange(min=1), help="How many there are. Default: as many as a node seats.")
@click.option("-p", "--pef", help="A PEF that says the device and the tiles.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line, in SI base units.")
@shared.output_folder
def devices_command(
    cluster: str | None,
    arch: str | None,
    num_tiles: int | None,
    replicas: int | None,
    pef: str | None,
    as_json: bool,
    output_folder: Path,
) -> None:
    """List devices and clusters, each figure with its source, and the seats of replicas on a cluster.

    Where nobody published a figure, its source says that it is an estimate, or how it was derived. A run with
    `--cluster` has the same seats, on one simulated node for each node that MPI finds.

    \b
    Examples:
      sambasim devices
      sambasim devices --arch sn30 --num-tiles 4 --replicas 20
      sambasim devices --pef digits --cluster farm.toml --json
    """
    from sambasim.hardware.budget import budget_of, load_calibration
    from sambasim.hardware.placement import inventory_of, place
    from sambasim.hardware.spec import cluster_names, device_names, load_cluster, load_device
    from sambasim.pef import locate, read
    from sambasim.report.devices import inventory_json, inventory_report

    compiled = {} if pef is None else read(locate(pef, output_folder)).compile_options
    inventory = inventory_of(compiled, arch=arch, tiles=num_tiles, cluster=cluster)
    device, tiles = inventory.device, inventory.tiles
    budget = budget_of(device, load_calibration(), tiles)
    of_a_node = place(1, device, tiles, inventory.cluster).per_full_node
    placement = place(replicas or of_a_node, device, tiles, inventory.cluster)
    one_device = arch is not None or pef is not None
    devices = [device] if one_device else [load_device(name) for name in device_names()]
    one_cluster = one_device or cluster is not None
    clusters = [inventory.cluster] if one_cluster else [load_cluster(name) for name in cluster_names()]
    if as_json:
        print(inventory_json(devices, clusters, inventory, placement))
    else:
        show(*inventory_report(devices, clusters, inventory, budget, placement))
