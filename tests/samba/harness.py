"""What tests of the SambaFlow API share: models, batches, plain PyTorch that trains the same, and errors.

Every parameter of LogReg and OnlyOut has a multiple of 64 elements, for which torch's fused optimizers round as a PEF's
do: so weights are compared bit for bit.
"""

import copy
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import SambasimError
from sambasim.samba.session import session

BATCH, FEATURES, CLASSES = 4, 8, 64
MOMENTUM = 0.9

Made: TypeAlias = tuple[Any, Any]
"""A model and its optimizer, or several."""

PefOf: TypeAlias = Callable[..., str]
"""`pef_of(make, inputs, **config)`: the PEF of what `make` makes, compiled the first time that a test asks for it."""

Load: TypeAlias = Callable[..., Made]
"""`load(make, inputs, **config)`: that PEF, traced for a new model, which is returned with its optimizer."""


class Net(nn.Module):
    """Features `[batch, 5]` and classes `[batch]` to the loss of each sample and the outputs."""

    output_tensors: Any

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.second(torch.relu(self.first(x)))
        return nn.functional.cross_entropy(outputs, target, reduction="none"), outputs


class LogReg(nn.Module):
    """Features [batch, 8] and classes [batch] to the mean loss and the outputs [batch, 64], as starters have it."""

    output_tensors: Any
    run: Any

    def __init__(self, reduction: str = "mean", features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(features, classes)
        self.criterion = nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        out = self.lin_layer(inputs)
        return self.criterion(out, targets), out


class OnlyOut(nn.Module):
    """Features [batch, 8] to a tuple of the outputs [batch, 64]: the app computes the loss on the host."""

    output_tensors: Any

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        return (self.lin_layer(inputs),)


class Layer(nn.Module):
    """Features [batch, 6] to what `then` makes of the outputs [batch, 3] of a linear layer."""

    output_tensors: Any

    def __init__(self, then: Callable[[Tensor], Any] = lambda outputs: outputs) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.linear(x))


def layer_batch(**options: Any) -> list[Any]:
    """The input of Layer."""
    values = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(0))
    return [samba.from_torch_tensor(values, **{"name": "x", "batch_dim": 0, **options})]


class Plainly:
    """A copy of `model`, and fused SGD that trains it on the host."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = copy.deepcopy(model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: Any = torch.optim.SGD(trained, lr=0.1, momentum=MOMENTUM, fused=True)

    def step(
        self, batch: Sequence[Tensor], gradient: Tensor | None = None, lr: float | None = None
    ) -> tuple[Tensor, ...]:
        """A step of training from the mean of the first output, or from its `gradient`. Returns the outputs."""
        if lr is not None:
            self.optimizer.param_groups[0]["lr"] = lr
        outputs = self.model(*map(plain, batch))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.optimizer.zero_grad()
        start = outputs[0].mean() if gradient is None else outputs[0]
        start.backward(None if gradient is None else gradient.reshape(start.shape))
        self.optimizer.step()
        return tuple(output.detach() for output in outputs)


def plain(tensor: Tensor) -> Tensor:
    """A SambaTensor or parameter as a plain tensor, outside autograd."""
    return tensor.detach().as_subclass(Tensor)


def equal(tensor: Tensor, expected: Tensor) -> bool:
    """Whether the bits are the same."""
    return torch.equal(plain(tensor), plain(expected))


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    """Whether the bits of all parameters on the host are the same."""
    return all(map(equal, model.parameters(), other.parameters()))


def seeded(model: type[nn.Module], *settings: Any, **options: Any) -> Any:
    """A model with the same weights each time."""
    torch.manual_seed(0)
    return model(*settings, **options)


def named_batch(number: int, size: int, **widths: int) -> list[Any]:
    """Features and classes by the names of `widths`; another batch for each number."""
    generator = torch.Generator().manual_seed(number)
    (features, width), (label, classes) = widths.items()
    values = {features: torch.randn(size, width, generator=generator)}
    values[label] = torch.randint(classes, (size,), generator=generator)
    return [samba.from_torch_tensor(tensor, name=name, batch_dim=0) for name, tensor in values.items()]


def batch_of(number: int = 0, size: int = BATCH) -> list[Any]:
    """A batch of LogReg, named as apps name it; another one for each number."""
    return named_batch(number, size, image=FEATURES, label=CLASSES)


def net_batch(number: int = 0, size: int = BATCH) -> tuple[Any, Any]:
    """A batch of Net; another one for each number."""
    x, target = named_batch(number, size, x=5, target=3)
    return x, target


def with_sgd(make: Callable[[], nn.Module], **options: Any) -> Made:
    """What `make` makes, with the same weights each time, and SGD."""
    torch.manual_seed(0)
    model = samba.from_torch_model_(make())
    return model, samba.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def compiled(made: Made, inputs: Any, folder: Path, name: str = "net", loss_indices: Any = None, **config: Any) -> str:
    """The path of the PEF."""
    (model, optimizers), config = made, {"output_folder": str(folder), **config}
    return session.compile(model, inputs, optimizers, name, config_dict=config, loss_indices=loss_indices)


def imported(module: str) -> Any:
    """A module of `sambaflow`, by its name below it."""
    return import_module(f"sambaflow.{module}")


def parsed(command: str, *words: str, **functions: Any) -> Namespace:
    """What parse_app_args makes of a command line."""
    arguments: Namespace = imported("samba.utils.argparser").parse_app_args(argv=[command, *words], **functions)
    return arguments


@contextmanager
def refused(kind: type[SambasimError], what: str, remedy: str = "", line: str = "") -> Iterator[None]:
    """An error of this kind comes. It says `what`, and names a `line` of the caller's file and a remedy with these
    regular expressions in them."""
    app = sys._getframe(2).f_code.co_filename  # of the test, above this function and contextlib
    with pytest.raises(kind) as caught:
        yield
    assert re.search(what, caught.value.what)
    assert "Traceback" not in str(caught.value)
    assert re.search(f"^{re.escape(app)}:.*{line}", str(caught.value.where))
    assert caught.value.remedy
    assert re.search(remedy, caught.value.remedy)
