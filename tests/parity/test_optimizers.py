"""Each optimizer of torch, with two parameter groups, clipping, warm-up and ZeRO, beside an eager loop over the batches
of both replicas."""

from collections.abc import Callable
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer, lr_scheduler

import sambasim as ss
from sambasim.optimizers import OPTIMIZERS
from tests.support.whole import whole_case

STEPS, WARMUP, NORM, VALUE, SAMPLES = 100, 10, 0.5, 0.02, 8
MORE: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adam": {"amsgrad": True},
    "adamw": {"maximize": True, "lr": 1e-4},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "nadam": {"decoupled_weight_decay": True},
}
KINDS = [kind for kind, entry in OPTIMIZERS.items() if entry.torch_name]
CASES = [pytest.param(kind, MORE.get(kind, {}), 1, id=kind) for kind in KINDS]
CASES += [whole_case(kind, given, zero) for kind in MORE for given in ({}, MORE[kind]) for zero in (0, 2, 3)]


def _net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 3))


def _optimizer(kind: str, model: nn.Module, given: dict[str, Any]) -> Optimizer:
    make: Callable[..., Optimizer] = getattr(torch.optim, OPTIMIZERS[kind].torch_name or "")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return make([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], **{"lr": 5e-3, **given})


@pytest.mark.parametrize(("kind", "given", "zero"), CASES)
@pytest.mark.usefixtures("one_thread")
def test_a_hundred_steps_of_two_groups(kind: str, given: dict[str, Any], zero: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)
    model = _net()
    optimizer = _optimizer(kind, model, given)
    by_value = kind in ("adagrad", "adamax")
    bound: dict[str, Any] = {"max_grad_value" if by_value else "max_grad_norm": VALUE if by_value else NORM}
    pef = ss.compile(
        model,
        (x[:SAMPLES], y[:SAMPLES]),
        loss="cross_entropy",
        optimizer=optimizer,
        output_folder=tmp_path,
        quiet=True,
        check=1,
        **bound,
        data_parallel=True,
        zero=zero,
    )
    order = {"data.shuffle": False, "training.schedule.warmup_steps": WARMUP}
    found = ss.run(pef, (x, y), replicas=2, steps=STEPS, threads=1, quiet=True, set=order).losses
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    wanted = []
    for step in range(STEPS):
        at = step % 4 * 2 * SAMPLES
        here = slice(at, at + 2 * SAMPLES)
        loss = cross_entropy(model(x[here]), y[here])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if by_value:
            clip_grad_value_(model.parameters(), VALUE)
        else:
            clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        scheduler.step()
        wanted.append(loss.item())
    assert len(set(found)) > STEPS / 2
    close = 1e-3 if kind == "rmsprop" else 1e-4  # a centered variance is a small difference
    assert all(isclose(ours, theirs, rel_tol=close) for ours, theirs in zip(found, wanted, strict=True))
