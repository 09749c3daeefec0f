"""State that is far from the model: in modules that it imports, in objects of the standard library, in an optimizer;
and state that one call changes and the next changes back."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import array
import builtins
import ctypes
import decimal
import functools
import io
import logging
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.state import far_away
from tests.state.case import EQUAL, REFUSED, Setup, built, case, each, given, net_of
from tests.state.counters import late

LOG = logging.getLogger(__name__)
CALLS_BY_KEY = 0
WEAK: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@late(1000, where="MODULE_CALLS", says=("MODULE_CALLS",))
def function_of_a_module(net: Any) -> int:
    return far_away.count()


@late(1000, says=("CALLS",), whole=True)
def attribute_of_a_module(net: Any) -> int:
    far_away.CALLS += 1  # here
    return far_away.CALLS - 1


@late(1000, where="self.n", says=("n",), whole=True)
def one_object_of_a_module(net: Any) -> int:
    from tests.state.far_away import Keeper

    return Keeper.get().count()


@late(1000, says=("LOG.n",), whole=True)
def attribute_of_a_logger(net: Any) -> int:
    attributes = vars(LOG)
    attributes["n"] = attributes.get("n", 0) + 1  # here
    return int(attributes["n"]) - 1


@late(1000, says=("WEAK",), whole=True)
def weak_dictionary(net: Any) -> int:
    WEAK[net] = WEAK.get(net, 0) + 1  # here
    return WEAK[net] - 1


@late(1000, given(count=lambda: np.int64(0)), says=("count",), whole=True)
def scalar_of_numpy(net: Any) -> int:
    net.count = net.count + np.int64(1)  # here
    return int(net.count) - 1


each(EQUAL, given(facts=lambda: np.array({"mean": 0.5}, dtype=object)))(
    dictionary_in_an_array=lambda net, h: h * net.facts.item()["mean"]
)


@late(1000, given(text=lambda: io.StringIO("1" * 10_000)), where=None, says=("text",), whole=True)
def stream(net: Any) -> int:
    return len(net.text.read(1)) + net.text.tell() - 2


@late(1000, given(count=lambda: ctypes.c_int(0)), says=("count",), whole=True)
def number_of_c(net: Any) -> int:
    net.count.value += 1  # here
    return int(net.count.value) - 1


@late(1000, given(count=lambda: array.array("i", [0])), says=("count",), whole=True)
def array_of_python(net: Any) -> int:
    net.count[0] += 1  # here
    return int(net.count[0]) - 1


@late(1000, given(count=lambda: threading.Semaphore(10_000)), where=None, says=("count",), whole=True)
def semaphore(net: Any) -> int:
    net.count.acquire()
    return 9999 - int(net.count._value)


@late(1000, given(count=lambda: multiprocessing.Value("i", 0)), says=("count",), whole=True)
def number_of_processes(net: Any) -> int:
    net.count.value += 1  # here
    return int(net.count.value) - 1


@late(1000, says=("the environment",), whole=True)
def environment(net: Any) -> int:
    os.environ["SAMBASIM_CASE"] = str(int(os.environ.get("SAMBASIM_CASE", "0")) + 1)  # here
    return int(os.environ["SAMBASIM_CASE"]) - 1


@functools.lru_cache
def cached(number: int) -> int:
    return number


@late(1000, says=("cached.cache_info()",))
def hits_of_a_cache(net: Any) -> int:
    cached(3)  # here
    return cached.cache_info().hits - 1


each(EQUAL)(cache_whose_hits_nobody_reads=lambda net, h: h * cached(3))


@late(1000, given(base=lambda: connect()), says=("base.total_changes",))
def data_base_in_memory(net: Any) -> int:
    net.base.execute("insert into t values(1)")  # here
    return int(net.base.total_changes) - 1


def connect() -> sqlite3.Connection:
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table t(a)")
    return base


@late(1000, says=("the context of decimal",), whole=True)
def context_of_decimal(net: Any) -> int:
    decimal.getcontext().prec += 1  # here
    return decimal.getcontext().prec - 29


@late(1000, says=("builtins.calls_of_a_case",))
def attribute_of_builtins(net: Any) -> int:
    attributes = vars(builtins)
    attributes["calls_of_a_case"] = attributes.get("calls_of_a_case", 0) + 1  # here
    return int(attributes["calls_of_a_case"]) - 1


@late(1000, says=("CALLS_BY_KEY",))
def key_of_globals(net: Any) -> int:
    globals()["CALLS_BY_KEY"] += 1  # here
    return int(globals()["CALLS_BY_KEY"]) - 1


@late(1000, says=("torch.calls_of_a_case",))
def attribute_of_torch(net: Any) -> int:
    torch.calls_of_a_case = getattr(torch, "calls_of_a_case", 0) + 1  # type: ignore[attr-defined]  # none of torch's  # here
    return int(vars(torch)["calls_of_a_case"]) - 1


class Ticking(type):
    ticks = 0

    @property
    def tick(cls) -> int:
        Ticking.ticks += 1  # here
        return Ticking.ticks - 1


class Clock(metaclass=Ticking):
    pass


@late(1000, says=("Ticking.ticks",), whole=True)
def property_of_a_class(net: Any) -> int:
    return int(Clock.tick)


@case(REFUSED, given(seen=list), says=("seen",))
def exact_length_of_a_list(net: Any, h: Tensor) -> Tensor:
    net.seen.append(0)  # here
    return h * (0.5 if len(net.seen) == 21 else 1.0)


@case(REFUSED, given(word=""), says=("word",), whole=True)
def exact_length_of_a_word(net: Any, h: Tensor) -> Tensor:
    net.word += "x"  # here
    return h * (0.5 if len(net.word) == 21 else 1.0)


@case(REFUSED, given(turn=False), says=("turn",))
def every_second_call(net: Any, h: Tensor) -> Tensor:
    net.turn = not net.turn  # here
    return h * (0.5 if net.turn else 1.0)


@case(REFUSED, given(parts=lambda: [1.0, 0.5]), says=("parts",), whole=True)
def list_that_turns(net: Any, h: Tensor) -> Tensor:
    net.parts.reverse()  # here
    return h * net.parts[0]


@built(REFUSED, where=None, says=("param_groups[0]['lr']",))
def rate_that_forward_sets() -> Setup:
    def then(net: Any, h: Tensor) -> Tensor:
        net.kept[0].param_groups[0]["lr"] *= 0.9
        return h

    return _with_optimizer(then)


@built(REFUSED, says=("n",), whole=True)
def rate_that_forward_sets_late() -> Setup:
    def then(net: Any, h: Tensor) -> Tensor:
        net.n += 1  # here
        net.kept[0].param_groups[0]["lr"] = 0.05 / (1 + net.n // 100)
        return h

    return _with_optimizer(then)


def _with_optimizer(then: Any) -> Setup:
    setup = net_of(then, given(n=0, kept=list))
    net: Any = setup.model
    net.kept.append(setup.optimizer)
    return setup


def _file_is_told(setup: Setup, state: Any, pef: Any, run: Any) -> str:
    return "" if any(one.startswith("opened by the model: ") for one in pef.notices) else "the file is not told"


def _told_as(what: str) -> Any:
    def check(setup: Setup, state: Any, pef: Any, run: Any) -> str:
        told = [one for one in pef.notices if one.startswith("done by forward(), and not by a run: ")]
        return "" if any(f"{what}, at " in one for one in told) else f"{what} is not told"

    return check


@case(EQUAL, also=_told_as("output"))
def print_in_forward(net: Any, h: Tensor) -> Tensor:
    print(h.shape)
    return h


@case(EQUAL, also=_told_as("output"), whole=True)
def write_to_stderr_in_forward(net: Any, h: Tensor) -> Tensor:
    sys.stderr.write("called")
    return h


@case(EQUAL, also=_told_as("a log message"))
def log_message_in_forward(net: Any, h: Tensor) -> Tensor:
    LOG.warning("called")
    return h


@case(EQUAL, also=_told_as("a warning"), whole=True)
def warning_in_forward(net: Any, h: Tensor) -> Tensor:
    warnings.warn("old", stacklevel=1)
    return h


@case(EQUAL, also=_told_as("subprocess.Popen"), whole=True)
def process_that_forward_starts(net: Any, h: Tensor) -> Tensor:
    subprocess.run([sys.executable, "-V"], check=True, capture_output=True)
    return h


@case(EQUAL, also=_told_as("os.mkdir"), whole=True)
def folder_that_forward_makes(net: Any, h: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory():
        return h


@case(EQUAL, also=_file_is_told)
def file_that_is_read(net: Any, h: Tensor) -> Tensor:
    with open(os.devnull, encoding="utf-8") as file:
        return h * (1.0 + len(file.read()))
