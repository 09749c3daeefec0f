"""What `devices` places on a node, and what `validate` predicts beside published measurements."""

from functools import partial
from pathlib import Path

from sambasim.commands.question import OnPhase, several_replicas
from sambasim.errors import OptionError
from sambasim.hardware.placement import inventory_of, place
from sambasim.hardware.spec import cluster_names, device_names, load_cluster, load_device
from sambasim.ir.mesh import mesh_of
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions, TrainingOptions
from sambasim.pef import read
from sambasim.published.rows import Row, published_rows
from sambasim.report.devices import Placed, row_record, validation
from sambasim.report.tables import Row as Record
from sambasim.simulation.prediction import predict
from sambasim.simulation.sync import SyncPath


def placed(
    pef: Path | None, arch: str | None, num_tiles: int | None, cluster: str | None, replicas: int | None
) -> Placed:
    """By default as many replicas as fit on one node. Raises OptionError for those that do not fit."""
    document = None if pef is None else read(pef)
    compiled, program = ({}, None) if document is None else (document.compile_options, document.program)
    inventory = inventory_of(compiled, arch=arch, tiles=num_tiles, cluster=cluster)
    place_all = partial(place, device=inventory.device, tiles=inventory.tiles, cluster=inventory.cluster)
    of_a_node, mesh = place_all(1).per_full_node, None
    if program is None or program.ranks_of_replica == 1:
        placement = place_all(replicas or of_a_node)
    else:
        ranks = program.ranks_of_replica
        several = several_replicas(program, [replicas] if replicas else [])
        count = ranks * (replicas or (max(1, of_a_node // ranks) if several else 1))
        placement, mesh = place_all(count, noun="rank"), mesh_of(program.mesh, count)
    devices, clusters = [inventory.device], [inventory.cluster]
    if arch is None and pef is None:
        devices = [load_device(name) for name in device_names()]
        clusters = clusters if cluster else [load_cluster(name) for name in cluster_names()]
    return Placed(devices, clusters, inventory, placement, mesh)


def validated(words: str | None, on_phase: OnPhase) -> Record:
    """Predictions for all published rows, or those with `words` in their name. Raises OptionError if there are none."""
    rows = [row for row in published_rows() if words is None or words.lower() in row.name.lower()]
    if not rows:
        names = ", ".join(dict.fromkeys(f'"{row.name}"' for row in published_rows()))
        raise OptionError(f"no published row has {words!r} in its name", remedy=f"one of {names}")
    programs: dict[tuple[str, str, int], Program] = {}
    records = []
    for row in rows:
        key = (row.model, repr(sorted(row.args.items())), row.batch_size)
        if key not in programs:
            on_phase(f"capture {row.name}")
            programs[key] = capture_row(row)
        on_phase(f"predict {row.name}, {row.level}")
        device = load_device(row.device)
        cluster = load_cluster(device.cluster)
        of_row = predict(programs[key], device, row.tiles, row.level, cluster, (row.replicas,), mapped_by=row.mapped_by)
        (step,) = of_row.steps[SyncPath.RDU]
        records.append(row_record(row, row.figure_of(of_row.alone.device_s, step.predicted_s), of_row.alone))
    return validation(records)


def capture_row(row: Row) -> Program:
    """The model of `row`, on tensors without memory."""
    from sambasim.compiler.capture.step import Example
    from sambasim.compiler.front import compile_shapes  # torch, which `devices` does without
    from sambasim.published.models import MODELS

    make, batch = MODELS[row.model]
    training, adamw = TrainingOptions(batch_size=row.batch_size), OptimizerOptions(name="adamw")
    options = CompileOptions(
        optimizer=adamw, training=training, pef_name=row.model, arch=row.device, num_tiles=row.tiles
    )
    return compile_shapes(
        lambda: make(**row.args), lambda model: Example(batch(row.batch_size, **row.args), True), options
    )
