"""Comparison of tensors within tolerances."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from sambasim import samba
from sambasim.errors import DataError
from sambasim.samba.test import assert_close

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "tolerances"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0029, 1.9971]), {}),
        (samba.from_torch_tensor(torch.ones(2).bfloat16()).requires_grad_(), np.ones(2), {"threshold": 0.0}),
        (torch.tensor([110.0]), torch.tensor([100.0]), {"threshold": 0.0, "rtol": 0.1}),
        (torch.tensor([INF, -INF]), torch.tensor([INF, -INF]), {}),
        (1.0, torch.tensor(1.002), {}),
        (torch.ones(2), samba.from_torch_tensor(torch.ones(2), name="x"), {"visualize": True}),
    ],
)
def test_what_is_close_passes(found: Any, expected: Any, tolerances: dict[str, Any]) -> None:
    assert_close(found, expected, "loss", **tolerances)


@pytest.mark.parametrize(
    ("found", "expected", "tolerances", "message"),
    [
        (
            torch.tensor([[1.0, 2.0], [3.0, 4.01]]), torch.tensor([[1.0, 2.004], [3.0, 4.0]]), {},
            "loss: 2 of 4 elements differ by more than 0.003; the worst at [1, 1] is 4.01, and 4 was expected",
        ),
        (
            torch.tensor([1.0]).bfloat16(), torch.tensor([1.01]), {},
            "loss: 1 of 1 elements differ by more than 0.003 + 0.00390625 of the expected value; "
            "the worst at [0] is 1, and 1.01 was expected; in bf16: are both inputs the same, "
                "as of samba.randn(…).bfloat16().float()?",
        ),
        (
            torch.tensor([9.0, NAN]), torch.tensor([0.0, NAN]), {},
            "loss: 2 of 2 elements differ by more than 0.003; the worst at [1] is nan, and nan was expected",
        ),
        (torch.ones(2, 1), torch.ones(2), {}, "loss: the shape is (2, 1), and (2,) was expected"),
    ],
)  # fmt: skip
def test_what_is_not_close_is_told(found: Any, expected: Any, tolerances: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_close(found, expected, "loss", **tolerances)


@pytest.mark.parametrize("value", [None, "text", object()])
def test_what_cannot_be_compared_is_refused(value: object) -> None:
    with pytest.raises(DataError, match=f"^grad: a {type(value).__name__} cannot be compared") as caught:
        assert_close(torch.ones(2), value, "grad")
    assert caught.value.remedy
