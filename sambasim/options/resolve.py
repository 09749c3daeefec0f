"""What a run changes of the options that its PEF stores. A change of what is compiled in is an error."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from sambasim.errors import OptionError, PefError
from sambasim.options.base import Given, Options, Problem, build, refusal, show
from sambasim.options.deepspeed.file import read_deepspeed
from sambasim.options.deepspeed.reading import Mapped, deepspeed_overrides
from sambasim.options.deepspeed.tables import World
from sambasim.options.given import as_table, leaves
from sambasim.options.run import RunOptions
from sambasim.options.training import (
    DataOptions,
    LossOptions,
    OptimizerOptions,
    TrainingOptions,
    cycled_problem,
    without_replaced,
)
from sambasim.units import counted


class StoredOptions(Options):
    """What a PEF stores, as it was compiled or with `RunOptions.overrides`. An inference PEF has no optimizer."""

    loss: LossOptions | None = None
    optimizer: OptimizerOptions | None = None
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    data: DataOptions = Field(default_factory=DataOptions)

    def problems(self) -> Iterator[Problem]:
        yield from cycled_problem(self.optimizer, self.training)


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    data: DataOptions
    loss: LossOptions | None
    optimizer: OptimizerOptions | None
    training: TrainingOptions
    changed: tuple[str, ...]


def with_deepspeed(
    options: RunOptions, training_defaults: Mapping[str, object], compiled: Mapping[str, object], replicas: int
) -> tuple[RunOptions, Mapped]:
    """`options` with what their DeepSpeed config, if there is one, changes of a PEF. `compiled`: its compile options.
    Raises OptionError, which lists all that is compiled otherwise."""
    if options.deepspeed is None:
        return options, Mapped([], [])
    file, stored = read_deepspeed(options.deepspeed), {**training_defaults, "compile": compiled, "parallel": compiled}
    starts = "mpirun -np" if options.emulate_replicas is None else "--emulate-replicas"
    batch_size = as_table(training_defaults.get("training")).get("batch_size")
    world = World(replicas, counted(replicas, "replica"), starts, batch_size if isinstance(batch_size, int) else None)
    overrides, mapped = deepspeed_overrides(file, stored, options.overrides, world)
    return options.model_copy(update={"overrides": overrides}), mapped


def resolve_run(
    options: RunOptions,
    training_defaults: Mapping[str, object],
    data_source: Mapping[str, object],
    given: Sequence[Given] = (),
) -> ResolvedRun:
    """What the PEF stores, with the overrides of the run, of which a file may have `given` some. A new data source
    resets its arguments; `epochs` replaces stored `steps`, and `steps` stored `epochs`. Raises PefError for invalid
    stored options, OptionError for invalid overrides."""
    stored = _stored(training_defaults, data_source)
    if stored.optimizer is None and not options.inference:
        raise OptionError("this PEF was compiled for inference and cannot train", remedy="add --inference")
    before = stored.model_dump(mode="json")
    if problems := _compiled_in(options.overrides, before):
        raise refusal(problems)
    kept = without_replaced(before, dict(leaves(options.overrides)))
    merged = build(StoredOptions, _merge(kept, options.overrides), given=given)
    if problems := _switched(stored.optimizer, merged.optimizer):
        raise refusal(problems)
    was, now = dict(leaves(before)), dict(leaves(merged.model_dump(mode="json")))
    changed = tuple(
        f"{name} = {show(value)} (compiled: {'none' if was.get(name) is None else show(was[name])})"
        for name, value in now.items()
        if value not in (None, {}) and value != was.get(name)
    )
    return ResolvedRun(merged.data, merged.loss, merged.optimizer, merged.training, changed)


def _stored(training_defaults: Mapping[str, object], data_source: Mapping[str, object]) -> StoredOptions:
    try:
        return build(StoredOptions, {**training_defaults, "data": dict(data_source)})
    except OptionError as error:
        heading, *each = (line.strip() for line in error.what.split("\n"))
        what = f"the PEF stores invalid options for its runs: {heading} {'; '.join(each)}".rstrip()
        raise PefError(what, remedy="compile it again") from None


def _compiled_in(overrides: Mapping[str, object], before: Mapping[str, object]) -> list[Problem]:
    was = dict(leaves(before))
    problems: list[Problem] = []
    for name, value in leaves(overrides):
        section = name.partition(".")[0]
        if section in ("compile", "model", "parallel"):
            problems.append(_compile_again(name, "is compiled into the PEF", value))
        fixed = name in ("optimizer.name", "training.batch_size") or section == "loss" or name.startswith("data.inputs")
        if fixed and value != was.get(name):
            compiled = f"as {show(was[name])}" if was.get(name) is not None else "without it"
            problems.append(_compile_again(name, f"cannot change: the PEF was compiled {compiled}", value))
    return problems


def _switched(before: OptimizerOptions | None, after: OptimizerOptions | None) -> list[Problem]:
    """Hyperparameters whose new value needs other sections or another state of the optimizer."""
    if before is None or after is None:
        return []
    problems: list[Problem] = []
    if before.max_grad_norm is None and after.max_grad_norm is not None:
        what = "cannot be turned on: the PEF was compiled without clipping"
        problems.append(_compile_again("optimizer.max_grad_norm", what, after.max_grad_norm))
    if bool(before.momentum) != bool(after.momentum):
        way = "off: the PEF was compiled with it" if before.momentum else "on: the PEF was compiled without it"
        problems.append(_compile_again("optimizer.momentum", f"cannot be turned {way}", after.momentum))
    return problems


def _compile_again(name: str, what: str, value: object) -> Problem:
    return Problem(name, what, f"compile again: sambasim compile … --set {name}={show(value)}", show(value))


def _merge(under: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
