"""Dimension maps: which dimensions of a node's operands and results correspond, and the one rule that follows.

A map is written as for einsum, a letter for each dimension: `mk,kn->mn`. One letter is cut, wherever it is. A result
without it is summed over it: each rank has a term.

    capitals, 1   must be whole
    a,...         `a` and all after it; without this, operands that are not named are whole
    c~            an operand that follows: its own layout does not decide what is cut
    n+            one that follows, and is added once, to the sum of the terms
    mask=hqk      one that follows, and is given by keyword
    #0            the shape of result 0
    o/i           a result that is not computed from what has `i`: whole where that is cut
    =>            in place of `->`: partial operands give partial results

As the sharding rules of Shardy are: https://openxla.org/shardy/sharding_representation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

from sambasim.compiler.sharding.sharder import PARTIAL, WHOLE, Layout, Rule, Sharder, cut, fits, refs
from sambasim.ir.graph import Argument, Node, Ref

_LETTERS = "abcdefghjlpqrstuvwxy"
"""Of dimensions that have no other name: `i`, `k`, `m`, `n`, `o` and `z` are free for maps of a given rank."""

Dims: TypeAlias = int | Sequence[int] | None  # A dimension, several, or all; negative ones are counted from the end


def by_map(map_of: Callable[[Sharder, Node], str | None], order: str = "*") -> Rule:
    """The rule of operators with a map. Nodes for which it is None have no rule. `order`: the letters to cut rather
    than others, the best first; `*` are those that it does not name, of which that of the first operand is cut."""
    return lambda s, node: (text := map_of(s, node)) is not None and follow(s, node, text, order)


def by_first(map_of: Callable[..., str], order: str = "*") -> Rule:
    """The rule of operators whose map follows from the axes of the first operand, and the other arguments."""
    return by_map(lambda s, node: map_of(letters(s.shape(refs(node.args[0])[0])), *node.args[1:]), order)


def follow(s: Sharder, node: Node, text: str, order: str = "*") -> bool:
    """The rule of the map `text`."""
    of_args, of_keywords, of_results = _parsed(text, len(node.args), len(node.results))
    operands = [(operand, axes) for arg, axes in zip(node.args, of_args, strict=True) for operand in refs(arg)]
    kwargs = list(node.kwargs)
    if "=>" in text and all(s.layout(operand) == PARTIAL for operand, _ in operands):
        args, results = [s.to(arg, PARTIAL) for arg in node.args], [PARTIAL] * len(node.results)
    elif best := _best(s, operands, order):
        args, results = list(map(s.to, node.args, map(best.of, of_args))), list(map(best.of_result, of_results))
        kwargs = [(name, s.to(value, best.of(of_keywords.get(name, "")))) for name, value in kwargs]
    else:
        return False
    for at, axes in enumerate(of_args):
        if axes.endswith("+") and args[at] is not None and results == [PARTIAL]:
            _sum_and_bias(s, node, args, at, after=of_results[0].partition(axes[0])[2])
            return True
        if axes.startswith("#") and (result := node.results[int(axes[1:])]) is not None:
            args[at] = s.part_shape(s.type(result).shape, results[int(axes[1:])])
    s.emit(node, args, results, kwargs=kwargs)
    return True


class _Cut(NamedTuple):
    letter: str
    outer: int

    def of(self, axes: str) -> Layout:
        return cut(axes.index(self.letter), self.outer) if self.letter in axes else WHOLE

    def of_result(self, axes: str) -> Layout:
        own, _, unread = axes.partition("/")
        return self.of(own) if self.letter in own + unread else PARTIAL


def _best(s: Sharder, operands: Sequence[tuple[Ref, str]], order: str) -> _Cut | None:
    """What an operand is cut along and all can be: the first one in `order`."""
    possible = [
        _Cut(axes[layout.dim], layout.outer)
        for operand, axes in operands
        if (layout := s.layout(operand)).kind == "cut" and axes and axes[-1] not in "~+" and axes[layout.dim].islower()
    ]
    best = min(possible, key=lambda at: order.index(at.letter if at.letter in order else "*"), default=None)
    fitting = best and all(fits(s.shape(operand), best.of(axes), s.ranks) for operand, axes in operands)
    return best if fitting else None


def _sum_and_bias(s: Sharder, node: Node, args: list[Argument], at: int, after: str) -> None:
    """Emit the sum of the terms of all ranks, plus the bias, which is argument `at`: of a dimension before `after`."""
    bias, operator, type_ = args[at], node.operator, s.type(node.results[0] or "")
    args[at] = None
    if operator == "aten.addmm.default":
        args, operator = args[1:], "aten.mm.default"
    elif args[-1] is None:
        args = args[:-1]
    term = s.new(node, "term", operator, args, type_, PARTIAL, **dict(node.kwargs))
    if after:
        shape = (*s.shape(bias), *[1] * len(after))
        bias = s.new(node, "bias", "aten.reshape.default", [bias, shape], s.type_like(bias, shape))
    s.emit(node, [s.whole(term), bias], [WHOLE], operator="aten.add.Tensor", kwargs=())


@cache
def _parsed(text: str, args: int, results: int) -> tuple[Sequence[str], Mapping[str, str], Sequence[str]]:
    """The axes of so many arguments, of those by keyword, and of so many results."""
    left, right = (side.split(",") for side in text.replace("=>", "->").split("->"))
    by_keyword = dict(axes.split("=") for axes in left if "=" in axes)
    by_position = [axes for axes in left if "=" not in axes]
    rest = [] if by_position[-1] == "..." else ["", "..."]
    return _repeated([*by_position, *rest], args), by_keyword, _repeated(right, results)


def _repeated(named: Sequence[str], count: int) -> Sequence[str]:
    return [*named[:-1], *[named[-2]] * count][:count] if named[-1] == "..." else named


def letters(shape: tuple[int, ...]) -> str:
    """The axes of a tensor of `shape`; those of size 1 are never cut."""
    return broadcast(shape, _LETTERS.ljust(len(shape), "1")[: len(shape)])


@cache
def broadcast(shape: tuple[int, ...], axes: str) -> str:
    """The axes of an operand of `shape`, which is broadcast to `axes`."""
    own = axes[len(axes) - len(shape) :]
    return "".join("1" if size == 1 else one for size, one in zip(shape, own, strict=True))


def whole(axes: str, dims: Dims) -> str:
    """`axes`, of which `dims` must be whole."""
    return _changed(axes, dims, str.upper)


def without(axes: str, dims: Dims, instead: str = "") -> str:
    """`axes`, with `instead` in place of `dims`."""
    return _changed(axes, dims, lambda letter: instead)


def _changed(axes: str, dims: Dims, change: Callable[[str], str]) -> str:
    chosen = range(len(axes)) if dims is None else [dims] if isinstance(dims, int) else dims
    numbers = {dim % max(len(axes), 1) for dim in chosen}
    return "".join(change(letter) if dim in numbers else letter for dim, letter in enumerate(axes))


def inserted(axes: str, at: int) -> str:
    """With a dimension more, which will be number `at`."""
    at %= len(axes) + 1
    return f"{axes[:at]}1{axes[at:]}"
