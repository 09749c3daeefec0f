"""Inputs by name, by place and None among them: what forward is called with, and what a run binds."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, ModelError
from sambasim.samba.inputs import example_of
from sambasim.samba.session import session
from sambasim.samba.test import TestWithGold
from tests.samba.harness import BATCH, Load, equal, named_batch, plain, with_sgd

X, T = torch.ones(2, 3), torch.zeros(2)


def _named(tensor: Tensor, name: str) -> Any:
    return samba.from_torch_tensor(tensor, name=name)


def _module(forward: Callable[..., object]) -> Any:
    module: Any = nn.Module()
    module.forward = forward
    return module


x, t = _named(X, "x"), _named(T, "target")


@pytest.mark.parametrize(
    ("forward", "inputs", "names", "given"),
    [
        (lambda x, mask=None, y=None: (x, mask, y), [x, None, t], "x target", (X, None, T)),
        (lambda x, mask=None, y=None: (x, mask, y), [x, t], "x target", (X, T, None)),
        (lambda x, mask=None, y=None: (x, mask, y), {"x": x, "mask": None, "y": t}.values(), "x target", (X, None, T)),
        (lambda mask=None, x=None, y=None: (x, mask, y), [None, x, t], "x target", (X, None, T)),
        (lambda x, y, mask=None: (x, mask, y), [x, t, None], "x target", (X, None, T)),
        (lambda a=None, x=None, b=None, y=None: (x, b, y), [None, x, None, t], "x target", (X, None, T)),
        (lambda x, mask, y: (x, mask, y), [x, None, t], "x target", (X, None, T)),
        (lambda x, scale=2.0, y=None: (x, scale, y), [x, None, t], "x target", (X, 2.0, T)),
        (lambda x, mask=None, y=None, /: (x, mask, y), [x, None, t], "x target", (X, None, T)),
        (lambda *given: given, [x, None, t], "x target", (X, None, T)),
        (lambda x, mask=None, y=None: (x, mask, y), [X, None, T], "x y", (X, None, T)),
        (lambda x, y: (x, y), [_named(X, "y"), _named(T, "x")], "y x", (X, T)),
        (lambda x, mask=None, y=None: (x, mask, y), [_named(X, "y"), None, _named(T, "x")], "y x", (X, None, T)),
        (lambda x, mask=None, y=None: (x, mask, y), [_named(X, "mask"), None, t], "mask target", (X, None, T)),
        (lambda x, mask=None, y=None: (x, mask, y), {"x": x, "mask": None, "y": t}, "x y", (X, None, T)),
        (lambda x, mask, y: (x, mask, y), {"x": x, "mask": None, "y": t}, "x y", (X, None, T)),
        (lambda x, *, mask=2.0, y: (x, mask, y), {"x": x, "mask": None, "y": t}, "x y", (X, 2.0, T)),
        (lambda x, y: (x, y), {"x": x, "y": t, "other": None}, "x y", (X, T)),
    ],
)
def test_each_tensor_keeps_its_name_and_its_place(
    forward: Callable[..., object], inputs: Any, names: str, given: tuple[Any, ...]
) -> None:
    model = _module(forward)
    example = example_of(model, inputs)
    assert [*example.inputs] == names.split()
    pairs = zip(example.call(model, [*example.inputs.values()]), given, strict=True)
    assert all(equal(one, wanted) if isinstance(wanted, Tensor) else one == wanted for one, wanted in pairs)


def test_inputs_that_forward_does_not_take_or_that_share_a_name_are_refused() -> None:
    with pytest.raises(ModelError, match=r"3 inputs are given, and Module\.forward takes 1: x") as caught:
        example_of(_module(lambda x, *, mask=None, y=None: x), [x, None, t])
    assert "a dictionary by its arguments" in str(caught.value.remedy)
    with pytest.raises(DataError, match="two inputs are called y"):
        example_of(_module(lambda x, mask=None, y=None: x), [_named(X, "y"), None, T])


class Masked(nn.Module):
    """The mean loss and the outputs; the second argument is None in all that is compiled."""

    output_tensors: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, y: Any = None) -> Any:
        out = self.linear(x if mask is None else x * mask)
        return nn.functional.cross_entropy(out, y), out


make = partial(with_sgd, Masked, momentum=0.9)


def _batch(number: int = 0, **names: str) -> list[Any]:
    """Features and classes, called x and target or by `names`."""
    return [
        _named(plain(one), names.get(str(one.sn_name), one.sn_name))
        for one in named_batch(number, BATCH, x=5, target=3)
    ]


FORMS: Mapping[str, Callable[[Any, Any], Any]] = {
    "without None": lambda x, t: [x, t],
    "with None": lambda x, t: (x, None, t),
    "in another order": lambda x, t: [t, None, x],
    "by name": lambda x, t: {"x": x, "target": t},
    "by argument": lambda x, t: {"x": x, "mask": None, "y": t},
    "values": lambda x, t: {"x": x, "mask": None, "y": t}.values(),
    "without names": lambda x, t: [plain(x), None, plain(t)],
    "without names or None": lambda x, t: [plain(x), plain(t)],
}


def test_a_run_binds_by_name_with_none_or_without(load: Load) -> None:
    x, target = _batch()
    model, optimizer = load(make, (x, None, target))
    for number, form in enumerate(FORMS.values()):
        x, target = _batch(number)
        expected = model(plain(x), None, plain(target))
        results = samba.session.run(form(x, target), section_types=["fwd"])
        assert all(map(equal, results, expected)), [*FORMS][number]
        TestWithGold(Namespace(), "masked", model, form(x, target), optimizer, threshold=0.0).test()
    with pytest.raises(DataError, match=r"a tensor is called mask, and Masked was compiled with the inputs x, target"):
        samba.session.run([plain(x), plain(target), None])
    with pytest.raises(DataError, match="a tensor is called y") as caught:
        samba.session.run([x, None, _named(plain(target), "y")])
    assert "name='target'" in str(caught.value.remedy)


def test_names_of_other_arguments_are_names(load: Load) -> None:
    x, target = _batch(x="y", target="x")
    swapped = partial(make)
    model, optimizer = load(swapped, [x, None, target])
    expected = model(plain(x), None, plain(target))
    for given in ([x, target], [target, None, x], {"y": x, "x": target}, [plain(x), None, plain(target)]):
        assert all(map(equal, samba.session.run(given, section_types=["fwd"]), expected))
        TestWithGold(Namespace(), "masked", model, given, optimizer, threshold=0.0).test()
    session.reset()
