"""Samples of a user's dataset, watched: what it raises is told with file, line and index.

An exception loses its parts on the way out of a DataLoader's worker process, where PyTorch makes it a text. So a
failure travels as a value: a watched dataset hands it on in place of the sample, `batches.collate` in place of the
batch, and `batches.bind` raises it, in the main process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch.utils.data import Dataset

from sambasim.data.blame import summary, user_line
from sambasim.errors import DataError


@runtime_checkable
class MapStyle(Protocol):
    """What a dataset must have: a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that went wrong while a sample or a batch was read; `error` makes the DataError of it."""

    what: str
    where: str | None = None
    remedy: str | None = None

    def error(self) -> DataError:
        return DataError(self.what, where=self.where, remedy=self.remedy)


class Samples(list[object]):
    """The samples of one batch, and where they are from: the data source's `name`, and `indices` in its dataset."""

    def __init__(self, samples: Iterable[object], name: str, indices: Sequence[int]) -> None:
        super().__init__(samples)
        self.name = name
        self.indices = indices


class WatchedDataset(Dataset[object]):
    """The samples of `dataset`, or those of them that `chosen` lists; `name` is the data source's, for messages.

    Read one at a time, a failure is raised as DataError; read by a DataLoader, which asks for many at once, it is a
    Failure among the samples. A message gives the index that the user's dataset was asked for.
    """

    def __init__(self, dataset: MapStyle, name: str, chosen: Sequence[int] | None = None) -> None:
        self.dataset = dataset
        self.name = name
        self.chosen: Sequence[int] = range(len(dataset)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> object:
        sample = self._read(self.chosen[index])
        if isinstance(sample, Failure):
            raise sample.error()
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        chosen = [self.chosen[index] for index in indices]
        many = getattr(self.dataset, "__getitems__", None)
        if not callable(many):
            return Samples(map(self._read, chosen), self.name, chosen)
        try:
            return Samples(many(chosen), self.name, chosen)
        except (Exception, SystemExit) as raised:
            samples = Samples(map(self._read, chosen), self.name, chosen)  # to find out which
            if any(isinstance(sample, Failure) for sample in samples):
                return samples
            failure = Failure(f"__getitems__ of {self.name} raised {summary(raised)}", where=user_line(raised))
            return Samples([failure], self.name, chosen)

    def _read(self, index: int) -> object:
        try:
            return self.dataset[index]
        except (Exception, SystemExit) as raised:  # a sample that ends the program would end it as if all were well
            what = f"sample {index} of {self.name} raised {summary(raised)}"
            return Failure(what, where=user_line(raised), remedy=f"read it alone in Python: dataset[{index}]")
