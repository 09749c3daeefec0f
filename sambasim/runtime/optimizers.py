"""One optimizer step on flat tensors, by torch's fused kernels.

The kernels run on any slice of a group that starts and ends at a multiple of 64 elements, with the bits of a run on the
whole group.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Hyperparameters: TypeAlias = Mapping[str, float | bool]


def apply_optimizer(
    kind: str,
    parameter: Tensor,
    gradient: Tensor,
    states: Mapping[str, Tensor],
    step: int,
    hyperparameters: Hyperparameters,
) -> None:
    """Update `parameter` and `states` in place; all are flat and of one length. `step` counts from 1.

    The arithmetic is that of torch.optim.SGD, Adam and AdamW with `fused=True`.
    """
    if parameter.numel() == 0:
        return
    if kind == "sgd":
        _sgd(parameter, gradient, states, step, hyperparameters)
    else:
        _adam(kind, parameter, gradient, states, step, hyperparameters)


def _sgd(
    parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int, hyperparameters: Hyperparameters
) -> None:
    momentum = float(hyperparameters["momentum"])
    torch._fused_sgd_(
        [parameter],
        [gradient],
        [states["momentum"]] if momentum else [],
        weight_decay=float(hyperparameters["weight_decay"]),
        momentum=momentum,
        lr=float(hyperparameters["lr"]),
        dampening=float(hyperparameters["dampening"]),
        nesterov=bool(hyperparameters["nesterov"]),
        maximize=False,
        is_first_step=step == 1,
    )


def _adam(
    kind: str,
    parameter: Tensor,
    gradient: Tensor,
    states: Mapping[str, Tensor],
    step: int,
    hyperparameters: Hyperparameters,
) -> None:
    kernel = torch._fused_adamw_ if kind == "adamw" else torch._fused_adam_
    kernel(
        [parameter],
        [gradient],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [],
        [torch.tensor(float(step))],
        lr=float(hyperparameters["lr"]),
        beta1=float(hyperparameters["beta1"]),
        beta2=float(hyperparameters["beta2"]),
        weight_decay=float(hyperparameters["weight_decay"]),
        eps=float(hyperparameters["eps"]),
        amsgrad=False,
        maximize=False,
    )
