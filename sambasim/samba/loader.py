"""SambaLoader: the batches of a torch DataLoader as named SambaTensors; and DistributedSampler with one replica."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from sambasim.errors import DataError
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.tensor import SambaTensor, from_torch_tensor

__all__ = ["SambaLoader"]


class SambaLoader:
    """`SambaLoader(DataLoader(…), ["image", "label"])`: each batch is a list of SambaTensors with these names.

    A batch is a sequence, named in order, or a mapping, taken by name. Dimension 0 is the batch dimension. The loader
    is a DataLoader, or anything iterable.
    """

    @checks_keywords_beside("samba.SambaLoader", ())
    def __init__(
        self,
        torch_loader: Iterable[Any],
        names: Sequence[str],
        function_hook: Callable[[Any], Any] | None = None,
        return_original_batch: bool = False,
    ) -> None:
        """function_hook: called with each batch; the tensors of what it returns are named: `lambda batch: batch[0]`
        return_original_batch: yield pairs of the SambaTensors and the batch before the hook

        Raises DataError if the loader cannot be iterated over, or if `names` is not a list of names.
        """
        # Python also iterates over objects that have __getitem__ alone.
        if not (isinstance(torch_loader, Iterable) or callable(getattr(torch_loader, "__getitem__", None))):
            raise DataError(
                f"SambaLoader needs a loader of batches, not {type(torch_loader).__name__}",
                where=app_line(),
                remedy=f"SambaLoader(DataLoader(dataset, batch_size=args.batch_size, drop_last=True), {names!r})",
            )
        if isinstance(names, str) or not isinstance(names, Iterable):
            remedy = f"[{names!r}]" if isinstance(names, str) else '["image", "label"]'
            raise DataError(f"the names must be a list, not {names!r}", where=app_line(), remedy=remedy)
        self.torch_loader = torch_loader
        self.names = tuple(names)
        self.function_hook = function_hook
        self.return_original_batch = return_original_batch

    def __len__(self) -> int:
        if not isinstance(self.torch_loader, Sized):
            raise TypeError(f"{type(self.torch_loader).__name__} has no length")
        return len(self.torch_loader)

    def __iter__(self) -> Iterator[Any]:
        """Raises DataError if a batch does not have a tensor for each name."""
        for batch in self.torch_loader:
            values = self._values(batch if self.function_hook is None else self.function_hook(batch))
            tensors = [self._tensor(value, name) for value, name in zip(values, self.names, strict=True)]
            yield (tensors, batch) if self.return_original_batch else tensors

    def _values(self, batch: object) -> Sequence[object]:
        if isinstance(batch, Mapping):
            missing = [name for name in self.names if name not in batch]
            if missing:
                raise DataError(
                    f"a batch has no {', '.join(missing)}; it has {', '.join(map(str, batch))}",
                    where=app_line(),
                    remedy="give SambaLoader names that the batches have",
                )
            return [batch[name] for name in self.names]
        values = batch if isinstance(batch, list | tuple) else [batch]
        if len(values) != len(self.names):
            raise DataError(
                f"a batch has {_count(len(values), 'value')}, and SambaLoader "
                f"{_count(len(self.names), 'name')}: {', '.join(self.names)}",
                where=app_line(),
                remedy="give SambaLoader one name for each value that the dataset returns",
            )
        return values

    def _tensor(self, value: object, name: str) -> SambaTensor:
        if not isinstance(value, Tensor):
            raise DataError(
                f"{name} of a batch must be a tensor, not {type(value).__name__}",
                where=app_line(),
                remedy="return numbers or tensors from the dataset, or leave it out by a collate_fn or function_hook",
            )
        return from_torch_tensor(value, name, 0 if value.ndim else None)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def install_sampler_of_one_replica() -> None:
    """Makes 0 the default rank of `DistributedSampler(dataset, num_replicas=1)`.

    Torch would read it from the process group, which may be absent or larger.
    """
    make = DistributedSampler.__init__

    @wraps(make)
    def made(
        sampler: "DistributedSampler[Any]",
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        if rank is None and num_replicas == 1:
            rank = 0
        make(sampler, dataset, num_replicas, rank, *arguments, **keywords)

    DistributedSampler.__init__ = made  # type: ignore[method-assign, assignment]  # replaced on purpose
