"""What would make a predicted step quicker: each change is predicted again by itself, and compared in samples/s on the
same hardware. Larger batches, and more micro-steps, must each gain over the smaller ones; gains do not add up."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from sambasim.costs.cut import Level
from sambasim.costs.work import device_bytes_of
from sambasim.errors import MachineError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import DeviceSpec, device_names, load_device
from sambasim.ir.dataflow import is_view
from sambasim.ir.graph import Graph, Node, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.simulation.alone import RankAlone, price_ranks
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import PredictedStep, step_of
from sambasim.simulation.sync import SyncPath
from sambasim.units import counted, format_bytes

LEAST_GAIN = 0.02  # changes that gain a smaller share of the samples/s are left out
_FACTORS = (2, 4, 8)

Step: TypeAlias = RankAlone | PredictedStep


@dataclass(frozen=True, slots=True)
class Change:
    """What to type or to change, at line `where`; `compared`: the hardware of both; `several`: RDUs or one."""

    what: str
    how: str
    compared: str
    before: Step
    after: Step
    where: str | None = None
    several: bool = False

    @property
    def factor(self) -> float:
        return self.after.samples_per_s / self.before.samples_per_s


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes`: best first; `devices`: one replica on a whole RDU of each, or None where that does not fit."""

    changes: tuple[Change, ...]
    devices: tuple[tuple[str, Step | None], ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """An output of the step that is not its loss: its bytes of one sample on the device, and the line that makes it."""

    name: str
    bytes_per_sample: float
    where: str | None


def advise(prediction: Prediction) -> Advice:
    whole = prediction.alone if prediction.tiles is None else _again(replace(prediction, tiles=None))
    families = (_only_the_loss, _batches, _accumulation, _level, _sync, _clipping)
    found = (change for family in families for change in family(prediction))
    worth = [change for change in (*found, *_tiles(prediction, whole)) if change.factor > 1 + LEAST_GAIN]
    return Advice(tuple(sorted(worth, key=lambda change: -change.factor)), tuple(_devices(prediction, whole)))


def fetched_outputs(program: Program) -> list[Fetched]:
    """What the host fetches in each training step besides losses."""
    if program.training is None:
        return []
    found = []
    for output in program.training.outputs:
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.OUTPUT and symbol.name != program.loss and symbol.type.numel > 1:
            per_sample = device_bytes_of(symbol.type) / program.batch_size
            found.append(Fetched(symbol.name, per_sample, _line_of(program.training, output.value)))
    return found


def _line_of(graph: Graph, value: str) -> str | None:
    """FILE:LINE of the operator that makes `value`; views and what has no line count as what they read."""
    maker: Mapping[str, Node] = {name: node for node in graph.nodes for name in node.makes}
    node = maker.get(value)
    while node is not None:
        if node.source is not None and not is_view(node):
            return f"{node.source.file}:{node.source.line}"
        node = next((maker[name] for name in node.reads if name in maker), None)
    return None


def _priced(
    program: Program, device: DeviceSpec, tiles: int | None, samples: int, micro_steps: int, level: Level
) -> RankAlone | None:
    """One replica; None if it does not fit."""
    try:
        (replica,) = price_ranks(program, budget_of(device, tiles), samples, micro_steps, level)
        return replica
    except MachineError:
        return None


def _again(prediction: Prediction, batch_size: int | None = None) -> RankAlone | None:
    """One replica of what `prediction` is of, whatever its steps are of. None if it does not fit."""
    alone, samples = prediction.alone, batch_size or prediction.alone.batch_size
    program, device = prediction.program, prediction.device
    return _priced(program, device, prediction.tiles, samples, alone.micro_steps, prediction.level)


def _changed(prediction: Prediction, what: str, how: str, after: RankAlone, where: str | None = None) -> Change:
    compared = f"one replica on {prediction.alone.budget.where}"
    return Change(what, how, compared, prediction.alone, after, where)


def _only_the_loss(prediction: Prediction) -> Iterator[Change]:
    program, samples = prediction.program, prediction.alone.batch_size
    fetched = fetched_outputs(program)
    if program.training is None or not fetched:
        return
    names = {output.name for output in fetched}
    outputs = tuple(output for output in program.training.outputs if output.symbol not in names)
    training = replace(program.training, outputs=outputs)
    if after := _again(replace(prediction, program=replace(program, training=training))):
        largest = max(fetched, key=lambda output: output.bytes_per_sample)
        others = f" and {counted(len(fetched) - 1, 'other output')}" if len(fetched) > 1 else ""
        size = format_bytes(largest.bytes_per_sample * samples)
        how = f"in forward, do not return {largest.name}{others}: {size} go to the host in each micro-step"
        yield _changed(prediction, "return only the loss", how, after, largest.where)


def _batches(prediction: Prediction) -> Iterator[Change]:
    alone = before = prediction.alone
    for factor in _FACTORS:
        size = factor * alone.batch_size
        step = _again(prediction, size)
        if step is None or step.samples_per_s <= (1 + LEAST_GAIN) * before.samples_per_s:
            return
        memory = f"{format_bytes(step.need.size_bytes)} of {format_bytes(step.budget.capacity_bytes)}"
        yield _changed(prediction, f"batch {size} instead of {alone.batch_size}", f"compile -b {size}: {memory}", step)
        before = step


def _tiles(prediction: Prediction, on_all: RankAlone | None) -> Iterator[Change]:
    """Of all numbers of tiles, the one with which a full RDU is fastest; `on_all` is a replica on all tiles."""
    whole, batch = prediction.device.tiles, prediction.alone.batch_size
    if whole is None:
        return
    own = prediction.tiles or whole
    before = _full_rdu(prediction, own, prediction.alone)
    others = [tiles for tiles in range(1, whole + 1) if whole % tiles == 0 and tiles != own]
    ranks = {tiles: on_all if tiles == whole else _again(replace(prediction, tiles=tiles)) for tiles in others}
    full = {tiles: _full_rdu(prediction, tiles, rank) for tiles, rank in ranks.items() if rank is not None}
    if full:
        tiles, after = max(full.items(), key=lambda pair: pair[1].samples_per_s)
        replicas = whole // tiles
        samples = replicas * batch * prediction.alone.micro_steps
        what = f"{counted(tiles, 'tile')} a replica instead of {own}"
        of_rdu = f"{counted(replicas, 'replica')} on an RDU, global batch {samples}, the host as fast for each"
        how = f"compile --num-tiles {tiles}: {of_rdu}"
        yield Change(what, how, f"replicas on one {prediction.device.name}", before, after)


def _full_rdu(prediction: Prediction, tiles: int, replica: RankAlone) -> PredictedStep:
    """As many replicas of `tiles` tiles as one RDU has, with the faster sync."""
    replicas = (prediction.device.tiles or tiles) // tiles
    placement = place(replicas, prediction.device, tiles, prediction.cluster)
    steps = [step_of(prediction.program, [replica], placement, path) for path in SyncPath]
    return max(steps, key=lambda step: step.samples_per_s)


def _accumulation(prediction: Prediction) -> Iterator[Change]:
    if prediction.program.training is None:
        return
    alone, several = prediction.alone, prediction.on_a_node(SyncPath.RDU)
    replicas, where = several.placement.replicas, alone.budget.where
    compared = f"one replica on {where}" if replicas == 1 else f"{replicas} replicas on {where} each, sync by rdu"
    before = several
    for factor in _FACTORS:
        micro_steps = factor * alone.micro_steps
        replica = replace(alone, micro_steps=micro_steps)
        after = step_of(prediction.program, [replica], several.placement, SyncPath.RDU)
        if after.samples_per_s <= (1 + LEAST_GAIN) * before.samples_per_s:
            return
        how = f"--grad-accumulation-steps {micro_steps}: one update for {micro_steps * alone.batch_size} samples"
        what = f"{micro_steps} micro-steps an update instead of {alone.micro_steps}"
        yield Change(what, how, compared, several, after, several=replicas > 1)
        before = after


def _level(prediction: Prediction) -> Iterator[Change]:
    if prediction.level != "o3" and (after := _again(replace(prediction, level="o3"))):
        yield _changed(prediction, f"level o3 instead of {prediction.level}", "compile --o3", after)


def _sync(prediction: Prediction) -> Iterator[Change]:
    host, rdu = map(prediction.on_a_node, (SyncPath.HOST, SyncPath.RDU))
    if rdu.path is not None:
        compared = f"{host.placement.replicas} replicas on {host.alone.budget.where} each"
        how = "run --reduce-on-rdu, not by hosts"
        yield Change("sync between RDUs", how, compared, host, rdu, several=True)


def _clipping(prediction: Prediction) -> Iterator[Change]:
    alone = prediction.alone
    kept = tuple(section for section in alone.update if section.kind is not SectionKind.GRADNORM)
    if len(kept) < len(alone.update):
        step = replace(alone, update=kept)
        yield _changed(prediction, "no clipping", "leave out --max-grad-norm: no GRADNORM section", step)


def _devices(prediction: Prediction, whole: RankAlone | None) -> Iterator[tuple[str, Step | None]]:
    shipped = [load_device(name) for name in device_names()]
    for device in shipped if prediction.device in shipped else [*shipped, prediction.device]:
        is_own = device == prediction.device
        yield device.name, whole if is_own else _again(replace(prediction, device=device, tiles=None))


def what_fits(
    program: Program,
    device: DeviceSpec,
    tiles: int | None,
    level: Level,
    batch_size: int,
    micro_steps: int,
    recomputed: Program | None,
) -> Mapping[str, RankAlone]:
    """The step by what to type: with fewest tiles, most of the batch, and `recomputed`; else a part on all tiles."""

    def fitting(how: str, tiles: int | None, batch_size: int, program: Program = program) -> dict[str, RankAlone]:
        step = _priced(program, device, tiles, batch_size, micro_steps, level)
        return {} if step is None else {how: step}

    more = range(tiles + 1, (device.tiles or tiles) + 1) if tiles is not None else range(0)
    counts = (count for count in more if (device.tiles or count) % count == 0)
    on_tiles = (fitting(f"--num-tiles {count}", count, batch_size) for count in counts)
    sizes = dict.fromkeys(batch_size // divisor for divisor in (2, 4, 8, 16, 32, 64) if batch_size >= divisor)
    smaller = (fitting(f"-b {size}", tiles, size) for size in sizes)
    again = fitting("--recompute full", tiles, batch_size, recomputed) if recomputed is not None else {}
    found = next(filter(None, on_tiles), {}) | next(filter(None, smaller), {}) | again
    both = (fitting(f"--num-tiles {device.tiles} -b {size}", device.tiles, size) for size in sizes if more)
    return found or next(filter(None, both), {})
