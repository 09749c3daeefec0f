"""A call of a model that leaves nothing behind: its tensors, attributes, random numbers and output are as before."""

import contextlib
import copy
import io
import logging
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable


@contextlib.contextmanager
def trial(step: nn.Module, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While this is active, the modules of `step` hold tensors that `convert` made of theirs, each once, and nobody
    hears what is printed, logged or warned of. Afterwards all attributes and the random generators are as before."""
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(_apart(step, convert))
            stack.enter_context(as_written())
            yield
    finally:
        logging.disable(disabled)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """While this is active, what the user has given to torch.compile runs as it is written: a compiled function can be
    neither traced nor recorded. What imports torch's compiler takes seconds; without it nothing is compiled."""
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextlib.contextmanager
def variables_are_tensors() -> Iterator[None]:
    """While this is active, `torch.autograd.Variable`, under whatever name a module of the app has it, returns the
    tensor that it is given: since torch 0.4 a tensor is one itself, and the tracer cannot follow the class."""
    places = [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is Variable and not getattr(module, "__name__", "torch.").startswith("torch.")
    ]
    places.append((torch.autograd, "Variable"))
    try:
        for module, name in places:
            setattr(module, name, _TensorItself)
        yield
    finally:
        for module, name in places:
            setattr(module, name, Variable)


class _EveryTensor(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Tensor)


class _TensorItself(metaclass=_EveryTensor):
    def __new__(cls, data: Tensor, requires_grad: bool = False, volatile: bool = False) -> Tensor:  # type: ignore[misc]  # it makes no object
        return data


@contextlib.contextmanager
def _apart(step: nn.Module, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While this is active, the modules of `step` hold converted tensors; afterwards all attributes are as before."""
    copies: dict[int, Any] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, Tensor):
            copies.setdefault(id(value), convert(value))
        elif type(value) in (dict, OrderedDict):
            copied = copies.setdefault(id(value), copy.copy(value))
            copied.update((key, converted(item)) for key, item in value.items() if isinstance(item, Tensor))
        elif type(value) in (list, set):
            copies.setdefault(id(value), type(value)(converted(v) if isinstance(v, Tensor) else v for v in value))
        else:
            return value
        return copies[id(value)]

    kept = [(module, dict(vars(module))) for module in step.modules()]
    try:
        for module, attributes in kept:
            vars(module).update((name, converted(value)) for name, value in attributes.items())
        yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)
