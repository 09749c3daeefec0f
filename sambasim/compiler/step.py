"""What is captured: the model and its loss as one callable of plain tensors.

A model may return a loss, `(loss, outputs…)` as SambaFlow models do, or outputs with the loss named in the config. Here
all three become a module that takes the inputs by position and returns the loss first and then the outputs. Every
output but the loss is detached: the backward starts from the loss alone.
"""

import ast
import inspect
import os
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from sambasim.compiler.trial import as_written
from sambasim.data.user_code import summary
from sambasim.errors import ModelError, SambasimError

Loss = Callable[[Tensor, Tensor], Tensor]

TARGET = "target"
"""The name of the loss's second operand, where the config names the loss."""


class _Step(nn.Module):
    """A model, the names of what it is given, and its loss, which is None where the model computes its own or none."""

    def __init__(self, model: nn.Module, names: Sequence[str], loss: Loss | None, by_keyword: bool) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)
        self.by_keyword = by_keyword
        self.loss = loss


class TrainingStep(_Step):
    """`(inputs…) -> (loss, outputs…)`: what one training step differentiates.

    With `any_loss`, as for SambaFlow apps, the loss may have any shape and stand at any place among the outputs of the
    model, whose order is kept: at `loss_indices`, or where `losses_among` finds it.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        loss: Loss | None,
        by_keyword: bool,
        any_loss: bool = False,
        loss_indices: tuple[int, ...] = (),
    ) -> None:
        super().__init__(model, names, loss, by_keyword)
        self.any_loss = any_loss
        self.loss_indices = loss_indices
        self.named_loss = named_loss(model) if any_loss else None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.any_loss:
            tensors = _call(self.model, self.names, inputs, self.by_keyword)
            losses = losses_among(tensors, self.loss_indices, self.named_loss)
            # A backward cannot start from a view of what is returned before it, as a loss of samples may be.
            if len(losses) > 1 or (losses[0] > 0 and tensors[losses[0]].ndim > 0):
                tensors = tuple(one.clone() for one in tensors)
            return tuple(one if index in losses else one.detach() for index, one in enumerate(tensors))
        if self.loss is None:
            loss, *outputs = _call(self.model, self.names, inputs, self.by_keyword)
        else:
            outputs = list(_call(self.model, self.names[:-1], inputs[:-1], self.by_keyword))
            loss = self.loss(outputs[0], inputs[-1])
        if not isinstance(loss, Tensor):
            raise ModelError(
                f"the loss function returns a {type(loss).__name__}, not a tensor",
                remedy="return the mean loss as a tensor of shape (), without .item()",
            )
        return (loss, *(output.detach() for output in outputs))


def losses_among(outputs: Sequence[Tensor], given: tuple[int, ...], named: tuple[int, int] | None) -> tuple[int, ...]:
    """The outputs of a model from which the backward starts.

    given: their indices, which count if there are any
    named: of `named_loss`; it counts if the model returns as many tensors as its return statement has elements

    Otherwise the first of those with no axis; else the first of those with one axis, which are losses of samples; else
    the only one with a single element. If there is none, the loss is computed outside of the model, and may start from
    every output that has a gradient. Raises ModelError for an index in `given` beyond the outputs.
    """
    count = len(outputs)
    if given:
        if not all(-count <= index < count for index in given):
            raise ModelError(
                f"loss_indices is {list(given)}, and the model returns {count} output{'' if count == 1 else 's'}",
                remedy=f"give indices from 0 to {count - 1}",
            )
        return tuple(index % count for index in given)
    able = tuple(index for index, one in enumerate(outputs) if one.requires_grad and one.is_floating_point())
    if named is not None and named[1] == count and named[0] in able:
        return (named[0],)
    for axes in (0, 1):
        first = [index for index in able if outputs[index].ndim == axes][:1]
        if first:
            return (first[0],)
    single = [index for index in able if outputs[index].numel() == 1]
    return (single[0],) if len(single) == 1 else able or (0,)


def named_loss(model: nn.Module) -> tuple[int, int] | None:
    """Which element of `return a, b` in `model.forward` has a name like `loss`, and how many elements there are. None
    if no return statement has exactly one such element, or if they disagree."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(model.forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    places = set()
    for value in _returned(tree.body[0]):
        if isinstance(value, ast.Tuple):
            losses = [index for index, one in enumerate(value.elts) if _is_called_loss(one)]
            starred = any(isinstance(one, ast.Starred) for one in value.elts)
            places.add((losses[0], len(value.elts)) if len(losses) == 1 and not starred else None)
    return places.pop() if len(places) == 1 else None


def _returned(function: ast.AST) -> Iterator[ast.expr]:
    """What the return statements of a function give, without those of functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returned(node)


_LOSS = re.compile(r"(^|_)loss(es)?($|_)", re.IGNORECASE)


def _is_called_loss(expression: ast.expr) -> bool:
    names = [one.id for one in ast.walk(expression) if isinstance(one, ast.Name)]
    attributes = [one.attr for one in ast.walk(expression) if isinstance(one, ast.Attribute)]
    return any(map(_LOSS.search, (*names, *attributes)))


def loss_in(outputs: Sequence[Tensor]) -> Tensor:
    """What a TrainingStep differentiates, of its outputs: the first that is not detached, or else the first."""
    return next((output for output in outputs if output.requires_grad), outputs[0])


class EvaluationStep(_Step):
    """`(inputs…) -> (loss, outputs…)` in evaluation mode; with a named loss, one loss for each sample."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.loss is None:
            return _call(self.model, self.names, inputs, self.by_keyword)
        outputs = _call(self.model, self.names[:-1], inputs[:-1], self.by_keyword)
        return (self.loss(outputs[0], inputs[-1]), *outputs)


def _call(model: nn.Module, names: Sequence[str], inputs: Sequence[Tensor], by_keyword: bool) -> tuple[Tensor, ...]:
    result = model(**dict(zip(names, inputs, strict=True))) if by_keyword else model(*inputs)
    tensors = _tensors(result)
    if not tensors:
        raise ModelError(
            f"the model returns {_described(result)}",
            where=forward_line(model),
            remedy="return a loss, (loss, outputs…), or outputs with the loss named: --set loss.name=cross_entropy",
        )
    return tuple(tensors)


def _described(result: object) -> str:
    return "None" if result is None else f"a {type(result).__name__} without a tensor in it"


def _tensors(result: object) -> list[Tensor]:
    """All tensors of a model's result, in order; caches and other objects that it returns are left out."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [tensor for item in result.values() for tensor in _tensors(item)]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors(item)]
    return []


def forward_parameters(model: nn.Module) -> tuple[str, ...]:
    """The names of the positional parameters of `model.forward`, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def forward_line(model: nn.Module) -> str | None:
    """`file:line: code` of the model's `forward`, where Python knows it."""
    try:
        lines, number = inspect.getsourcelines(model.forward)
        return f"{inspect.getsourcefile(model.forward)}:{number}: {lines[0].strip()}"
    except (OSError, TypeError):
        return None


def check_loss(value: Tensor, named: str | None, *, any_shape: bool) -> None:
    """Raises ModelError unless `value`, what the first eager call gave as the loss, can start a backward. It must be
    one number, unless `any_shape`."""
    described = (
        f"the loss {named}" if named else "the output with the loss" if any_shape else "the model's first output"
    )
    if value.numel() != 1 and not any_shape:
        raise ModelError(
            f"{described} has shape {tuple(value.shape)}, but a loss is one number",
            remedy="return the loss first, or name one: --set loss.name=cross_entropy",
        )
    if not value.is_floating_point():
        raise ModelError(
            f"{described} is {str(value.dtype).removeprefix('torch.')}, but a loss is a floating-point number",
            remedy="compute it with floating-point operators: a count of mistakes has no gradient, cross_entropy has",
        )
    if not value.requires_grad:
        raise ModelError(
            f"{described} does not depend on any parameter that requires a gradient",
            remedy="check requires_grad, detach() and torch.no_grad() in the model, or compile with --inference",
        )


def promote_plain_tensors(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Make buffers, in no state_dict, of plain tensor attributes; export would otherwise bake in or refuse them.

    Returns what was promoted, for `restore_plain_tensors`.
    """
    promoted = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                delattr(module, name)
                module.register_buffer(name, value.detach(), persistent=False)
                promoted.append((module, name, value))
    return promoted


def restore_plain_tensors(promoted: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Undo `promote_plain_tensors`."""
    for module, name, value in promoted:
        delattr(module, name)
        setattr(module, name, value)


def run_eagerly(
    step: nn.Module, inputs: Sequence[Tensor], watch: AbstractContextManager[object] | None = None
) -> tuple[Tensor, ...]:
    """One eager call, to find mistakes of the model where PyTorch's own message is best. `watch` is around it, and
    torch.compile leaves the model as it is written.

    The state of BatchNorm and of the random generator is as before. Raises ModelError with the line that failed.
    """
    state = {name: buffer.clone() for name, buffer in step.named_buffers()}
    generator = torch.get_rng_state()
    try:
        with watch or nullcontext(), as_written():
            result: tuple[Tensor, ...] = step(*inputs)
    except SambasimError:
        raise
    except (Exception, SystemExit) as error:
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
        mode = "" if step.training else ", in evaluation mode"
        raise ModelError(
            f"the model does not run on the example batch{mode}: {summary(error)}",
            where=user_line(error),
            remedy=f"check the model against its inputs, which were {shapes}",
        ) from error
    finally:
        torch.set_rng_state(generator)
        with torch.no_grad():
            for name, buffer in step.named_buffers():
                buffer.copy_(state[name])
    return result


def user_line(error: BaseException) -> str | None:
    """The innermost line of the traceback that is the user's own: in neither torch nor sambasim."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    lines = [
        f"{frame.filename}:{frame.lineno}: {(frame.code_context or [''])[0].strip()}"
        for frame in frames
        if not is_library_file(frame.filename)
    ]
    return lines[-1] if lines else None


_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def is_library_file(file: str) -> bool:
    """True for files of torch, of sambasim's compiler and of Python itself, where a user's mistake is not."""
    if file.startswith(_PYTHON) and "-packages" not in file:
        return True
    return file.startswith((*_LIBRARIES, "<"))
