"""Predict the published rows."""

from collections.abc import Callable, Mapping, Sequence

from sambasim.compiler.shapes import compile_shapes
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions, TrainingOptions
from sambasim.published.models import MODELS
from sambasim.published.rows import Row
from sambasim.simulation.prediction import predict
from sambasim.simulation.step import MODEL_KINDS
from sambasim.simulation.sync import SyncPath
from sambasim.simulation.validation import Held


def hold(rows: Sequence[Row], hear: Callable[[str], None]) -> list[Held]:
    """Each of `rows` with its prediction. `hear` is told what is under way; a model is captured once for all rows that
    have it."""
    programs: dict[tuple[str, str, int], Program] = {}
    held = []
    for row in rows:
        key = (row.model, repr(sorted(row.args.items())), row.batch_size)
        if key not in programs:
            hear(f"capture {row.name}")
            programs[key] = _captured(row)
        hear(f"predict {row.name}, {row.level}")
        device = load_device(row.device)
        found = predict(programs[key], device, row.tiles, row.level, load_cluster(device.cluster), (row.replicas,))
        step, (scaled,) = found.alone, found.scaled[SyncPath.RDU]
        sections = sum(section.kind in MODEL_KINDS for section in step.sections)
        predicted = row.figure_of(step.device_s, scaled.predicted_s)
        held.append(Held(row, predicted, None if row.host_s is None else step.host_s, sections))
    return held


def _captured(row: Row) -> Program:
    args: Mapping[str, bool | int | float] = row.args
    make, batch = MODELS[row.model]
    options = CompileOptions(
        optimizer=OptimizerOptions(name="adamw"),
        training=TrainingOptions(batch_size=row.batch_size),
        pef_name=row.model,
        arch=row.device,
        num_tiles=row.tiles,
    )
    return compile_shapes(
        lambda: make(**args), lambda model: (batch(row.batch_size, **args), True), options, any_loss=True
    )
