"""Small apps for the census: models, one batch, plain PyTorch that trains the same, and errors.

Every parameter has a multiple of 64 elements, for which torch's fused optimizers round as a PEF's do: so weights are
compared bit for bit.
"""

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.errors import SambasimError

BATCH, FEATURES, CLASSES = 4, 8, 64
MOMENTUM = 0.9


class LogReg(nn.Module):
    """Features [batch, 8] and classes [batch] to the mean loss and the outputs [batch, 64], as starters have it."""

    output_tensors: Any
    run: Any
    write_host_params: Any

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)
        self.criterion = nn.CrossEntropyLoss(reduction=reduction)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = self.lin_layer(inputs)
        return self.criterion(out, targets), out


class OnlyOut(nn.Module):
    """Features [batch, 8] to outputs [batch, 64]: the app computes the loss on the host."""

    output_tensors: Any
    run: Any

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.lin_layer(inputs)
        return out


class Plainly:
    """A copy of `model`, and SGD, or another optimizer of `torch.optim`, that trains it on the host."""

    def __init__(
        self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any
    ) -> None:
        self.model: Any = copy.deepcopy(model)
        options = options or {"lr": 0.1, "momentum": MOMENTUM}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: Any = optimizer(trained, fused=True, **options)

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


def equal(found: Tensor, expected: Tensor) -> bool:
    """Whether the bits are the same."""
    return torch.equal(plain(found), plain(expected))


def same_weights(model: nn.Module, other: nn.Module) -> bool:
    """Whether the bits of all parameters on the host are the same."""
    return all(equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def seeded(model: type[nn.Module], *settings: Any, **options: Any) -> Any:
    """A model with the same weights each time."""
    torch.manual_seed(0)
    return model(*settings, **options)


def batch_of(samba: Any, number: int = 0, size: int = BATCH) -> list[Any]:
    """A batch of LogReg, named as apps name it; another one for each number."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(size, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return [
        samba.from_torch_tensor(images, name="image", batch_dim=0),
        samba.from_torch_tensor(labels, name="label", batch_dim=0),
    ]


def imported(module: str) -> Any:
    """A module of `sambaflow`, by its name below it."""
    return import_module(f"sambaflow.{module}")


def parsed(command: str, *words: str, **functions: Any) -> Namespace:
    """What parse_app_args makes of a command line."""
    arguments: Namespace = imported("samba.utils.argparser").parse_app_args(argv=[command, *words], **functions)
    return arguments


@contextmanager
def refused(*words: str, here: bool = True) -> Iterator[None]:
    """An error of ours with all of these words comes; with `here`, it names a line of this folder, which is the app."""
    with pytest.raises(SambasimError) as caught:
        yield
    told = str(caught.value)
    assert all(word in told for word in words), told
    assert not here or f"{Path(__file__).parent}/" in (caught.value.where or ""), told
    assert "Traceback" not in told
    assert caught.value.remedy
