"""State that is far from the model: in modules that it imports, in objects of the standard library, in an optimizer;
and state that one call changes and the next changes back."""

import logging
import os
import re
import weakref
from typing import Any

from torch import nn

from tests.state.case import Setup, cases, given, net_of

LOG = logging.getLogger(__name__)
CALLS_BY_KEY = 0
WEAK: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _with_optimizer(then: Any) -> Setup:
    setup = net_of(then, given(n=0, kept=list))
    net: Any = setup.model
    net.kept.append(setup.optimizer)
    return setup


ACTS = (
    ("os.mkdir", "with tempfile"), ("subprocess.Popen", "subprocess.run("), ("output", "print(h.shape)"),
    ("output", 'sys.stderr.write("called")'), ("a log message", 'LOG.warning("called")'),
    ("a warning", "warnings.warn("), (os.devnull, "with open("),
)  # fmt: skip
"""Of `acts_in_forward`, each with its line."""


def _are_told(setup: Setup, state: Any, pef: Any, run: Any) -> str:
    begins = ("done by forward(), and not by a run: ", "opened by the model: ")
    told = "\n".join(one for one in pef.notices if one.startswith(begins))
    lost = (act for act, line in ACTS if not re.search(rf"(: |, ){act}, at \S+:\d+: {re.escape(line)}", told))
    return ", ".join(lost)


cases(__name__)("""
import array
import decimal
import functools
import io
import multiprocessing
import numpy as np
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from sambasim.compiler.capture import explain
late function_of_a_module: 1000, where="MODULE_CALLS", says=("MODULE_CALLS", explain.REWRITES["value"])
    from tests.state import far_away
    return far_away.count()
late attribute_of_a_logger: 1000, says=("LOG.n",), whole=True
    attributes = vars(LOG)
    attributes["n"] = attributes.get("n", 0) + 1  # here
    return int(attributes["n"]) - 1
late weak_dictionary: 1000, says=("WEAK",), whole=True
    WEAK[net] = WEAK.get(net, 0) + 1  # here
    return WEAK[net] - 1
late scalar_of_numpy: 1000, given(count=lambda: np.int64(0)), says=("count",), whole=True
    net.count = net.count + np.int64(1)  # here
    return int(net.count) - 1
case dictionary_in_an_array: EQUAL, given(facts=lambda: np.array({"mean": 0.5}, dtype=object))
    return h * net.facts.item()["mean"]
late stream: 1000, given(text=lambda: io.StringIO("1" * 10_000)), where=None, says=("text",), whole=True
    return len(net.text.read(1)) + net.text.tell() - 2
late array_of_python: 1000, given(count=lambda: array.array("i", [0])), says=("count",), whole=True
    net.count[0] += 1  # here
    return int(net.count[0]) - 1
late number_of_processes: 1000, given(count=lambda: multiprocessing.Value("i", 0)), says=("count",), whole=True
    net.count.value += 1  # here
    return int(net.count.value) - 1
late environment: 1000, says=("the environment",), whole=True
    os.environ["SAMBASIM_CASE"] = str(int(os.environ.get("SAMBASIM_CASE", "0")) + 1)  # here
    return int(os.environ["SAMBASIM_CASE"]) - 1
@functools.lru_cache
def cached(number):
    return number
late hits_of_a_cache: 1000, says=("cached.cache_info()",)
    cached(3)  # here
    return cached.cache_info().hits - 1
case cache_whose_hits_nobody_reads: EQUAL, whole=True
    return h * cached(3)
def connect():
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table t(a)")
    return base
late data_base_in_memory: 1000, given(base=lambda: connect()), says=("base.total_changes",), whole=True
    net.base.execute("insert into t values(1)")  # here
    return int(net.base.total_changes) - 1
late context_of_decimal: 1000, says=("the context of decimal",), whole=True
    decimal.getcontext().prec += 1  # here
    return decimal.getcontext().prec - 29
late key_of_globals: 1000, says=("CALLS_BY_KEY",), whole=True
    globals()["CALLS_BY_KEY"] += 1  # here
    return int(globals()["CALLS_BY_KEY"]) - 1
late attribute_of_torch: 1000, says=("torch.calls_of_a_case",)
    torch.calls_of_a_case = getattr(torch, "calls_of_a_case", 0) + 1  # here
    return int(vars(torch)["calls_of_a_case"]) - 1
class Ticking(type):
    ticks = 0
    @property
    def tick(cls):
        Ticking.ticks += 1  # here
        return Ticking.ticks - 1
class Clock(metaclass=Ticking):
    pass
late property_of_a_class: 1000, says=("Ticking.ticks",), whole=True
    return int(Clock.tick)
case exact_length_of_a_list: REFUSED, given(seen=list), steps=22, says=("seen", explain.REWRITES["content"]), whole=True
    net.seen.append(0)  # here
    return h * (0.5 if len(net.seen) == 21 else 1.0)
rewrite count_in_place_of_a_length: given(steps=zero)
    net.steps.add_(1)
    return h * torch.where(net.steps == 21, 0.5, 1.0)
case exact_length_of_a_word: REFUSED, given(word=""), says=("word",), whole=True
    net.word += "x"  # here
    return h * (0.5 if len(net.word) == 21 else 1.0)
case every_second_call: REFUSED, given(turn=False), says=("turn",)
    net.turn = not net.turn  # here
    return h * (0.5 if net.turn else 1.0)
built rate_that_forward_sets: REFUSED, where=None, says=("param_groups[0]['lr']",), whole=True
    def then(net, h):
        net.kept[0].param_groups[0]["lr"] *= 0.9
        return h
    return _with_optimizer(then)
built rate_that_forward_sets_late: REFUSED, says=("n",), whole=True
    def then(net, h):
        net.n += 1  # here
        net.kept[0].param_groups[0]["lr"] = 0.05 / (1 + net.n // 100)
        return h
    return _with_optimizer(then)
case acts_in_forward: EQUAL, also=_are_told
    with tempfile.TemporaryDirectory():
        subprocess.run([sys.executable, "-V"], check=True, capture_output=True)
        print(h.shape)
        sys.stderr.write("called")
        LOG.warning("called")
        warnings.warn("old", stacklevel=1)
    with open(os.devnull, encoding="utf-8") as file:
        return h * (1.0 + len(file.read()))
""")
