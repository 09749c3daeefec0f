"""State that every call changes: counters whose effect comes late, and counters that nobody reads."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import contextvars
import itertools
import random
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.state.case import (
    CASES,
    EITHER,
    EQUAL,
    REFUSED,
    Case,
    Outputs,
    Setup,
    add,
    built,
    case,
    each,
    given,
    net_of,
    points,
)


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
        build = lambda: net_of(then, prepare, steps)  # noqa: E731 (a def would need a name of its own)
        found = add(count.__name__, count.__module__, build, expected, steps=steps, **more)
        found.rewrite(given(steps=lambda: torch.zeros(())))(_in_a_buffer(first))
        return found

    return decorated


class Helper:
    shared = 0

    def __init__(self) -> None:
        self.n = 0

    def count(self) -> int:
        self.n += 1  # here
        return self.n - 1


@dataclass
class Schedule:
    n: int = 0


class Private:
    __slots__ = ("__n",)

    def __init__(self) -> None:
        self.__n = 0

    def count(self) -> int:
        self.__n += 1  # here
        return self.__n - 1


STATS = {"n": 0}
CALLS = 0
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)
LOCAL = threading.local()


@late(8, given(helper=Helper), says=("helper.n",))
def helper_object(net: Any) -> int:
    return net.helper.count()


@late(8, given(helper=Private), where="self.__n", says=("helper",), whole=True)
def private_slot(net: Any) -> int:
    return net.helper.count()


@late(12, given(kept=lambda: {"n": 0}), says=("kept",), whole=True)
def dictionary(net: Any) -> int:
    net.kept["n"] += 1  # here
    return net.kept["n"] - 1


@late(20, given(seen=list), says=("seen",), whole=True)
def list_that_grows(net: Any) -> int:
    net.seen.append(0)  # here
    return len(net.seen) - 1


@late(9, given(last=lambda: deque(maxlen=10)), says=("last",), whole=True)
def deque_of_ten(net: Any) -> int:
    net.last.append(0)  # here
    return len(net.last) - 1


@late(8, says=("shared",), whole=True)
def class_attribute(net: Any) -> int:
    Helper.shared += 1  # here
    return Helper.shared - 1


@late(50, says=("CALLS",), whole=True)
def number_in_a_global(net: Any) -> int:
    global CALLS
    CALLS += 1  # here
    return CALLS - 1


@late(12, given(counter=itertools.count), says=("counter",), whole=True)
def itertools_count(net: Any) -> int:
    return int(next(net.counter))  # here


@late(1000, given(n=0), says=("n",))
def attribute(net: Any) -> int:
    net.n += 1  # here
    return int(net.n) - 1


@late(8, says=("STATS",), whole=True)
def dictionary_in_a_global(net: Any) -> int:
    STATS["n"] += 1  # here
    return STATS["n"] - 1


@late(8, given(s=lambda: SimpleNamespace(n=0)), whole=True)
def namespace(net: Any) -> int:
    net.s.n += 1  # here
    return int(net.s.n) - 1


@late(20, given(schedule=Schedule), whole=True)
def field_of_a_dataclass(net: Any) -> int:
    net.schedule.n += 1  # here
    return int(net.schedule.n) - 1


@late(8, given(counts=Counter), whole=True)
def counter_of_collections(net: Any) -> int:
    net.counts.update(["calls"])  # here
    return int(net.counts["calls"]) - 1


@late(12, given(seen=set), whole=True)
def set_that_grows(net: Any) -> int:
    net.seen.add(len(net.seen))  # here
    return len(net.seen) - 1


def _function(step: list[int] = [0]) -> int:  # noqa: B006 (the default that keeps state is the case)
    step[0] += 1  # here
    return step[0] - 1


@late(8, whole=True)
def default_argument(net: Any) -> int:
    return _function()


@late(8, whole=True)
def attribute_of_a_function(net: Any) -> int:
    attribute_of_a_function_count.n = getattr(attribute_of_a_function_count, "n", 0) + 1  # type: ignore[attr-defined]  # here
    return int(attribute_of_a_function_count.n) - 1  # type: ignore[attr-defined]  # it is the case


def attribute_of_a_function_count() -> None:
    """Holds the count."""


def _closure() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1  # here
        return n - 1

    return count


@late(20, given(count=lambda: [_closure()]), whole=True)
def closure(net: Any) -> int:
    return int(net.count[0]())


def _generator() -> Iterator[int]:
    n = 0
    while True:
        yield n  # here
        n += 1


@late(12, given(generator=_generator), whole=True)
def generator(net: Any) -> int:
    return int(next(net.generator))  # here


@late(1, given(cycle=lambda: itertools.cycle([0, 1])), whole=True)
def itertools_cycle(net: Any) -> int:
    return int(next(net.cycle))  # here


@late(8, whole=True)
def context_variable(net: Any) -> int:
    CONTEXT.set(CONTEXT.get() + 1)  # here
    return CONTEXT.get() - 1


@late(8, whole=True)
def thread_local(net: Any) -> int:
    LOCAL.n = getattr(LOCAL, "n", 0) + 1  # here
    return int(LOCAL.n) - 1


@late(10, given(order=lambda: OrderedDict.fromkeys(range(20))), whole=True)
def ordered_dict_that_shrinks(net: Any) -> int:
    net.order.popitem()  # here
    return 19 - len(net.order)


@late(8, given(counts=lambda: np.zeros(1, dtype=int)), whole=True)
def numpy_array(net: Any) -> int:
    net.counts += 1  # here
    return int(net.counts[0]) - 1


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


@built(EITHER, steps=10, says=("n",))
def loss_object() -> Setup:
    return _with_loss(CountingLoss())


def _counting_loss(result: Tensor, target: Tensor) -> Tensor:
    STATS["n"] += 1  # here
    return functional.mse_loss(result, target) * (1.0 if STATS["n"] > 8 else 0.5)


@built(EITHER, steps=10, says=("STATS",), whole=True)
def loss_function_with_a_global() -> Setup:
    return _with_loss(_counting_loss)


class _Warmup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, result: Tensor, target: Tensor) -> Tensor:
        self.n += 1  # here
        return functional.mse_loss(result, target) * min(1.0, self.n / 10)


@built(EITHER, steps=12, says=("n",), whole=True)
def loss_module_that_warms_up() -> Setup:
    return _with_loss(_Warmup())


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
