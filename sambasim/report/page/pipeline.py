"""The stages of each section, and what passes between them: what the page shows of the section that is chosen."""

from bisect import bisect_left
from collections.abc import Sequence

from sambasim.costs.price import chip_bytes
from sambasim.costs.work import Work, work_of
from sambasim.report.page.html import element, joined
from sambasim.report.page.part import Part
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import TimedSection


def pipeline(prediction: Prediction) -> Part:
    """One section at a time; at first the slowest that has operators."""
    timed = prediction.alone.sections
    with_stages = [number for number, section in enumerate(timed) if section.nodes[1] > section.nodes[0]]
    first = max(with_stages, key=lambda number: timed[number].price.predicted_s, default=0)
    work = work_of(prediction.graph, prediction.program.symbols)
    nodes = [stage.node for stage in work.stages]
    picker = element("label", "Section ", element("select", id="pipeline-choice"))
    steps = element(
        "span",
        element("button", "← previous", type="button", data_step=-1),
        element("button", "next →", type="button", data_step=1),
    )
    return Part(
        id="pipeline",
        title="Pipeline of a section",
        lead=(
            "Samples stream through the operators from top to bottom, all of which work at the same time. Arcs are "
            "buffers on the chip, from the operator that fills one to those that read it; their tensors never "
            "leave. What comes from memory and goes there is traffic; weights stay on the chip while samples stream "
            "past."
        ),
        measured=False,
        body=joined(
            [
                element("div", picker, steps, class_="tools"),
                element("div", id="pipeline-head"),
                element("div", id="pipeline-stages"),
            ]
        ),
        data={
            "pipeline": [_stages(work, nodes, section) for section in timed],
            "first_section": first,
            "on_chip": [chip_bytes(section.load) for section in timed],
            "chip": prediction.alone.budget.chip_bytes,
        },
    )


def _stages(work: Work, nodes: Sequence[int], section: TimedSection) -> list[object]:
    """Of each stage: its node, bytes that stream in from memory, bytes of weights and the like, bytes to memory, FLOPs,
    what it reads of earlier stages, as pairs of the number of the stage and bytes of one row, and bytes of one row of
    all that it hands on. `nodes` are those of all stages."""
    numbers = range(*(bisect_left(nodes, node) for node in section.nodes))
    read_here = {read.value for number in numbers for read in work.stages[number].reads}
    made: dict[str, int] = {}
    seen: set[str] = set()
    parts: dict[str, float] = {}
    found: list[object] = []
    for place, number in enumerate(numbers):
        stage = work.stages[number]
        streamed = resident = written = handed = 0
        buffers: list[tuple[int, int]] = []
        for read in stage.reads:
            tensor = work.tensors[read.value]
            if read.value in made:
                buffers.append((made[read.value], tensor.row_bytes))
            elif read.view not in seen:
                seen.add(read.view)
                before = parts.get(read.value, 0.0)
                parts[read.value] = min(1.0, before + read.part)
                read_bytes = int(tensor.size_bytes * (parts[read.value] - before))
                resident += read_bytes if tensor.resident else 0
                streamed += 0 if tensor.resident else read_bytes
        for value in stage.writes:
            made[value] = place
            handed += work.tensors[value].row_bytes if value in read_here else 0
            if value in work.kept or work.last_reader.get(value, -1) > numbers[-1]:
                written += work.tensors[value].size_bytes
        found.append([stage.node, streamed, resident, written, stage.product_flops, buffers, handed])
    return found
