"""Small nets composed at random of the ingredients, as files of Python."""

import re
from collections.abc import Sequence
from functools import partial
from random import Random
from textwrap import indent

from tests.state.case import BATCH, EITHER, EQUAL, REFUSED, Case, net_from_source
from tests.state.ingredients import COUNTERS, LOSSES, OPTIMIZERS, OTHERS, SOUND, Ingredient, counter

STEPS = 10
LATE = 1000
"""A call that no run of a test reaches: a net with an effect from there on has to be refused."""


def generate(seed: int) -> tuple[Case, str]:
    """The case of a net, and what the net is made of."""
    random = Random(seed)
    sound = [*SOUND, *(counter(row, None) for row in COUNTERS)]
    others = [*OTHERS, *(counter(row, random.choice((2, 8, LATE))) for row in COUNTERS)]
    body = [*random.sample(sound, random.randint(1, 3)), *random.sample(others, random.choice((0, 0, 0, 1, 1, 2)))]
    random.shuffle(body)
    loss, optimizer = _rarely_unsound(random, LOSSES), _rarely_unsound(random, OPTIMIZERS)
    chosen = (*body, loss, optimizer)
    is_late = any(str(LATE) in one.forward for one in chosen)
    expected = REFUSED if is_late else EQUAL if all(one.is_sound for one in chosen) else EITHER
    tolerance = 1e-4 if optimizer.name in ("momentum", "AdamW", "SGD with weight decay") else 0.0
    source = source_of(body, loss, optimizer, random)
    build = partial(net_from_source, f"net_{seed}", source)
    case = Case(f"net_{seed}", build, expected, where=None, steps=STEPS, tolerance=tolerance)
    return case, f"{', '.join(one.name for one in chosen)}\n{source}"


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

    tops, inits, lines = [], [], []
    for number, one in enumerate(body, 1):
        tops += [numbered(one.top, number)] if one.top else []
        inits += [numbered(one.init, number)] if one.init else []
        lines += [numbered(one.forward, number)]
    tops += [one.top for one in (loss, optimizer) if one.top]
    return _TEMPLATE.format(
        tops="\n\n\n".join(["", *tops]),
        inits=indent("\n".join(inits), " " * 8),
        arguments="x" if loss.init else "x, y",
        lines=indent("\n".join(lines), " " * 8),
        end=indent(loss.forward, " " * 8),
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
