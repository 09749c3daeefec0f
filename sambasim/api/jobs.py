"""Train a PEF, predict with it, and predict what a device would do, in Python."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import RenderableType
from torch import Tensor, nn

from sambasim.api.given import data_of, metrics_of
from sambasim.api.pef import Pef, opened, unwrapped
from sambasim.api.ranks import command, connected, said, speaks_python, supervised
from sambasim.commands.question import predicted, question_of
from sambasim.commands.run import train
from sambasim.compiler.capture.tensors import held_by
from sambasim.data.datasets import Collate, Given, collate_of
from sambasim.errors import DataError, LaunchError, OptionError, WeightsError
from sambasim.options.given import given_settings
from sambasim.options.run import RunOptions, run_options
from sambasim.records.metrics import EvaluationRecord, InferenceRecord, StepRecord, SummaryRecord
from sambasim.report.simulation import simulation_json, simulation_report
from sambasim.report.summaries import step_times
from sambasim.report.tables import Shown, Tables, sparkline
from sambasim.runtime.inference import infer
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.callbacks import Callback
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.watch.supervisor import StopSignals
from sambasim.terminal.output import scores
from sambasim.terminal.progress import RunProgress
from sambasim.units import counted, format_seconds


@dataclass(repr=False, eq=False)
class Run(Shown):
    """A run that has ended: the loss of each step, and by name what is logged beside it, the evaluations, the trained
    weights by the names of the model's `state_dict`, their averages `ema` if the PEF keeps them, and the `summary` of
    `sambasim run --json`. With `load_best`, the weights are those of the evaluation `best`. `interrupted`: a signal
    stopped it, and these are those so far."""

    name: str
    losses: list[float]
    logged: dict[str, list[float]]
    evaluations: list[EvaluationRecord]
    weights: Mapping[str, Tensor]
    ema: Mapping[str, Tensor]
    summary: SummaryRecord
    interrupted: bool = False

    def load_into(self, model: nn.Module, *, ema: bool = False) -> nn.Module:
        """Gives `model` the trained weights, or with `ema` their averages, and returns it. Raises WeightsError for
        another model, and OptionError if the PEF keeps no averages."""
        tensors, target, weights = _tensors_of(model), unwrapped(model), self.ema if ema else self.weights
        if ema and not weights:
            raise OptionError(f"{self.name} keeps no averages", remedy="sambasim.compile(…, ema=0.999)")
        common, wrong = tensors.keys() & weights.keys(), sorted(tensors.keys() ^ weights.keys())
        wrong += [name for name in tensors if name in common and tensors[name].shape != weights[name].shape]
        if wrong:
            what = f"the weights of {self.name} do not fit the model: {wrong[0]} is in one only, or of another shape"
            raise WeightsError(what, remedy="give the model that was compiled")
        with suppress(Exception):  # for its hooks: it may take other names than those of state_dict()
            target.load_state_dict({**target.state_dict(), **weights})
        for name, tensor in _tensors_of(model).items():
            tensor.copy_(weights[name])
        return model

    @cached_property
    def accuracy(self) -> float | None:
        """Of the last evaluation."""
        return self.evaluations[-1].accuracy if self.evaluations else None

    @property
    def best(self) -> EvaluationRecord | None:
        """The best evaluation, with `keep_best` or `stop_after`."""
        return self.summary.best

    def parts(self) -> list[RenderableType]:
        lines = [repr(self), f"loss {sparkline(self.losses)}"]
        for evaluation in self.evaluations[-1:]:
            facts = ", ".join(scores(evaluation))
            lines.append(f"held out {evaluation.samples} samples: {facts}")
        return ["\n".join(lines), *(step_times(self.summary) if self.losses else ())]

    def __repr__(self) -> str:
        summary, steps = self.summary, counted(len(self.losses), "step")
        took = f"{steps} on {counted(summary.world_size, 'replica')} in {format_seconds(summary.training_s)} (measured)"
        took += ", interrupted" if self.interrupted else ""
        return f"Run({self.name}: {took}, loss {summary.loss_first:.4f} -> {summary.loss_last:.4f})"


Weights: TypeAlias = Run | Pef | nn.Module | Mapping[str, Any] | str | Path | None


def _given(
    data: object,
    weights: Weights,
    collate_fn: Collate | str | None,
    options: dict[str, Any],
    callback: Callback | Sequence[Callback] | str | None = None,
) -> Given:
    """What a call gives besides its `options`, which get what these can name. Raises OptionError and DataError."""
    options["evaluation_metrics"], metrics = metrics_of(options.get("evaluation_metrics"))
    if isinstance(callback, str):
        options["callback"], callback = callback, ()
    callbacks = callback if isinstance(callback, list | tuple) else () if callback is None else (callback,)
    if isinstance(weights, Run | Pef | nn.Module):
        weights = _tensors_of(weights) if isinstance(weights, nn.Module) else weights.weights
    if weights is None or isinstance(weights, str | Path):
        options["weights"], weights = weights, None
    elif not isinstance(weights, Mapping):
        remedy = "a run, a PEF, a model, a state_dict, a file, or a folder of checkpoints"
        raise OptionError(f"weights is of type {type(weights).__name__}", remedy=remedy)
    if isinstance(data, str | Path):
        options["data"], data = str(data), None
    return Given(data_of(data), collate_of(collate_fn), metrics, weights, callbacks)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of `model` by their names in its `state_dict()`, which may also have other entries."""
    return {name: held.tensor.detach() for held in held_by(unwrapped(model)) for name in held.names}


@speaks_python()
def run(
    pef: Pef | str | Path,
    data: object = None,
    *,
    replicas: int | None = None,
    weights: Weights = None,
    collate_fn: Collate | str | None = None,
    quiet: bool = False,
    callback: Callback | Sequence[Callback] | str | None = None,
    **options: Any,
) -> Run:
    """Train a PEF, in this process or as the ranks of `mpirun -np N python SCRIPT`; any number of times.

    - `data`: arrays or tensors side by side, `(x, target)` or `{"x": x, "target": y}`; a map-style data set; a pair of
      them, to train and to evaluate; a string as for `--data`; None for what the PEF names
    - `replicas`: how many this process runs, by default the fewest that the PEF allows; under mpirun, its ranks
    - `weights`: where to start from: a run, a PEF, a model, a `state_dict`, a file of `save=` or of `torch.save`, or a
      folder of checkpoints; None for the weights of the PEF. With `strict=False` what fits is taken
    - `collate_fn`: makes a batch of a list of samples, as that of torch's DataLoader; a function, or its name
    - `quiet`: print no progress
    - `callback`: a function, or a list of them, that is called with an event at each step, evaluation and checkpoint,
      and at the end: `event.kind`, `event.record` as in a metrics file, `event.weights()`, `event.stop()`. Under mpirun
      each rank gives it, and rank 0 calls it, or all ranks with `callback_ranks="all"`
    - `options`: flags of `sambasim run` by keyword, such as `epochs=3, lr=1e-3, save="w.safetensors"`, and
      `set={"data.shuffle": False}`. `evaluation_metrics` takes functions of outputs and targets, too

    Each call starts anew. The bits are the same in one process and
    under mpirun. Raises OptionError, LaunchError, DataError and NumericsError; under mpirun, an error of one rank in
    training is printed once, and ends all ranks.

    Ctrl-C, the stop of a notebook cell, SIGTERM and SIGUSR1 end the run after its step, or its evaluation: there is no
    KeyboardInterrupt, and the script goes on with what is trained, in a Run that is `interrupted`; under mpirun on each
    rank, also if one alone was signalled. A second signal, a second later, ends the process at once.
    """
    world, given = connected(), opened(pef)
    live = _given(data, weights, collate_fn, options, callback)
    chosen = _options_of_run(given, data, replicas, options, world)
    recorder = _Recorder()
    observers: list[RunObserver] = [recorder]
    if world.rank == 0 and not quiet:
        observers.append(RunProgress(predicts=chosen.predict, words=said))
    with StopSignals() as signals, supervised(world, chosen) as (path, activity):
        how = path, chosen, world, activity, command(), observers, live
        done = train(*how, keeps_weights=True, signals=signals)
    found = recorder.losses, recorder.logged, recorder.evaluations
    summary = done.summary.model_copy(update={"notices": [*map(said, done.summary.notices)]})
    return Run(given.name, *found, dict(done.weights), dict(done.averages), summary, done.interruption is not None)


def _options_of(pef: Pef, keywords: Mapping[str, object], instead: Mapping[str, str], **own: object) -> RunOptions:
    """Raises OptionError for flags that are not for Python: `instead` says what they are here."""
    for name in keywords:
        if name in instead:
            raise OptionError(f"this call takes no {name}", remedy=f"it is {instead[name]}")
    flags = {"pef": str(pef.path), **own, **keywords}
    return run_options(flags, given_settings(flags.pop("set", None) or {}))


def _options_of_run(
    pef: Pef, data: object, replicas: int | None, keywords: Mapping[str, object], world: Communicator
) -> RunOptions:
    """Raises OptionError for flags that are not for Python, LaunchError if mpirun started other replicas."""
    instead = {"emulate_replicas": "replicas=N", "inference": "sambasim.predict", "predictions": "sambasim.predict"}
    instead |= {"pef": "the first argument", "json": "the summary of the result"}
    if data is None and pef.document.data_source.get("source") is None and "data" not in keywords:
        raise DataError(f"the PEF {pef.name} names no data", remedy="data=(inputs, targets), or a data set")
    if replicas is not None and (type(replicas) is not int or replicas < 1):
        raise OptionError(f"replicas is {replicas!r}", remedy="a whole number of at least 1")
    ranks, of_replica, fewest = world.world_size, pef.program.ranks_of_replica, pef.program.world_size
    if ranks == 1:
        count = fewest if replicas is None else replicas
        if count < fewest:
            what = f"replicas is {count}, and {pef.name} is for at least {fewest}"
            raise LaunchError(what, remedy=f"replicas={fewest}")
        own = {"emulate_replicas": count} if count * of_replica > 1 else {}
        return _options_of(pef, keywords, instead, **own)
    chosen = _options_of(pef, keywords, instead)
    started = (ranks - (chosen.parameter_servers or 0)) // (1 if chosen.one_process_per_replica else of_replica)
    if replicas not in (None, started):
        remedy = "leave out replicas, or start as many ranks as they need"
        raise LaunchError(f"replicas is {replicas}, and mpirun started {started}", remedy=remedy)
    return chosen


class _Recorder(RunObserver):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: dict[str, list[float]] = {}
        self.evaluations: list[EvaluationRecord] = []

    def stepped(self, step: StepRecord) -> None:
        self.losses.append(step.loss)
        for name, value in step.logged.items():
            self.logged.setdefault(name, []).append(value)

    def evaluated(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)


class Prediction(Shown):
    """The outputs of the model for all samples, in the order of the data, and the mean loss and accuracy where samples
    have labels. `record` is what `sambasim run --inference --json` prints."""

    def __init__(self, outputs: list[Tensor], record: InferenceRecord) -> None:
        self.outputs, self.record = outputs, record
        self.loss, self.logged, self.accuracy = record.loss, record.logged, record.accuracy
        self.metrics = record.metrics

    def parts(self) -> list[RenderableType]:
        return ["\n".join([repr(self), *(f"notice: {notice}" for notice in self.record.notices)])]

    def __repr__(self) -> str:
        facts = [f"{self.record.samples} samples in {format_seconds(self.record.prediction_s)} (measured)"]
        if self.outputs:
            facts.append(f"outputs {', '.join(str(list(output.shape)) for output in self.outputs)}")
        return f"Prediction({', '.join([*facts, *scores(self.record)])})"


@speaks_python()
def predict(
    pef: Pef | str | Path,
    data: object = None,
    *,
    weights: Weights = None,
    collate_fn: Collate | str | None = None,
    **options: Any,
) -> Prediction:
    """Run the model of a PEF on a data set, in evaluation mode. Under mpirun, ranks share the samples.

    - `data`: as for `run`; labels may be left out. Of a pair, the second is predicted
    - `weights`: as for `run`
    - `collate_fn`: as for `run`
    - `options`: flags of `sambasim run --inference` by keyword, such as `threads=4`, and `set={"data.shuffle": False}`

    Raises OptionError, DataError, and WeightsError for weights of another model.
    """
    world, given = connected(), opened(pef)
    live = _given(data, weights, collate_fn, options)
    instead = {"pef": "the first argument", "json": "the record of the result", "emulate_replicas": "for training"}
    chosen = _options_of(given, options, instead, inference=True)
    with supervised(world, chosen) as (path, activity):
        record, outputs = infer(path, chosen, world, activity, live, keeps_outputs=True)
        outputs = world.broadcast_object(outputs)
    return Prediction(outputs, record.model_copy(update={"notices": [*map(said, record.notices)]}))


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
    subject, paths = str(pef.path if isinstance(pef, Pef) else pef), sync if isinstance(sync, str) else ",".join(sync)
    names, counts = ("replicas", "batch_sizes"), {"replicas": replicas or None, "batch_sizes": batch_sizes or None}
    device = {"arch": arch, "num_tiles": num_tiles, "level": level, "cluster": cluster}
    question = question_of(subject, names=names, sync=paths, **counts, **device)
    predictions = predicted(question, lambda phase: None)
    lines = [line for prediction in predictions for line in simulation_json(prediction, question.sync)]
    return Simulation(simulation_report(predictions, question.sync, slowest=10), list(map(json.loads, lines)))
