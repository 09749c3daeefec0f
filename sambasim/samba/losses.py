"""Which outputs of an app's model are losses: those that it names, or those that look like it."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from sambasim.compiler.capture.step import Losses
from sambasim.errors import ModelError


def losses_of(model: nn.Module, given: tuple[int, ...] = ()) -> Losses:
    """The losses among the outputs of `model`, those at `given` if there are any."""
    return partial(losses_among, given=given, named=named_loss(model))


def losses_among(outputs: Sequence[Tensor], given: tuple[int, ...], named: tuple[int, int] | None) -> tuple[int, ...]:
    """The outputs of a model from which the backward starts: those at `given`; else the one of `named_loss`, if the
    counts match; else the first scalar, the first vector, or the only one with a single element; else every output that
    has a gradient. Raises ModelError for an index beyond the outputs."""
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
