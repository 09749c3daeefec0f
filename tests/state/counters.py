"""State that every call changes: counters whose effect comes late, and counters that nobody reads."""

import re
from functools import partial

from tests.state.case import BATCH, EITHER, REFUSED, add, cases, net_from_source
from tests.state.generated import source_of
from tests.state.ingredients import COUNTERS, IN_A_BUFFER, Ingredient, counter

COUNTING = {"function attribute": "count1.n += 1", "default argument": "n[0] += 1", "closure": "n += 1"}
"""Those that count in a function, and not in forward()."""


def _add_late(row: tuple[str, str, str, str, str], first: int) -> None:
    name, _, _, counts, _ = row
    steps, expected = (first + 2, EITHER) if first < 100 else (4, REFUSED)
    buffered = Ingredient("", IN_A_BUFFER.forward.replace("K", str(first + 1)), IN_A_BUFFER.init)
    build, rewritten = (
        partial(net_from_source, f"late_{key}_{name}", source_of([ingredient], samples=steps * BATCH))
        for key, ingredient in {"counting": counter(row, first + 1), "buffered": buffered}.items()
    )
    says = "count" if name == "closure" else re.findall(r"(\w+@)", counts)[-1].replace("@", "1")
    where = COUNTING.get(name, counts.splitlines()[-1].replace("@", "1"))
    more = {"steps": steps, "says": (says,), "where": where, "whole": name != "attribute"}
    add(name, __name__, build, expected, rewritten=rewritten, **more)


for _row in COUNTERS:
    _add_late(_row, 1000 if _row[0] == "attribute" else 20)


cases(__name__)("""
import itertools
import random
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace
class Helper:
    def __init__(self):
        self.n = 0
    def count(self):
        self.n += 1  # here
        return self.n - 1
class Private:
    __slots__ = ("__n",)
    def __init__(self):
        self.__n = 0
    def count(self):
        self.__n += 1  # here
        return self.__n - 1
late helper_object: 8, given(helper=Helper), says=("helper.n",)
    return net.helper.count()
late private_slot: 8, given(helper=Private), where="self.__n", says=("helper",), whole=True
    return net.helper.count()
late deque_of_ten: 9, given(last=lambda: deque(maxlen=10)), says=("last",), whole=True
    net.last.append(0)  # here
    return len(net.last) - 1
late itertools_cycle: 1, given(cycle=lambda: itertools.cycle([0, 1])), rewritten=None, whole=True
    return int(next(net.cycle))  # here
late ordered_dict_that_shrinks: 10, given(order=lambda: OrderedDict.fromkeys(range(20))), whole=True
    net.order.popitem()  # here
    return 19 - len(net.order)

# Losses that count.
class CountingLoss:
    n = 0
    def __call__(self, result, target):
        self.n += 1  # here
        return functional.mse_loss(result, target) * (1.0 if self.n > 8 else 0.5)
built loss_object: EITHER, steps=10, says=("n",)
    return with_loss(CountingLoss())
STATS = {"n": 0}
def counting_loss(result, target):
    STATS["n"] += 1  # here
    return functional.mse_loss(result, target) * (1.0 if STATS["n"] > 8 else 0.5)
built loss_function_with_a_global: EITHER, steps=10, says=("STATS",), whole=True
    return with_loss(counting_loss)
class Warmup(nn.Module):
    n = 0
    def forward(self, result, target):
        self.n += 1  # here
        return functional.mse_loss(result, target) * min(1.0, self.n / 10)
built loss_module_that_warms_up: EITHER, steps=12, says=("n",), whole=True
    return with_loss(Warmup())

# Draws of Python and NumPy are state of generators.
case rare_draw_of_python: EITHER, steps=12, whole=True
    return h * 2 if random.random() < 0.1 else h  # here

# What nobody reads is exact.
case counter_that_nobody_reads: EQUAL, given(calls=0)
    net.calls += 1
case statistics_that_nobody_reads: EQUAL, given(s=lambda: SimpleNamespace(n=0, shapes=Counter())), whole=True
    net.s.n += 1
    net.s.shapes[tuple(h.shape)] += 1
case numbers_of_a_log: EITHER, given(log=list), whole=True
    net.log.append(h.detach().mean().item())  # here
case hidden_state_that_is_carried: EITHER, given(hidden=None)
    h = h if net.hidden is None else h + net.hidden
    net.hidden = h.detach()  # here
    return h
rewrite hidden_state_in_a_buffer: given(hidden=lambda: torch.zeros(4, 4))
    h = h + net.hidden
    net.hidden.copy_(h.detach())
    return h
""")
