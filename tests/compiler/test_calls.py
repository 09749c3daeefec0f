"""What differs from call to call: state that Python keeps, and numbers that it draws. Each is found with its line."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.effects import lost_effects
from sambasim.compiler.step import TrainingStep

calls = 0
table: dict[str, int] = defaultdict(int)
numpy_generator = np.random.default_rng(0)
python_generator = random.Random(0)


class Keeper:
    calls = 0
    tensor = torch.zeros(3)


class Net(nn.Module):
    """A linear layer, whose outputs `then` makes into something, and their mean square."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout()
        self.norm = nn.BatchNorm1d(3)
        self.then = then
        self.counts = [0]
        self.kept: list[Tensor] = []
        self.last: deque[Tensor] = deque(maxlen=2)
        self.state = {"ema": torch.zeros(3)}
        self.keeper = Keeper()
        self.rates = iter([1.0, 0.5, 0.25, 0.1])
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x[:, :3]).square().mean() + self.linear(x).mean()


def of_a_global(net: Any, h: Tensor) -> Tensor:
    global calls
    calls += 1
    return h / calls  # here


def of_a_table(net: Any, h: Tensor) -> Tensor:
    table["calls"] += 1
    return h / table["calls"]  # here


def of_a_list(net: Any, h: Tensor) -> Tensor:
    net.counts[0] += 1
    return h / net.counts[0]  # here


def of_an_object(net: Any, h: Tensor) -> Tensor:
    net.keeper.calls += 1
    return h / net.keeper.calls  # here


def of_a_class(net: Any, h: Tensor) -> Tensor:
    Keeper.calls += 1
    return h / Keeper.calls  # here


def of_a_default(net: Any, h: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006 -- the mistake in question
    calls.append(1)
    return h / len(calls)  # here


def of_a_function(net: Any, h: Tensor) -> Tensor:
    own: Any = of_a_function
    own.calls = getattr(own, "calls", 0) + 1
    return h / own.calls  # here


def of_an_iterator(net: Any, h: Tensor) -> Tensor:
    return h * next(net.rates)  # here


def by_length(net: Any, h: Tensor) -> Tensor:
    net.kept.append(h.detach())
    for other in net.kept:
        h = h + other  # here
    return h


def of_tensors_in_a_queue(net: Any, h: Tensor) -> Tensor:
    net.last.append(h.detach())
    return h + net.last[0] if len(net.last) == net.last.maxlen else h + h  # here


def of_tensors_in_a_dictionary(net: Any, h: Tensor) -> Tensor:
    net.state["ema"] = 0.9 * net.state["ema"] + h.detach().mean(0)  # here
    return h - net.state["ema"]


def of_a_tensor_in_an_object(net: Any, h: Tensor) -> Tensor:
    net.keeper.tensor = net.keeper.tensor * 0.9 + h.detach()  # here
    return h + net.keeper.tensor


def of_a_parameter(net: Any, h: Tensor) -> Tensor:
    bias = net.linear.bias.data + 0  # here
    net.linear.bias.data = bias * 0.5
    return h


def of_time(net: Any, h: Tensor) -> Tensor:
    return h * time.perf_counter()  # here


def of_numpys_numbers(net: Any, h: Tensor) -> Tensor:
    return h * float(np.random.rand())  # here


def of_numpys_tensors(net: Any, h: Tensor) -> Tensor:
    return h + torch.from_numpy(numpy_generator.random(3))  # here


def draws(net: Any, h: Tensor) -> Tensor:
    return h * random.random()  # here


def draws_from_its_own(net: Any, h: Tensor) -> Tensor:
    return h if python_generator.random() < 2 else 2 * h  # here


def of_a_closure() -> Callable[[Any, Tensor], Tensor]:
    count = 0

    def counts(net: Any, h: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return h / count  # here

    return counts


DIFFER = "a value that differs from call to call"
DRAWN = "random numbers of Python or NumPy"
FOUND: tuple[tuple[Callable[[Any, Tensor], Tensor], str], ...] = (
    *((then, DIFFER) for then in (
        of_a_global, of_a_table, of_a_list, of_an_object, of_a_class, of_a_default, of_a_function, of_an_iterator,
        of_a_closure(), by_length, of_tensors_in_a_queue, of_tensors_in_a_dictionary, of_a_tensor_in_an_object,
        of_a_parameter, of_time, of_numpys_tensors,
    )),
    (draws, DRAWN), (draws_from_its_own, DRAWN), (of_numpys_numbers, DRAWN),
)  # fmt: skip


def logs(net: Any, h: Tensor) -> Tensor:
    net.kept.append(h)
    table["logged"] += 1
    return h


def fills_a_cache(net: Any, h: Tensor) -> Tensor:
    if "angles" not in net.cache:
        net.cache["angles"] = torch.arange(3.0).cos()
    return h * net.cache["angles"]


def trains(net: Any, h: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0])
    return net.dropout(net.norm(h)) * scale + torch.rand(3)


EITHER = pytest.mark.parametrize("fake", [True, False], ids=["fake", "eager"])


@pytest.fixture(autouse=True)
def _left_alone() -> Iterator[None]:
    """The random numbers of Python and NumPy go on as if nothing had been called."""
    before = random.getstate(), np.random.get_state(legacy=True)
    yield
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state(legacy=True)[1], before[1][1])  # type: ignore[index]  # of the legacy form


def found(then: Callable[[Any, Tensor], Tensor], *, fake: bool) -> list[tuple[str, str]]:
    findings = lost_effects(TrainingStep(Net(then), ("x",), None, False), [torch.ones(2, 4)], fake=fake)
    assert findings is not None
    return [(finding.obstacle.what, finding.where) for finding in findings]


@EITHER
@pytest.mark.parametrize(("then", "what"), FOUND, ids=[then.__name__ for then, _ in FOUND])
def test_what_differs_is_found_with_its_line(then: Callable[[Any, Tensor], Tensor], what: str, fake: bool) -> None:
    ((obstacle, where),) = found(then, fake=fake)
    assert obstacle.startswith(what)
    assert where.startswith(f"{__file__}:")
    assert where.endswith("# here")


@EITHER
@pytest.mark.parametrize("then", [logs, fills_a_cache, trains])
def test_what_is_the_same_in_all_calls_is_left_alone(then: Callable[[Any, Tensor], Tensor], fake: bool) -> None:
    assert found(then, fake=fake) == []
