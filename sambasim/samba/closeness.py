"""Are two results close enough? What an app's test asks of the device's result and the host's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sambasim.errors import DataError
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.dropout import rate_names
from sambasim.samba.tensor import to_torch

_ROUNDING = 2.0**-8
"""Rounding to bf16, which has 8 significant bits, changes a number by at most this part of it."""


@checks_keywords_beside("assert_close", ())
def assert_close(
    samba: Any, gold: Any, label: str, threshold: float = 3e-3, rtol: float = 0.0, visualize: bool = False
) -> None:
    """Passes if every element of `samba` is within `threshold + rtol * |gold|` of the same element of `gold`.

    What the device gives in bf16 cannot be nearer than that type allows: there 1/256 is added to `rtol`.
    Both are tensors, arrays or numbers, compared in float64; equal infinities are close, and NaN is close to nothing.
    `visualize` has no effect.
    Raises AssertionError, which says how many elements differ and by how much at most, or that the shapes differ, and
    DataError for what is no tensor, such as the sn_grad of a tensor that has none.
    """
    found, expected = _float64(samba, label), _float64(gold, label)
    rounded = any(isinstance(one, Tensor) and one.dtype is torch.bfloat16 for one in (samba, gold))
    if rounded:
        rtol += _ROUNDING
    if found.shape != expected.shape:
        raise AssertionError(f"{label}: the shape is {tuple(found.shape)}, and {tuple(expected.shape)} was expected")
    difference = (found - expected).abs()
    apart = ~((found == expected) | (difference <= threshold + rtol * expected.abs()))
    if not apart.any():
        return
    # A NaN counts as infinitely far away, so that the worst element is one that is named.
    distance = torch.where(apart, difference.nan_to_num(nan=torch.inf), -torch.inf)
    worst = np.unravel_index(int(distance.argmax()), tuple(found.shape))
    hint = "; in bf16: were both given the same inputs, as of samba.randn(…).bfloat16().float()?" if rounded else ""
    if _draws():
        hint += '; the model has dropout, for which host and device draw other numbers: hyperparam_dict={"p": 0.0}'
    place = f" at {[int(index) for index in worst]}" if worst else ""
    raise AssertionError(
        f"{label}: {int(apart.sum())} of {apart.numel()} elements differ by more than "
        f"{threshold:g}{f' + {rtol:g} of the expected value' if rtol else ''}; the worst{place} is "
        f"{float(found[worst]):g}, and {float(expected[worst]):g} was expected{hint}"
    )


def _draws() -> bool:
    """Whether the PEF that is loaded trains with dropout."""
    from sambasim.samba.session import session  # which imports this package

    training = None if session.machine is None else session.machine.program.training
    return training is not None and bool(rate_names(training))


def _float64(value: Any, label: str) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "give two tensors, arrays or numbers"
        if value is None:
            remedy += "; a gradient is None before the first backward, and where requires_grad is False"
        raise DataError(
            f"{label}: this cannot be compared: it is of type {type(value).__name__}", where=app_line(), remedy=remedy
        ) from error
    return to_torch(tensor).detach().to(torch.float64)
