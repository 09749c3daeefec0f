"""A case: a small model that does something beside its tensors, and what may become of it."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.capture import explain
from sambasim.runtime.machine.process import Stream, derive
from tests.support.compiled import Made

Verdict = Literal["equal", "told", "refused", "other", "damaged", "ended", "traceback", "crashed"]
"""`equal`: losses, parameters and buffers of eager PyTorch. `told`: a notice has the words that the case asks for.
`refused`: compile raises a SambasimError. Never right: `other`: something else without a word; `damaged`: the model or
the process is not as it was before; `ended`: compiled, and the run raises a SambasimError; `traceback`: another
exception, or an internal error; `crashed`: a signal or a timeout ended the process."""

EQUAL, REFUSED, TOLD = frozenset({"equal"}), frozenset({"refused"}), frozenset({"told"})
EITHER = EQUAL | REFUSED
BATCH, RATE = 4, 0.05
HERE = "# here"
"""Ends the line of a case that an error has to name."""

Then: TypeAlias = Callable[[Any, Tensor], Tensor | None]
"""What a `Net` does with the result of its first layer; None leaves that as it is."""


def remedy(obstacle: str) -> str:
    """That of the compiler for the obstacle whose words begin so."""
    rows = (*explain._ASKING, *explain._CHANGING, *explain._RAISED)
    (found,) = {one.rewrite for _, one in rows if one is not None and one.what.startswith(obstacle)}
    return found


@dataclass(slots=True)
class Setup:
    """What a user gives to compile and run. `data`: tensors side by side, samples first, BATCH for each step.
    `optimizer` None is SGD. `scheduler`: stepped after each step of the eager loop. `options`: of compile."""

    model: nn.Module
    data: tuple[Tensor, ...]
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)


Build: TypeAlias = Callable[[], Setup]
Prepare: TypeAlias = Callable[[Any], object]


@dataclass(slots=True)
class Case:
    """`build` makes everything anew. If the case is refused: `where` is in the line that the error names (None: it
    names none), `says` are in its text, and `never_says` not; `rewritten` follows the remedy, and is equal to eager
    PyTorch of the case, or with `own_losses` of the rewrite itself. `notice`: words of a notice that explains a
    difference. `tolerance`: of losses and weights, relative, for optimizers that round differently. `also` returns a
    complaint, given a fresh setup, the eager state, the PEF and the run. `oracle`: what the eager loop runs in place
    of a case that eager PyTorch cannot run. Only `make test-whole` runs it if it is `whole`, and compiles rewrites."""

    name: str
    build: Build
    expected: frozenset[str]
    where: str | None = HERE
    says: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()
    notice: str = ""
    steps: int = 4
    compiles: int = 1
    tolerance: float = 0.0
    rewritten: Build | None = None
    oracle: Build | None = None
    own_losses: bool = False
    also: Callable[..., str] | None = None
    whole: bool = False


CASES: dict[str, Case] = {}


def add(name: str, module: str, build: Build, expected: frozenset[str], **more: Any) -> Case:
    case = Case(f"{module.rpartition('.')[2]}-{name}", build, expected, **more)
    CASES[case.name] = case
    return case


def case(expected: frozenset[str], prepare: Prepare | None = None, **more: Any) -> Callable[[Then], Case]:
    """Decorates what a `Net` does in its forward; `prepare` is called on the net once."""
    steps = more.get("steps", 4)
    return lambda then: add(then.__name__, then.__module__, partial(net_of, then, prepare, steps), expected, **more)


def built(expected: frozenset[str], **more: Any) -> Callable[[Build], Case]:
    """Decorates a function that builds the setup of a case."""
    return lambda build: add(build.__name__, build.__module__, build, expected, **more)


def late(first: int, prepare: Prepare | None = None, **more: Any) -> Callable[[Any], Case]:
    """Decorates a function of a net that counts: it returns how many calls there were before. The net changes in call
    `first`, counted from 0. The remedy is a buffer."""
    steps, expected = (first + 2, EITHER) if first < 100 else (4, REFUSED)

    def in_a_buffer(net: Any, h: Tensor) -> Tensor:
        return h * torch.where(net.steps.add_(1) > first, 1.0, 0.5)

    more = {"steps": steps, "rewritten": partial(net_of, in_a_buffer, given(steps=zero), steps), **more}

    def decorated(count: Callable[[Any], int]) -> Case:
        def then(net: Any, h: Tensor) -> Tensor:
            return h * (1.0 if count(net) >= first else 0.5)

        return add(count.__name__, count.__module__, partial(net_of, then, prepare, steps), expected, **more)

    return decorated


def rewrite(prepare: Prepare | None = None) -> Callable[[Then], Then]:
    """Decorates what the remedy makes of the function of the last case."""

    def decorated(then: Then) -> Then:
        last = [*CASES.values()][-1]
        last.rewritten = partial(net_of, then, prepare, last.steps)
        return then

    return decorated


def rebuilt() -> Callable[[Build], None]:
    """Decorates what builds the setup that the remedy makes of the last case."""
    return lambda build: setattr([*CASES.values()][-1], "rewritten", build)


_HEADER = re.compile(r"^(case|late|built|rewrite|rebuilt)\b ?(\w*):(.*)$", re.MULTILINE)
_PARAMETERS = {"case": "net, h", "rewrite": "net, h", "late": "net", "built": "", "rebuilt": ""}
_FOLDER = tempfile.TemporaryDirectory()


def cases(module: str) -> Callable[[str], None]:
    """Adds the cases of a text of Python, in which a line DECORATOR NAME: ARGUMENTS begins a function: of `net` and `h`
    for `case` and `rewrite`, of `net` for `late`, else of nothing. It has the names of this module and of its own."""

    def function(header: re.Match[str]) -> str:
        decorator, name, arguments = header.groups()
        return f"@{decorator}({arguments})\ndef {name or 'rewritten'}({_PARAMETERS[decorator]}):"

    def added(text: str) -> None:
        whole = f"from tests.state.case import *\n{_HEADER.sub(function, text)}"
        _execute(whole, Path(_FOLDER.name, f"{module}.py"), sys.modules[module])

    return added


def net_from_source(name: str, source: str) -> Setup:
    """What `make` of a module with this text returns."""
    module: Any = ModuleType(re.sub(r"\W", "_", name))
    module.__file__ = f"{_FOLDER.name}/{module.__name__}.py"
    sys.modules[module.__name__] = module
    _execute(source, Path(module.__file__), module)
    setup: Setup = module.make()
    return setup


def _execute(text: str, file: Path, module: ModuleType) -> None:
    file.write_text(text, encoding="utf-8")
    exec(compile(text, file, "exec"), vars(module))


def given(**makers: Any) -> Callable[[Any], object]:
    """Gives a net attributes, anew for each net: of a function what it returns; a tensor is a buffer."""

    def prepare(net: nn.Module) -> None:
        for name, make in makers.items():
            value = make() if callable(make) else make
            if type(value) is Tensor:
                net.register_buffer(name, value)
            else:
                setattr(net, name, value)

    return prepare


def zero() -> Tensor:
    return torch.zeros(())


class Net(nn.Module):
    """Two linear layers; `then` is between them. It returns the mean square error."""

    def __init__(self, then: Then = lambda net, h: h) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 1)
        self.then = then

    def outputs(self, x: Tensor) -> Tensor:
        h = self.a(x)
        result = self.then(self, h)
        return self.b(h if result is None else result).squeeze(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.outputs(x), y)


class Outputs(Net):
    """The same without its loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the target is the loss's
        return self.outputs(x)


def made(function: Callable[..., Any], loss: Any = None, **attributes: Any) -> Setup:
    """A model with the attributes that `given` makes, whose forward is `function` of it and of the inputs."""
    torch.manual_seed(0)
    model = Made(function)
    given(**attributes)(model)
    return Setup(model, points(), loss)


def net_of(then: Then, prepare: Prepare | None = None, steps: int = 4) -> Setup:
    torch.manual_seed(0)
    model = Net(then)
    if prepare is not None:
        prepare(model)
    return Setup(model, points(steps))


def with_loss(loss: Any) -> Setup:
    torch.manual_seed(0)
    return Setup(Outputs(), points(), loss)


def points(steps: int = 12) -> tuple[Tensor, Tensor]:
    """Samples of a Net: float32 [steps * BATCH, 3] and [steps * BATCH]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * BATCH, 3, generator=generator)
    return x, torch.sin(x.sum(1)) + 0.1 * torch.randn(steps * BATCH, generator=generator)


def eager(setup: Setup, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the state at the end, of a loop as PyTorch's documentation has it."""
    losses = []
    for step in range(steps):
        batch = [tensor[step * BATCH : (step + 1) * BATCH].clone() for tensor in setup.data]
        torch.manual_seed(derive(0, 0, step, 0, Stream.GRAPH))
        setup.model.zero_grad()
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        setup.optimizer.step()
        if setup.scheduler is not None:
            setup.scheduler.step()
    return losses, {name: tensor.detach().clone() for name, tensor in setup.model.state_dict().items()}


def loss_of(setup: Setup, batch: list[Tensor]) -> Tensor:
    if setup.loss is not None:
        function = functional.mse_loss if setup.loss == "mse" else setup.loss
        return function(setup.model(*batch[:-1]), batch[-1])
    result = setup.model(*batch)
    if isinstance(result, Mapping):
        return result["loss"]
    if hasattr(result, "loss"):
        return result.loss
    return result[0] if isinstance(result, tuple | list) else result
