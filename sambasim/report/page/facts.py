"""What several parts of the page ask of a prediction."""

from sambasim.costs.price import Bound
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.sync import SyncPath


def shown(prediction: Prediction) -> int:
    """Which of the scaled steps the timeline shows: the most that one node has room for, of more than one."""
    counts = [scaled.placement.replicas for scaled in prediction.scaled[SyncPath.RDU]]
    full = prediction.scaled[SyncPath.RDU][0].placement.per_full_node
    several = [number for number, count in enumerate(counts) if count > 1]
    inside = [number for number in several if counts[number] <= full]
    return inside[-1] if inside else several[0] if several else 0


def bound_words(prediction: Prediction, bound: Bound) -> str:
    """What binds a section, as people say it."""
    words = {Bound.MEMORY: prediction.alone.budget.memory, Bound.CAPACITY: "room on the chip"}
    return words.get(bound, bound.value)
