"""The model zoo: one small case for each family that compiles and trains.

`CASES` is what tests run over, `case(name)` gives one of them, and `tests.models:dataset` is a data source that
commands can name.
"""

from tests.models import attention, convolutional, dense, pretrained, recurrent
from tests.models.case import Batch, Case, evaluate_loss

__all__ = ["CASES", "Batch", "Case", "case", "dataset", "evaluate_loss"]

CASES: tuple[Case, ...] = (
    *dense.CASES, *convolutional.CASES, *recurrent.CASES, *attention.CASES, *pretrained.CASES,
)  # fmt: skip


def case(name: str) -> Case:
    """The case called `name`. Raises KeyError if there is none."""
    return {one.name: one for one in CASES}[name]


def dataset(name: str, count: int = 64, seed: int = 0) -> list[Batch]:
    """`count` samples for the case called `name`: `[data] source = "tests.models:dataset"`, `args = {name = "mlp"}`."""
    return case(name).samples(count, seed)
