"""Inputs by name, by place and None among them: what forward is called with, and what a run binds."""

import copy
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, ModelError, SambasimError
from sambasim.samba.inputs import Binder, example_of, repeatable
from sambasim.samba.process import Reporter
from sambasim.samba.session import session
from sambasim.samba.test import TestWithGold
from tests.samba.harness import BATCH, Load, equal, named_batch, plain, refused, with_sgd

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
        (lambda x, k=2, *more: (x, k, *more), [x, None, t], "x target", (X, 2, T)),
        (lambda x, k=2, y=None, /: (x, k, y), [x, None, t], "x target", (X, 2, T)),
        (lambda x, mask=None, **more: (x, more["y"]), {"x": x, "y": t}, "x y", (X, T)),
        (lambda x, pair: (x, *pair), [x, (None, T)], "x pair.1", (X, None, T)),
        (lambda x, pair: (x, pair["y"]), {"x": x, "pair": {"y": t, "mask": None}}, "x pair.y", (X, T)),
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


@pytest.mark.parametrize(
    ("kind", "forward", "inputs", "what"),
    [
        (ModelError, lambda x, *, mask=None, y=None: x, [x, None, t], r"3 inputs given, and Module\.forward takes x, "),
        (ModelError, lambda x, y: x, [x], "missing a required argument: 'y'"),
        (ModelError, lambda x, y: x, {"x": x, "y": t, "other": t}, "unexpected keyword argument 'other'"),
        (ModelError, lambda x, /, y: x, {"x": x, "y": t}, "'x' parameter is positional only"),
        (DataError, lambda x, mask=None, y=None: x, [_named(X, "y"), None, T], "two inputs are called y"),
        (DataError, lambda x, scale=1.0, y=None: x, [x, 2.0, t], "the input scale must be a tensor, not float"),
    ],
)
def test_inputs_that_forward_does_not_take_or_that_share_a_name_are_refused(
    kind: type[SambasimError], forward: Callable[..., object], inputs: Any, what: str
) -> None:
    with refused(kind, what, "a dictionary by its arguments|a name= of its own|from_torch_tensor"):
        example_of(_module(forward), inputs)


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ((x, None, _named(T, "labels")), []),
        ((_named(X, "image"), None, t), []),
        ({"x": X, "labels": _named(T, "mask")}, []),
        ((x, _named(T, "labels")), [("labels", "mask", "(x, None, labels)")]),
        ((_named(X, "image"), None, _named(T, "mask")), [("mask", "labels", "(x, mask, None)")]),
        ((_named(X, "mask"), x), [("mask", "x", "(x, mask, None)"), ("x", "mask", "(x, mask, None)")]),
    ],
)
def test_a_tensor_in_the_place_of_another_argument_than_its_name_is_found(
    inputs: Any, found: list[tuple[str, str, str]], reporter: Reporter
) -> None:
    example_of(_module(lambda x, mask=None, labels=None: (x, mask, labels)), inputs)
    words = [f"the tensor named {name} is given in the place of {place} of Module.forward" for name, place, _ in found]
    assert [(one.code, one.what, one.remedy) for one in reporter.findings] == [
        ("AP04", what, f"inputs are bound by place: {meant}") for what, (_, _, meant) in zip(words, found, strict=True)
    ]


CONFIG = {"sizes": [1, 2], "rate": float("nan"), "of": ((), X)}
NUMBERS = np.arange(5000)


def masked(x: Any, mask: Any = None, y: Any = None) -> None: ...
def scaled(x: Any, scale: float = 1.0, y: Any = None) -> None: ...
def moded(x: Any, mode: str = "mean", weight: Any = X, y: Any = None) -> None: ...
def trailing(x: Any, y: Any, mask: Any = None) -> None: ...
def starred(x: Any, k: int = 2, *more: Any) -> None: ...
def by_keyword(x: Any, *, k: int = 2, y: Any, **more: Any) -> None: ...
def nested(x: Any, pair: Any = ()) -> None: ...
def configured(x: Any, cfg: Any = CONFIG, y: Any = None) -> None: ...
def numbered(x: Any, at: Any = NUMBERS) -> None: ...


IN_ORDER = [x, None, t]
KEYS = {"y": T, "x": X}
CACHE: Any = [X, {"v": T, "k": X, "mask": None}]


@pytest.mark.parametrize(
    ("forward", "compiled", "inputs", "names"),
    [
        (scaled, IN_ORDER, [X, None, T], "x target"),
        (scaled, IN_ORDER, [X, 1.0, T], "x target"),
        (scaled, IN_ORDER, [t, None, x], "target x"),
        (scaled, IN_ORDER, [t, X], "target x"),
        (scaled, IN_ORDER, {"x": X, "scale": None, "y": T}, "x target"),
        (moded, [x, None, None, t], [X, "mean", None, T], "x target"),
        (trailing, [x, t], [X, T, None], "x target"),
        (trailing, [x, t], (X, T), "x target"),
        (masked, [x], X, "x"),
        (starred, IN_ORDER, [X, None, T], "x target"),
        (starred, IN_ORDER, [t, x], "target x"),
        (by_keyword, {"x": X, "k": None, "y": T, "z": X}, [X, T, X], "x y z"),
        (by_keyword, KEYS, [X, T], "x y"),
        (by_keyword, KEYS, KEYS, "y x"),
        (nested, [x, (None, t)], [X, (None, T)], "x target"),
        (nested, [x], [X, ()], "x"),
        (scaled, IN_ORDER, [X, 1, T], "x target"),
        (scaled, IN_ORDER, [X, True, T], "x target"),
        (moded, [x, None, None, t], [X, None, X.clone(), T], "x target"),
        (configured, IN_ORDER, [X, copy.deepcopy(CONFIG) | {"rate": float("nan")}, T], "x target"),
        (configured, [x], {"x": X, "cfg": copy.deepcopy(CONFIG)}, "x"),
        (numbered, [x], [X, NUMBERS.copy()], "x"),
        (nested, [x, (None, t)], [t, x], "target x"),
        (nested, CACHE, [X, {"k": X, "v": T}], "x pair.k pair.v"),
        (nested, CACHE, [X, T, X], "x pair.v pair.k"),
        (nested, CACHE, {"pair": {"k": X, "v": T}, "x": X}, "pair.k pair.v x"),
    ],
)
def test_a_tensor_is_the_input_of_its_name_or_place(
    forward: Callable[..., object], compiled: Any, inputs: Any, names: str
) -> None:
    model = _module(forward)
    bound = Binder(model, example_of(model, compiled)).named(repeatable(inputs))
    shapes = {name: tuple(tensor.shape) for name, tensor in example_of(model, compiled).inputs.items()}
    assert [*bound] == names.split()
    assert all(tuple(tensor.shape) == shapes[name] for name, tensor in bound.items())


@pytest.mark.parametrize(
    ("forward", "compiled", "inputs", "what"),
    [
        (
            scaled,
            IN_ORDER,
            [X, T, None],
            r"^scale of Module\.forward was 1\.0 when it was compiled, .*; it is a tensor now",
        ),
        (scaled, IN_ORDER, [x, _named(T, "s"), None], r"^scale .* was 1\.0"),
        (scaled, IN_ORDER, [x, _named(T, "scale")], r"^scale .* was 1\.0"),
        (scaled, IN_ORDER, [X, T, T], r"^scale .* was 1\.0"),
        (scaled, IN_ORDER, [X, 2.0, T], r"^scale .* was 1\.0 .* it is 2\.0 now"),
        (scaled, IN_ORDER, {"x": X, "scale": T, "y": T}, r"^scale .* was 1\.0"),
        (moded, [x, None, None, t], [X, T, None, None], "^mode .* was 'mean'"),
        (moded, [x, None, None, t], [X, None, X + 1, T], "^weight .* was its default"),
        (trailing, [x, t], [X, None, T], "^mask .* was None"),
        (trailing, [x, t], [X, T, X], "^mask .* was None"),
        (masked, [x], [X, T], "^mask .* was None"),
        (masked, [_named(X, "mask"), None, t], {"mask": X, "y": T}, "^mask .* was None"),
        (starred, IN_ORDER, [X, T, None], "^k .* was 2"),
        (by_keyword, KEYS, {**KEYS, "k": T}, "^k .* was 2"),
        (
            by_keyword,
            KEYS,
            {**KEYS, "z": T},
            "a tensor is called z, and Module.forward was compiled with the inputs x, y",
        ),
        (nested, [x, (None, t)], [X, (T, None)], r"^pair\.0 .* was None"),
        (nested, [x], [X, [1]], r"^pair .* was \(\) .* it is \[1\] now"),
        (
            configured,
            [x],
            [X, {**CONFIG, "sizes": [1]}],
            r"^cfg .* was \{'sizes': \[1, 2\], .* it is \{'sizes': \[1\],",
        ),
        (configured, [x], [X, []], r"^cfg .* it is \[\] now"),
        (numbered, [x], [X, NUMBERS + (NUMBERS == 2500)], "^at .* was array"),
        (numbered, [x], [X, [1]], "^at .* was array"),
        (masked, [x], {1: X}, "a tensor is called 1, and Module.forward was compiled with the inputs x"),
        (nested, [x], [X, (T, None)], r"^pair of Module.forward was \(\)"),
        (
            masked,
            IN_ORDER,
            [X, None, None],
            r"the input target of the PEF has no tensor: .* y of Module\.forward had one",
        ),
        (masked, IN_ORDER, {"x": None, "target": T}, "the input x of the PEF has no tensor"),
        (masked, IN_ORDER, [x, x], "two tensors are given for the input x"),
        (masked, IN_ORDER, [t, None, T], "two tensors are given for the input target"),
        (masked, IN_ORDER, [x, None, _named(T, "label")], "a tensor is called label"),
        (lambda x: x, [x], [X, T], "a tensor fits no place, and Module.forward was compiled with the inputs x"),
    ],
)
def test_what_was_constant_stays_constant_and_what_was_a_tensor_a_tensor(
    forward: Callable[..., object], compiled: Any, inputs: Any, what: str
) -> None:
    model = _module(forward)
    binder = Binder(model, example_of(model, compiled))
    with refused(DataError, what, r"session\.run\(\[\w+(, [\w…]+)*\]\)|name='target'"):
        binder.named(inputs)


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
    with refused(
        DataError, r"mask of Masked\.forward was None when it was compiled", r"session\.run\(\[x, None, target\]\)"
    ):
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
