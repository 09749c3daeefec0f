"""`sambasim simulate`: what a device would do with a PEF."""

from pathlib import Path

import click

from sambasim.cli.inspect import one_pef
from sambasim.cli.terminal import show


@click.command("simulate")
@click.argument("pef", required=False)
@click.option("-p", "--pef", "named", help="The same as the argument, as `run` spells it.")
@click.option("--arch", help="The device: sn10, sn30 or sn40. Default: the one that the PEF was compiled for.")
@click.option("--num-tiles", type=int, help="Tiles of it that one replica has. Default: as in the PEF, else all.")
@click.option(
    "--sections", type=click.IntRange(min=0), default=10, show_default=True, help="Slowest sections to print."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line, with every section.")
@click.option(
    "--output-folder",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    help="Where a PEF that is given by name is looked for.",
)
def simulate_command(
    pef: str | None,
    named: str | None,
    arch: str | None,
    num_tiles: int | None,
    sections: int,
    as_json: bool,
    output_folder: Path,
) -> None:
    """Predict the step of one replica on a device: how long, what binds it, and which sections take the time.

    Nothing is measured here. Sections are cut for the device and the tiles that are asked for, as `compile` would cut
    them. `sambasim validate` tells how far such predictions are off.

    \b
    Examples:
      sambasim simulate digits
      sambasim simulate out/digits/digits.pef --arch sn40
      sambasim simulate digits --num-tiles 4 --json
    """
    from sambasim.hardware.budget import budget_of
    from sambasim.hardware.calibration import load_calibration
    from sambasim.hardware.spec import load_device
    from sambasim.pef import locate, read
    from sambasim.report.simulation import Simulated, simulation_json, simulation_report
    from sambasim.simulation.step import predict_step

    document = read(locate(one_pef(pef, named), output_folder))
    compiled = document.compile_options
    device = load_device(arch or str(compiled.get("arch", "sn30")))
    if num_tiles is None and arch is None and isinstance(compiled.get("num_tiles"), int):
        num_tiles = int(str(compiled["num_tiles"]))
    budget = budget_of(device, load_calibration(), num_tiles)
    level = str(compiled.get("opt_level", "o3"))
    step = predict_step(
        document.program, budget, "o0" if level == "o0" else "o1" if level == "o1" else "o3", load_calibration()
    )
    facts = Simulated(document.program, device, num_tiles, level, step)
    if as_json:
        click.echo(simulation_json(facts))
    else:
        show(*simulation_report(facts, sections))
