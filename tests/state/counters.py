"""State that every call changes: counters whose effect comes late, and counters that nobody reads."""

import re
from functools import partial

from tests.state.case import BATCH, EITHER, REFUSED, add, cases, net_from_source
from tests.state.generated import source_of
from tests.state.ingredients import COUNTERS, IN_A_BUFFER, Ingredient, counter

COUNTING = {
    "slots": "self.__n += 1",
    "function attribute": "count1.n += 1",
    "default argument": "n[0] += 1",
    "closure": "n += 1",
}
"""Those that count in a function, and not in forward()."""


def _add_late(row: tuple[str, str, str, str, str], first: int) -> None:
    name, _, _, counts, _ = row
    steps, expected = (first + 2, EITHER) if first < 100 else (4, REFUSED)
    buffered = Ingredient("", IN_A_BUFFER.forward.replace("K", str(first + 1)), IN_A_BUFFER.init)
    build, rewritten = (
        partial(net_from_source, f"late_{key}_{name}", source_of([ingredient], samples=steps * BATCH))
        for key, ingredient in {"counting": counter(row, first + 1), "buffered": buffered}.items()
    )
    says = "n of count at late_" if name == "closure" else re.findall(r"(\w+@)", counts)[-1].replace("@", "1")
    where = COUNTING.get(name, counts.splitlines()[-1].replace("@", "1"))
    more = {"steps": steps, "says": (says,), "where": where, "whole": name not in ("attribute", "closure")}
    add(name, __name__, build, expected, rewritten=rewritten, **more)


for _row in COUNTERS:
    _add_late(_row, 1000 if _row[0] == "attribute" else 20)


cases(__name__)("""
from collections import OrderedDict
from sambasim.compiler.capture import explain
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

# What nobody reads is exact.
case counter_that_nobody_reads: EQUAL, given(calls=0), whole=True
    net.calls += 1
case numbers_of_a_log: EITHER, given(log=list), whole=True
    net.log.append(h.detach().mean().item())  # here
case hidden_state_that_is_carried: REFUSED, given(state=None), says=("model.state[0], ", explain.REWRITES["tensor"])
    h = h if net.state is None else h + net.state[0]
    net.state = (h.detach(), 1)  # here
    return h
rewrite hidden_state_in_a_buffer: given(hidden=lambda: torch.zeros(4, 4))
    h = h + net.hidden
    net.hidden.copy_(h.detach())
    return h
""")
