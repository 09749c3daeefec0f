"""`sambaflow.sambacollections`: a set that remembers the order in which its elements came."""

from collections.abc import Hashable, Iterable, Iterator, MutableSet
from typing import TypeVar

__all__ = ["OrderedSet"]

T = TypeVar("T", bound=Hashable)


class OrderedSet(MutableSet[T]):
    """A set whose elements come out in the order in which they were first put in.

    Unions and intersections keep the order of the left side. It equals any set of the same elements, in any order.
    """

    __slots__ = ("_elements",)

    def __init__(self, elements: Iterable[T] = ()) -> None:
        self._elements = dict.fromkeys(elements)

    def __contains__(self, element: object) -> bool:
        return element in self._elements

    def __iter__(self) -> Iterator[T]:
        return iter(self._elements)

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._elements)!r})"

    def add(self, value: T) -> None:
        """Put `value` at the end, unless it is in already: then it stays where it is."""
        self._elements.setdefault(value)

    def discard(self, value: T) -> None:
        """Take `value` out, if it is in."""
        self._elements.pop(value, None)

    def update(self, *others: Iterable[T]) -> None:
        """Add the elements of each of `others`, in their order."""
        for other in others:
            self._elements.update(dict.fromkeys(other))
