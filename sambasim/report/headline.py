"""What binds a predicted step, in one sentence, and how much of the device's peak the step uses."""

from dataclasses import dataclass

from sambasim.costs.price import Bound
from sambasim.costs.work import device_bytes_of
from sambasim.ir.graph import MADE_AGAIN
from sambasim.ir.operators import OPERATORS
from sambasim.ir.types import SymbolKind
from sambasim.report.advice import compared_text, step_text
from sambasim.simulation.advice import Advice, Change, fetched_outputs
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import MODEL_KINDS, slowed
from sambasim.units import counted, format_bytes, format_count, format_rate, format_seconds

WHICH_FLOPS = "FLOP of products a step, without recomputation"


def headline(prediction: Prediction, advice: Advice) -> str:
    """What takes the largest part of the step, and the change that gains most."""
    seconds, words = max(_parts(prediction), key=lambda part: part[0])
    step = "step" if prediction.program.training is not None else "forward"
    binds = f"{seconds / prediction.alone.predicted_s:.0%} of the {step} is {words}"
    best = next((one for one in advice.changes if not one.several), None)  # the sentence is about one replica
    return f"{binds}; {'no change to one replica gains more than 2%' if best is None else _best(best)}"


def _best(change: Change) -> str:
    """`return only the loss: 1.77 s -> 265.3 ms`; samples/s where a step has other samples, or other hardware."""
    where = f" ({change.where})" if change.where else ""
    before, after = change.before, change.after
    if before.samples == after.samples:
        return f"{change.what}{where}: {step_text(change)}"
    return f"{change.what}{where}: {compared_text(change)}"


def _parts(prediction: Prediction) -> list[tuple[float, str]]:
    """Seconds of the step, and what takes them."""
    step, by_bound = prediction.alone, prediction.alone.device_s_by_bound
    waits = {
        Bound.COMPUTE: "sections bound by compute",
        Bound.MEMORY: f"sections bound by {step.budget.memory}",
        Bound.CAPACITY: "sections whose weights exceed the chip, so that tensors are read again",
        Bound.LAUNCH: f"sections bound by their launch, at least {format_seconds(step.budget.launch_s)} each",
    }
    return [
        (step.host_s, f"the host: {_host(prediction)}"),
        *((by_bound[bound], words) for bound, words in waits.items()),
    ]


def _host(prediction: Prediction) -> str:
    step, program = prediction.alone, prediction.program
    each = "step" if step.micro_steps == 1 else "micro-step"
    starts_s = step.starts_s(MODEL_KINDS)
    if starts_s > step.sent_s:
        return f"it starts {counted(round(starts_s / step.start_s), 'section')} each {each}"
    fetched = fetched_outputs(program)
    fetched_bytes = step.batch_size * sum(one.bytes_per_sample for one in fetched)
    inputs = [program.symbols[name] for name in prediction.graph.inputs]
    inputs_bytes = sum(device_bytes_of(one.type) for one in inputs if one.kind is SymbolKind.INPUT)
    inputs_bytes = inputs_bytes * step.batch_size // program.batch_size
    if fetched_bytes > inputs_bytes:
        return f"it fetches {format_bytes(fetched_bytes)} of {' and '.join(one.name for one in fetched)} each {each}"
    return f"it sends {format_bytes(inputs_bytes)} of inputs each {each}"


def range_text(least_s: float, most_s: float) -> str:
    """`2.97 to 3.88 s`."""
    least, most = format_seconds(least_s), format_seconds(most_s)
    number, _, unit = least.partition(" ")
    return f"{number if unit == most.partition(' ')[2] else least} to {most}"


def model_flops(prediction: Prediction) -> int:
    """FLOPs of matrix products, convolutions, attention and recurrent layers in a step, without recomputation."""
    step, graph = prediction.alone, prediction.graph
    types = {**graph.values, **{name: symbol.type for name, symbol in prediction.program.symbols.items()}}
    made_again = 0
    for node in graph.nodes:
        flops = OPERATORS[node.operator].flops
        if flops is not None and node.name.endswith(MADE_AGAIN):
            made_again += flops(node, types.__getitem__)
    all_flops = sum(step.runs(section) * section.load.product_flops for section in step.sections)
    return all_flops - step.micro_steps * made_again * step.batch_size // prediction.program.batch_size


@dataclass(frozen=True, slots=True)
class Roof:
    """The most FLOP/s and bytes/s of the tiles in use."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte, below which memory is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def at(self, flops_per_byte: float) -> float:
        return min(self.flops_per_s, flops_per_byte * self.bytes_per_s)


def reachable(prediction: Prediction) -> Roof:
    """What sections reach by the calibration: the units that operators are placed on, at the rate of the fastest kind
    of product."""
    step, budget = prediction.alone, prediction.alone.budget
    products = (product for section in step.sections for product in section.load.products)
    rate = max((product.flops / product.unit_s for product in products), default=budget.unit_flops_per_s)
    return Roof(budget.placeable_units * rate, slowed(budget, step.tiers.rest).memory_bytes_per_s)


def published(prediction: Prediction) -> Roof:
    device = prediction.device
    share = 1.0 if prediction.tiles is None or device.tiles is None else prediction.tiles / device.tiles
    memory = device.hbm_bandwidth_bytes_per_s or device.ddr_bandwidth_bytes_per_s
    return Roof(device.peak_bf16_flops_per_s * share, memory * share)


def roof_text(roof: Roof) -> str:
    return f"{format_count(roof.flops_per_s)}FLOP/s, {format_bytes(roof.bytes_per_s)}/s"


def roofs_text(prediction: Prediction) -> str:
    roof, memory = reachable(prediction), prediction.alone.budget.memory
    reached = f"{roof_text(roof)} reachable, of {roof_text(published(prediction))} published"
    return f"{reached}; {memory} is the limit of a section below {format_rate(roof.ridge)} FLOPs per byte"


def mfu(prediction: Prediction) -> float:
    """Model FLOPs of a step over its whole time, host included, as a share of the peak of the tiles in use."""
    return model_flops(prediction) / prediction.alone.predicted_s / published(prediction).flops_per_s


def mfu_text(prediction: Prediction) -> str:
    """Of what the MFU is a share, without its unit."""
    numbers = (model_flops(prediction), published(prediction).flops_per_s)
    flops, peak = map(format_count, numbers)
    return f"{flops}{WHICH_FLOPS}; its tiles have {peak}FLOP/s"
