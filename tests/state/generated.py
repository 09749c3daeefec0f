"""Small nets composed at random of the ingredients, as files of Python. `python -m tests.state.generated --seeds 0:500`
prints the verdicts, and each net with a wrong one. The exit code is 1 if there is one."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from textwrap import indent

from tests.state.case import BATCH, EITHER, EQUAL, REFUSED, Case, net_from_source
from tests.state.ingredients import COUNTERS, HOOK, LOSSES, OPTIMIZERS, OTHERS, SOUND, Ingredient, counter
from tests.state.play import Found, complaints, play

STEPS = 10
LATE = 1000
"""A call that no run of a test reaches: a net with an effect from there on has to be refused."""


@dataclass(frozen=True, slots=True)
class Generated:
    seed: int
    source: str
    names: tuple[str, ...]
    is_sound: bool
    is_late: bool

    def case(self) -> Case:
        expected = REFUSED if self.is_late else EQUAL if self.is_sound else EITHER
        rounds = any(name in ("momentum", "AdamW", "SGD with weight decay") for name in self.names)
        tolerance = 1e-4 if rounds else 0.0
        build = partial(net_from_source, f"net_{self.seed}", self.source)
        return Case(f"net_{self.seed}", build, expected, where=None, steps=STEPS, tolerance=tolerance)


def generate(seed: int) -> Generated:
    random = Random(seed)
    sound = [*SOUND, *(counter(row, None) for row in COUNTERS)]
    late = [counter(row, random.choice((2, 8, LATE))) for row in COUNTERS]
    others = [*OTHERS, *random.sample(late, len(OTHERS))] if len(late) > len(OTHERS) else [*OTHERS, *late]
    body = [*random.sample(sound, random.randint(1, 3)), *random.sample(others, random.choice((0, 0, 0, 1, 1, 2)))]
    random.shuffle(body)
    loss, optimizer = _rarely_unsound(random, LOSSES), _rarely_unsound(random, OPTIMIZERS)
    chosen = (*body, loss, optimizer)
    return Generated(
        seed,
        source_of(body, loss, optimizer, random),
        tuple(one.name for one in chosen),
        all(one.is_sound for one in chosen),
        any(str(LATE) in one.forward for one in chosen),
    )


def _rarely_unsound(random: Random, ingredients: Sequence[Ingredient]) -> Ingredient:
    is_sound = random.random() < 0.8
    return random.choice([one for one in ingredients if one.is_sound == is_sound])


def source_of(
    body: Sequence[Ingredient],
    loss: Ingredient = LOSSES[0],
    optimizer: Ingredient = OPTIMIZERS[0],
    random: Random | None = None,
    samples: int = STEPS * BATCH,
) -> str:
    """`random` draws the numbers K; by default they depend on nothing else."""
    random = random or Random(0)

    def numbered(text: str, number: int) -> str:
        own = re.sub(r"@(?!dataclass|functools|torch)", str(number), text)
        return own.replace("K", str(random.choice((2, 8))))

    tops, inits, lines, methods = [], [], [], ""
    for number, one in enumerate(body, 1):
        tops += [numbered(one.top, number)] if one.top else []
        inits += [numbered(one.init, number)] if one.init else []
        lines += [numbered(one.forward, number)]
        methods += numbered(HOOK, number) if one.name == "hook that counts" else ""
    tops += [one.top for one in (loss, optimizer) if one.top]
    return _TEMPLATE.format(
        tops="\n\n\n".join(["", *tops]),
        inits=indent("\n".join(inits), " " * 8),
        arguments="x" if loss.init else "x, y",
        lines=indent("\n".join(lines), " " * 8),
        end=indent(loss.forward, " " * 8),
        methods=methods,
        loss=loss.init or "None",
        optimizer=optimizer.init,
        attached=indent(optimizer.forward, " " * 4),
        samples=samples,
    )


_TEMPLATE = """import functools
import itertools
import random
import threading
from collections import Counter, deque, namedtuple
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.state.case import Setup
{tops}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.final = nn.Linear(6, 1)
{inits}

    def forward(self, {arguments}):
        h = torch.tanh(self.first(x))
{lines}
        out = self.final(h).squeeze(1)
{end}
{methods}

def make():
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    optimizer = {optimizer}
    scheduler = None
{attached}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn({samples}, 3, generator=generator)
    y = torch.sin(x.sum(1)) + 0.1 * torch.randn({samples}, generator=generator)
    return Setup(model, (x, y), {loss}, optimizer, scheduler)
"""


def judge(one: Generated) -> tuple[Found, list[str]]:
    """The verdict, and what is wrong with it."""
    case = one.case()
    found = play(case)
    return found, [*complaints(case, found)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.state.generated", description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="FIRST:END, or one seed. Default: 0:500.")
    parser.add_argument("--source", action="store_true", help="Only print the nets.")
    given = parser.parse_args(arguments)
    first, _, end = given.seeds.partition(":")
    verdicts: Counter[str] = Counter()
    for seed in range(int(first), int(end or int(first) + 1)):
        one = generate(seed)
        if given.source:
            print(one.source)
            continue
        found, wrong = judge(one)
        kind = "late" if one.is_late else "sound" if one.is_sound else "other"
        told = "told" if found.verdict == "equal" and found.notices else found.verdict
        verdicts[f"{kind:<6} {told}{' WRONG' if wrong else ''}"] += 1
        if wrong:
            names = ", ".join(one.names)
            print(f"{'=' * 100}\nseed {seed}: {names}\n{'; '.join(wrong)}\n{found}\n{one.source}", flush=True)
    for name, count in sorted(verdicts.items()):
        print(f"{count:5}  {name}")
    return int(any("WRONG" in name for name in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
