"""SambaLoader: the batches of a torch DataLoader as named SambaTensors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from sambasim.errors import DataError
from sambasim.samba.tensor import SambaTensor, from_torch_tensor


class SambaLoader:
    """`SambaLoader(DataLoader(…), ["image", "label"])`: each batch is a list of SambaTensors with these names.

    A batch that is a mapping is read by the names, any other in order; dimension 0 of a tensor is its batch dimension.
    `torch_loader` is the loader that it was made from. `len()` is that loader's, in batches.
    """

    def __init__(self, torch_loader: Iterable[Any], names: Sequence[str]) -> None:
        """Raises DataError if `names` is one text, which would name a tensor by each of its letters."""
        if isinstance(names, str):
            raise DataError(f"the names must be a list, and they are {names!r}", remedy=f"[{names!r}]")
        self.torch_loader = torch_loader
        self.names = tuple(names)

    def __len__(self) -> int:
        if not isinstance(self.torch_loader, Sized):
            raise TypeError(f"{type(self.torch_loader).__name__} has no length")
        return len(self.torch_loader)

    def __iter__(self) -> Iterator[list[SambaTensor]]:
        """Raises DataError if a batch does not have a tensor for each name."""
        for batch in self.torch_loader:
            values = self._values(batch)
            yield [self._tensor(value, name) for value, name in zip(values, self.names, strict=True)]

    def _values(self, batch: object) -> Sequence[object]:
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            if missing:
                raise DataError(
                    f"a batch has no {', '.join(missing)}; it has {', '.join(map(str, batch))}",
                    remedy="give SambaLoader names that the batches have",
                )
            return [batch[name] for name in self.names]
        values = batch if isinstance(batch, list | tuple) else [batch]
        if len(values) != len(self.names):
            raise DataError(
                f"a batch has {_count(len(values), 'value')}, and SambaLoader was given "
                f"{_count(len(self.names), 'name')}: {', '.join(self.names)}",
                remedy="give SambaLoader one name for each value that the dataset returns",
            )
        return values

    def _tensor(self, value: object, name: str) -> SambaTensor:
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} is of type {type(value).__name__} in a batch, and a session takes tensors",
                remedy="return numbers or tensors from the dataset, or leave it out by a collate_fn",
            )
        return from_torch_tensor(value, name, 0 if value.ndim else None)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
