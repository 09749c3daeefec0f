"""State that every call changes: counters whose effect comes late, and counters that nobody reads."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.state.case import (
    BATCH,
    CASES,
    EITHER,
    EQUAL,
    REFUSED,
    Case,
    Outputs,
    Setup,
    add,
    case,
    each,
    given,
    net_of,
    points,
    setups,
)
from tests.state.generated import net_from_source, source_of
from tests.state.ingredients import COUNTERS, IN_A_BUFFER, Ingredient, counter


def _in_a_buffer(first: int) -> Callable[[Any, Tensor], Tensor]:
    """What the remedy makes of a counter that has an effect from call `first` on, counted from 0."""

    def then(net: Any, h: Tensor) -> Tensor:
        net.steps.add_(1)
        return h * torch.where(net.steps > first, 1.0, 0.5)

    return then


def late(first: int, prepare: Callable[[Any], object] | None = None, **more: Any) -> Callable[[Any], Case]:
    """Decorates a function that counts: it returns how many calls there were before. Its lines end with "here"."""

    def decorated(count: Callable[[Any], int]) -> Case:
        def then(net: Any, h: Tensor) -> Tensor:
            return h * (1.0 if count(net) >= first else 0.5)

        steps, expected = (first + 2, EITHER) if first < 100 else (4, REFUSED)
        build = partial(net_of, then, prepare, steps)
        found = add(count.__name__, count.__module__, build, expected, steps=steps, **more)
        found.rewrite(given(steps=lambda: torch.zeros(())))(_in_a_buffer(first))
        return found

    return decorated


class Helper:
    def __init__(self) -> None:
        self.n = 0

    def count(self) -> int:
        self.n += 1  # here
        return self.n - 1


class Private:
    __slots__ = ("__n",)

    def __init__(self) -> None:
        self.__n = 0

    def count(self) -> int:
        self.__n += 1  # here
        return self.__n - 1


STATS = {"n": 0}


LATE = {
    "attribute": (1000, "model.n1"),
    "namespace": (8, "s1"),
    "dataclass": (20, "c1"),
    "list": (20, "l1"),
    "dict": (12, "d1"),
    "set": (12, "set1"),
    "Counter": (8, "counts1"),
    "class attribute": (8, "Shared1"),
    "global": (50, "CALLS1"),
    "dict in a global": (8, "STATS1"),
    "function attribute": (8, "count1"),
    "default argument": (8, "count1"),
    "closure": (20, "count"),
    "generator": (12, "numbers1"),
    "itertools.count": (12, "numbers1"),
    "ContextVar": (8, "VAR1"),
    "threading.local": (8, "LOCAL1"),
    "numpy array": (8, "a1"),
}
"""By counter: the first call with an effect, and what the error says. They count in forward(), or in a function."""

COUNTING = {"function attribute": "count1.n += 1", "default argument": "n[0] += 1", "closure": "n += 1"}


def _add_late(row: tuple[str, str, str, str, str], first: int, says: str) -> None:
    steps = first + 2 if first < 100 else 4
    more = {"steps": steps, "says": (says,), "where": COUNTING.get(row[0], row[3].splitlines()[-1].replace("@", "1"))}
    build = partial(net_from_source, f"late_{row[0]}", source_of([counter(row, first + 1)], samples=steps * BATCH))
    buffered = Ingredient("", IN_A_BUFFER.forward.replace("K", str(first + 1)), IN_A_BUFFER.init)
    rewritten = partial(net_from_source, f"buffered_{row[0]}", source_of([buffered], samples=steps * BATCH))
    expected = EITHER if first < 100 else REFUSED
    add(row[0], __name__, build, expected, rewritten=rewritten, whole=row[0] != "attribute", **more)


for _row in COUNTERS:
    if _row[0] in LATE:
        _add_late(_row, *LATE[_row[0]])


@late(8, given(helper=Helper), says=("helper.n",))
def helper_object(net: Any) -> int:
    return net.helper.count()


@late(8, given(helper=Private), where="self.__n", says=("helper",), whole=True)
def private_slot(net: Any) -> int:
    return net.helper.count()


@late(9, given(last=lambda: deque(maxlen=10)), says=("last",), whole=True)
def deque_of_ten(net: Any) -> int:
    net.last.append(0)  # here
    return len(net.last) - 1


@late(1, given(cycle=lambda: itertools.cycle([0, 1])), whole=True)
def itertools_cycle(net: Any) -> int:
    return int(next(net.cycle))  # here


@late(10, given(order=lambda: OrderedDict.fromkeys(range(20))), whole=True)
def ordered_dict_that_shrinks(net: Any) -> int:
    net.order.popitem()  # here
    return 19 - len(net.order)


def _hooked(net: Any) -> None:
    net.calls = Helper()
    net.a.register_forward_hook(lambda module, given, result: result * (1.0 if net.calls.count() >= 8 else 0.5))


each(EITHER, _hooked, steps=10, says=("n",), whole=True)(forward_hook=lambda net, h: h).rewrite(
    given(steps=lambda: torch.zeros(()))
)(_in_a_buffer(8))
CASES["counters-itertools_cycle"].rewritten = None  # a counter that starts again is another remedy


class CountingLoss:
    """The same by a loss, which is an object or a function."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, result: Tensor, target: Tensor) -> Tensor:
        self.n += 1  # here
        return functional.mse_loss(result, target) * (1.0 if self.n > 8 else 0.5)


def _with_loss(loss: Any) -> Setup:
    torch.manual_seed(0)
    return Setup(Outputs(), points(12), loss)


setups(EITHER, steps=10, says=("n",))(loss_object=lambda: _with_loss(CountingLoss()))


def _counting_loss(result: Tensor, target: Tensor) -> Tensor:
    STATS["n"] += 1  # here
    return functional.mse_loss(result, target) * (1.0 if STATS["n"] > 8 else 0.5)


setups(EITHER, steps=10, says=("STATS",), whole=True)(loss_function_with_a_global=lambda: _with_loss(_counting_loss))


class _Warmup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, result: Tensor, target: Tensor) -> Tensor:
        self.n += 1  # here
        return functional.mse_loss(result, target) * min(1.0, self.n / 10)


setups(EITHER, steps=12, says=("n",), whole=True)(loss_module_that_warms_up=lambda: _with_loss(_Warmup()))


# Draws of Python and NumPy are state of generators.


each(EITHER, whole=True)(
    draw_of_python=lambda net, h: h * random.random()  # here
)


each(EITHER, given(random=lambda: np.random.default_rng(0)), whole=True)(
    numpy_generator_of_its_own=lambda net, h: h * float(net.random.random())  # here
)


each(EITHER, given(generator=lambda: torch.Generator().manual_seed(3)))(
    torch_generator_of_its_own=lambda net, h: h + torch.randn(4, generator=net.generator)  # here
)


each(EITHER, steps=12, whole=True)(
    rare_draw_of_python=lambda net, h: h * 2 if random.random() < 0.1 else h  # here
)


# What nobody reads is exact.


@case(EQUAL, given(calls=0))
def counter_that_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h


@case(EQUAL, given(log=list), whole=True)
def log_that_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.log.append(f"call {len(net.log)} of shape {tuple(h.shape)}")
    return h


@case(EQUAL, given(s=lambda: SimpleNamespace(n=0, shapes=Counter())), whole=True)
def statistics_that_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.s.n += 1
    net.s.shapes[tuple(h.shape)] += 1
    return h


@case(EQUAL, given(last=None), whole=True)
def activation_that_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.last = h.detach()
    return h


@case(EQUAL, given(best=lambda: {"h": None}), whole=True)
def activation_in_a_dict_that_nobody_reads(net: Any, h: Tensor) -> Tensor:
    net.best["h"] = h
    return h


@case(EITHER, given(log=list), whole=True)
def numbers_of_a_log(net: Any, h: Tensor) -> Tensor:
    net.log.append(h.detach().mean().item())  # here
    return h


@case(EITHER, given(hidden=None))
def hidden_state_that_is_carried(net: Any, h: Tensor) -> Tensor:
    h = h if net.hidden is None else h + net.hidden
    net.hidden = h.detach()  # here
    return h


@hidden_state_that_is_carried.rewrite(given(hidden=lambda: torch.zeros(4, 4)))
def hidden_state_in_a_buffer(net: Any, h: Tensor) -> Tensor:
    h = h + net.hidden
    net.hidden.copy_(h.detach())
    return h
