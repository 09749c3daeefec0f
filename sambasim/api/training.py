"""Train a PEF in Python."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from torch import Tensor, nn

from sambasim.api.given import data_of, unwrapped
from sambasim.api.pef import Pef, opened
from sambasim.api.ranks import command, connected, speaks_python, supervised
from sambasim.commands.run import train
from sambasim.commands.run_checks import checked_pef
from sambasim.compiler.capture.tensors import held_by
from sambasim.errors import DataError, LaunchError, OptionError, WeightsError
from sambasim.options.given import given_settings
from sambasim.options.run import RunOptions, run_options
from sambasim.records.metrics import EvaluationRecord, SummaryRecord
from sambasim.report.summaries import step_times
from sambasim.report.tables import Shown, sparkline
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.run_observer import RunObserver, Step
from sambasim.terminal.output import scores
from sambasim.terminal.progress import RunProgress
from sambasim.units import counted, format_seconds


class Run(Shown):
    """A run that has ended: the loss of each step, the evaluations, the trained weights by the names of the model's
    `state_dict`, and the `summary` of `sambasim run --json`."""

    def __init__(
        self,
        name: str,
        losses: list[float],
        evaluations: list[EvaluationRecord],
        weights: Mapping[str, Tensor],
        summary: SummaryRecord,
    ) -> None:
        self.name = name
        self.losses = losses
        self.evaluations = evaluations
        self.weights = dict(weights)
        self.summary = summary

    def load_into(self, model: nn.Module) -> nn.Module:
        """Gives `model` the trained weights, and returns it. Raises WeightsError for another model."""
        tensors, target = tensors_of(model), unwrapped(model)
        wrong = sorted(tensors.keys() ^ self.weights.keys())
        wrong += [name for name in tensors if name not in wrong and tensors[name].shape != self.weights[name].shape]
        if wrong:
            what = f"the weights of {self.name} do not fit the model: {wrong[0]} is in one only, or of another shape"
            raise WeightsError(what, remedy="give the model that was compiled")
        with suppress(Exception):  # for its hooks: it may take other names than those of state_dict()
            target.load_state_dict({**target.state_dict(), **self.weights})
        for name, tensor in tensors_of(model).items():
            tensor.copy_(self.weights[name])
        return model

    @cached_property
    def accuracy(self) -> float | None:
        """Of the last evaluation."""
        return self.evaluations[-1].accuracy if self.evaluations else None

    def parts(self) -> list[RenderableType]:
        lines = [repr(self), f"loss {sparkline(self.losses)}"]
        for evaluation in self.evaluations[-1:]:
            facts = ", ".join(scores(evaluation.loss, evaluation.accuracy))
            lines.append(f"held out {evaluation.samples} samples: {facts}")
        return ["\n".join(lines), *(step_times(self.summary) if self.losses else ())]

    def __repr__(self) -> str:
        summary = self.summary
        replicas = f"{summary.world_size} replica{'s' * (summary.world_size > 1)}"
        took = f"{counted(len(self.losses), 'step')} on {replicas} in {format_seconds(summary.training_s)} (measured)"
        return f"Run({self.name}: {took}, loss {summary.loss_first:.4f} -> {summary.loss_last:.4f})"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of `model` by their names in its `state_dict()`, which may also have other entries."""
    return {name: held.tensor.detach() for held in held_by(unwrapped(model)) for name in held.names}


@speaks_python()
def run(
    pef: Pef | str | Path, data: object = None, *, replicas: int | None = None, quiet: bool = False, **options: Any
) -> Run:
    """Train a PEF, in this process or as the ranks of `mpirun -np N python SCRIPT`; any number of times.

    - `data`: arrays or tensors side by side, `(x, target)` or `{"x": x, "target": y}`; a map-style data set; a pair of
      them, to train and to evaluate; a string as for `--data`; None for what the PEF names
    - `replicas`: how many this process runs, by default the fewest that the PEF allows; under mpirun, its ranks
    - `quiet`: print no progress
    - `options`: flags of `sambasim run` by keyword, such as `epochs=3, lr=1e-3, save="w.safetensors"`, and
      `set={"data.shuffle": False}`

    Each call starts from the weights of the PEF, or those of `weights="FILE"`. The bits are the same in one process and
    under mpirun. Raises OptionError, LaunchError, DataError and NumericsError; under mpirun, an error of one rank in
    training is printed once, and ends all ranks.
    """
    world, given = connected(), opened(pef)
    chosen = _options(given, data, replicas, options, world)
    path, mesh = checked_pef(chosen, Path("out"), world, command())
    recorder = _Recorder()
    observers: list[RunObserver] = [recorder]
    if world.rank == 0 and not quiet:
        observers.append(RunProgress(predicts=chosen.predict))
    with supervised(world, path, mesh, chosen) as activity:
        live = None if isinstance(data, str | Path) else data_of(data)
        trained = train(path, chosen, world, activity, command(), observers, live, keeps_weights=True)
    return Run(given.name, recorder.losses, recorder.evaluations, trained.weights, trained.summary)


def options_of(
    pef: Pef, data: object, keywords: Mapping[str, object], instead: Mapping[str, str], **own: object
) -> RunOptions:
    """The options of a run by keyword, and those of the call's `own`. Raises OptionError for flags that are not for
    Python: `instead` says what they are here."""
    for name in keywords:
        if name in instead:
            raise OptionError(f"this call takes no {name}", remedy=f"it is {instead[name]}")
    flags = {"pef": str(pef.path), **own, **keywords}
    settings = given_settings(flags.pop("set", None) or {})
    if isinstance(data, str | Path):
        flags["data"] = str(data)
    return run_options(flags, settings)


def _options(
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
            raise LaunchError(
                f"replicas is {count}, and {pef.name} is for at least {fewest}", remedy=f"replicas={fewest}"
            )
        own = {"emulate_replicas": count} if count * of_replica > 1 else {}
        return options_of(pef, data, keywords, instead, **own)
    chosen = options_of(pef, data, keywords, instead)
    started = (ranks - (chosen.parameter_servers or 0)) // (1 if chosen.one_process_per_replica else of_replica)
    if replicas not in (None, started):
        raise LaunchError(
            f"replicas is {replicas}, and mpirun started {started}",
            remedy="leave out replicas, or start as many ranks as they need",
        )
    return chosen


class _Recorder(RunObserver):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[EvaluationRecord] = []

    def stepped(self, step: Step) -> None:
        self.losses.append(step.loss)

    def evaluated(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)
