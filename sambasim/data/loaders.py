"""What a DataLoader of torch carries beside its data set: what is kept of it, what is told, and what is refused."""

from collections.abc import Callable, Iterator, Sized
from typing import Any, TypeAlias, cast

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils.collate import default_convert

from sambasim.errors import DataError

Loader: TypeAlias = DataLoader[Any]


def check_loader(loader: Loader, name: str) -> None:
    """Raises DataError for a loader whose batches another one could not give."""
    if type(loader).__iter__.__module__.split(".")[0] not in ("torch", "torchdata"):
        what = f"{type(loader).__name__} of {name} has an __iter__ of its own, and sambasim makes batches itself"
        raise DataError(what, remedy="a torch.utils.data.DataLoader with a collate_fn, a sampler or a batch_sampler")
    if loader.batch_size is None and loader.batch_sampler is None:
        what = f"the DataLoader of {name} has batch_size=None: its data set gives whole batches"
        raise DataError(what, remedy="a data set of single samples, and a batch_size or a batch_sampler")


def own_collate(loader: Loader) -> Callable[[list[Any]], object] | None:
    """None for that of torch."""
    function: Callable[[list[Any]], object] = loader.collate_fn
    return None if function in (default_collate, default_convert) else function


def shuffles(loader: Loader) -> bool | None:
    """Whether the order of an epoch is random, as that of a run, or that of the data; None for one of its own."""
    sampler: Any = loader.sampler if loader.batch_size is not None else None
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return None
    if not len(sampler) == len(sampler.data_source) == len(cast(Sized, loader.dataset)):  # it may be of other data
        return None
    if type(sampler) is SequentialSampler:
        return False
    return None if sampler.replacement or sampler.generator is not None else True


def notices(loader: Loader | None, of_evaluation: Loader | None, batch_size: int) -> Iterator[str]:
    """What is not kept of the loaders; a run says itself what samples an epoch leaves out."""
    if loader is not None and loader.batch_size not in (None, batch_size):
        yield f"batch_size={loader.batch_size} of the DataLoader is not used: the PEF takes {batch_size} of a replica"
    for name in ("timeout", "multiprocessing_context"):
        if getattr(loader, name, None):
            yield f"{name} of the DataLoader is not used"
    if of_evaluation is not None and of_evaluation.drop_last:
        yield "drop_last=True of the DataLoader to evaluate is not used: all samples are evaluated"
