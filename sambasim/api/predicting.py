"""Predict with a PEF, and predict what a device would do, in Python."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from torch import Tensor, nn

from sambasim.api.given import data_of
from sambasim.api.pef import Pef, opened
from sambasim.api.ranks import command, connected, speaks_python, supervised
from sambasim.api.training import Run, options_of, tensors_of
from sambasim.bounded import MOST_REPLICAS
from sambasim.commands.question import Question, counts, paths, predicted
from sambasim.commands.run_checks import checked_pef
from sambasim.errors import OptionError
from sambasim.records.metrics import InferenceRecord
from sambasim.report.simulation import simulation_json, simulation_report
from sambasim.report.tables import Shown, Tables
from sambasim.runtime.inference import InferenceJob
from sambasim.terminal.output import scores
from sambasim.units import format_seconds

_SLOWEST = 10


class Prediction(Shown):
    """The outputs of the model for all samples, in the order of the data, and the mean loss and accuracy where samples
    have labels. `record` is what `sambasim run --inference --json` prints."""

    def __init__(self, outputs: list[Tensor], record: InferenceRecord) -> None:
        self.outputs = outputs
        self.record = record
        self.loss = record.loss
        self.accuracy = record.accuracy

    def parts(self) -> list[RenderableType]:
        return ["\n".join([repr(self), *(f"notice: {notice}" for notice in self.record.notices)])]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{list(output.shape)}" for output in self.outputs)
        facts = [f"{self.record.samples} samples in {format_seconds(self.record.prediction_s)} (measured)"]
        facts += [f"outputs {shapes}"] if shapes else []
        facts += scores(self.loss, self.accuracy)
        return f"Prediction({', '.join(facts)})"


@speaks_python()
def predict(
    pef: Pef | str | Path,
    data: object = None,
    *,
    weights: Run | nn.Module | Mapping[str, Tensor] | str | Path | None = None,
    **options: Any,
) -> Prediction:
    """Run the model of a PEF on a data set, in evaluation mode. Under mpirun, ranks share the samples.

    - `data`: as for `run`; labels may be left out. Of a pair, the second is predicted
    - `weights`: a run, a model, a `state_dict`, or a file of `--save`; None for those in the PEF
    - `options`: flags of `sambasim run --inference` by keyword, such as `threads=4`, and `set={"data.shuffle": False}`

    Raises OptionError, DataError, and WeightsError for weights of another model.
    """
    world, given = connected(), opened(pef)
    own = {"weights": Path(weights)} if isinstance(weights, str | Path) else {}
    instead = {"pef": "the first argument", "json": "the record of the result", "emulate_replicas": "for training"}
    chosen = options_of(given, data, options, instead, inference=True, **own)
    path, mesh = checked_pef(chosen, Path("out"), world, command())
    live = None if isinstance(data, str | Path) else data_of(data)
    held = None if isinstance(weights, str | Path) else _tensors_of(weights)
    with supervised(world, path, mesh, chosen) as activity:
        job = InferenceJob(path, chosen, world, activity, live, held, keeps_outputs=True)
        record = job.run()
        outputs = world.broadcast_object(job.outputs)
    return Prediction(outputs, record)


def _tensors_of(weights: object) -> Mapping[str, Tensor] | None:
    if isinstance(weights, Run):
        return weights.weights
    if isinstance(weights, nn.Module):
        return tensors_of(weights)
    if isinstance(weights, Mapping):
        return {name: value for name, value in weights.items() if isinstance(value, Tensor)}  # it may have more
    if weights is None:
        return None
    raise OptionError(
        f"weights is of type {type(weights).__name__}", remedy="a run, a model, a state_dict, or a file of --save"
    )


class Simulation(Tables):
    """What is predicted for a device, one record for each batch size or number of ranks, as `sambasim simulate --json`
    prints it. Nothing of it is measured."""

    record: list[dict[str, Any]]

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step, of the first record."""
        return float(self.record[0]["predicted_s"])


@speaks_python()
def simulate(
    pef: Pef | str | Path,
    *,
    arch: str | None = None,
    num_tiles: int | None = None,
    level: str | None = None,
    batch_sizes: int | Sequence[int] = (),
    replicas: int | Sequence[int] = 1,
    sync: str | Sequence[str] = "host,rdu",
    cluster: str | None = None,
) -> Simulation:
    """Predict a training step on a device: its time, its limits, its scaling. Nothing is run.

    - `pef`: a PEF, or a config (`"net.toml"`) or a model (`"net.py:Net"`), which is captured without memory
    - `arch`, `num_tiles`, `level`, `batch_sizes`: the device, tiles of a replica, `"o0"` to `"o3"`, samples of a
      replica; by default as compiled
    - `replicas`, `sync`, `cluster`: numbers of replicas, by which paths they sync, and the machine

    Raises OptionError, and PefError for a PEF that is not valid.
    """
    question = Question(
        subject=str(pef.path if isinstance(pef, Pef) else pef),
        output_folder=Path("out"),
        arch=arch,
        num_tiles=num_tiles,
        level=level,
        batch_sizes=counts(batch_sizes or None, "batch_sizes"),
        replicas=counts(replicas or None, "replicas", MOST_REPLICAS),
        sync=paths(sync if isinstance(sync, str) else ",".join(sync)),
        cluster=cluster,
    )
    predictions = predicted(question, lambda phase: None)
    lines = [line for prediction in predictions for line in simulation_json(prediction, question.sync)]
    return Simulation(simulation_report(predictions, question.sync, _SLOWEST), list(map(json.loads, lines)))
