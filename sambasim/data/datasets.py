"""From data options to datasets, one for training and optionally one for evaluation: the user's, with errors attributed
to a sample; plain tensors, read in batches; and random samples."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isgeneratorfunction
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sambasim.data.arrays import open_file
from sambasim.data.identity import identity_of
from sambasim.data.loaders import Loader, check_loader, own_collate, shuffles
from sambasim.data.user_code import call_object, guarded, load_function, summary, user_line
from sambasim.errors import DataError
from sambasim.options.grammar import BUILTIN_SOURCES, DATA_SUFFIXES, FLOAT_DTYPES, SYNTHETIC, InputSpec, parse_inputs
from sambasim.options.training import DataOptions, EvaluationOptions

DEFAULT_SAMPLES = 1024
_AHEAD_BYTES = 256 * 1024
"""`tensor_batches` selects at least this much at a time: a selection of few rows is mostly overhead."""


@runtime_checkable
class MapStyle(Protocol):
    """A map-style dataset: a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class Samples(list[object]):
    """The samples of one batch, with the `name` of the data source and their `indices` in its dataset."""

    def __init__(self, samples: Iterable[object], name: str, indices: Sequence[int]) -> None:
        super().__init__(samples)
        self.name = name
        self.indices = indices


@dataclass(frozen=True)
class Padding:
    """In place of a collate function: samples of several lengths are padded to the longest of their batch, by `values`.
    `names`: of inputs, for samples without names."""

    values: Mapping[str, float] = field(default_factory=dict)
    names: Sequence[str] = ()


Collate: TypeAlias = Callable[[list[Any]], object]
"""As `collate_fn` of PyTorch's DataLoader."""


def _is_stream(dataset: object) -> bool:
    is_iterable = isinstance(dataset, Iterable) and not isinstance(dataset, MapStyle | Iterator)
    return isgeneratorfunction(dataset) or isinstance(dataset, IterableDataset) or is_iterable


class WatchedDataset(Dataset[object]):
    """The samples of `dataset`, or those that `chosen` lists; `name` is the data source's, for messages. `__getitem__`
    raises DataError for a failure; `__getitems__` returns that as one of the samples. `loader`: the user's, if the
    data set is given in one. `collate` makes a batch of them, if it is not torch's."""

    def __init__(
        self, dataset: Any, name: str, chosen: Sequence[int] | None = None, collate: Collate | Padding | None = None
    ) -> None:
        self.loader = dataset if isinstance(dataset, DataLoader) else None
        self.dataset: Any = getattr(self.loader, "dataset", dataset)
        self.name = name
        self.collate = collate
        self.is_stream = _is_stream(self.dataset)
        """Whether samples come in an order of its own; its length is 0 if it has none."""
        self.is_sampled = self.loader is not None and not self.is_stream and shuffles(self.loader) is None
        """Whether a sampler of the user orders the samples."""
        whole = range(len(self.dataset) if hasattr(type(self.dataset), "__len__") else 0)
        self.chosen: Sequence[int] = whole if chosen is None else chosen

    def part(self, chosen: Sequence[int]) -> "WatchedDataset":
        return WatchedDataset(self.dataset if self.loader is None else self.loader, self.name, chosen, self.collate)

    def with_collate(self, collate: Collate | Padding | None) -> "WatchedDataset":
        return WatchedDataset(self.dataset if self.loader is None else self.loader, self.name, self.chosen, collate)

    def __len__(self) -> int:
        return len(self.chosen)

    def stream(self, source: Any = None) -> Iterator[object]:
        """The samples of one epoch of a stream, or of `source`, a copy of it."""
        source = self.dataset if source is None else source
        make = source if isgeneratorfunction(source) else lambda: iter(source)
        samples, end = guarded(make, f"the stream of {self.name}", DataError), object()
        for number in count():
            who = f"sample {number} of {self.name}"
            if (sample := guarded(lambda: next(samples, end), who, DataError)) is end:
                return
            yield sample

    def __getitem__(self, index: int) -> object:
        sample = self._read(self.chosen[index])
        if isinstance(sample, DataError):
            raise sample
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        chosen = [self.chosen[index] for index in indices]
        dataset = self.dataset
        many = getattr(dataset, "__getitems__", None)
        try:
            samples = many(chosen) if callable(many) else [dataset[index] for index in chosen]
            return Samples(samples, self.name, chosen)
        except (Exception, SystemExit) as raised:
            whole = DataError(f"__getitems__ of {self.name} raised {summary(raised)}", where=user_line(raised))
            alone = map(self._read, chosen)
            failure = next((sample for sample in alone if isinstance(sample, DataError)), whole)
            return Samples([failure], self.name, chosen)

    def _read(self, index: int) -> object:
        try:
            return self.dataset[index]
        except (Exception, SystemExit) as raised:  # SystemExit would end the run with exit code 0
            what = f"sample {index} of {self.name} raised {summary(raised)}"
            return DataError(what, where=user_line(raised), remedy=f"read it alone in Python: dataset[{index}]")


def tensor_batches(dataset: WatchedDataset) -> Callable[[Sequence[int], int], Iterator[list[Tensor]]] | None:
    """A function of the positions to read, in order, and the batch size: one tensor `[batch_size, …]` for each value of
    a sample, by one selection of rows, the same bits in a tenth of the time; only whole batches. None if `dataset` is
    not of a plain TensorDataset: a subclass may run code of its own."""
    if type(dataset.dataset) is not TensorDataset or dataset.collate is not None:
        return None
    tensors, chosen = dataset.dataset.tensors, torch.as_tensor(dataset.chosen, dtype=torch.int64)
    if not all(type(t) is Tensor and t.layout is torch.strided and not t.requires_grad for t in tensors):
        return None
    row_bytes = sum(tensor[:1].nbytes for tensor in tensors)

    def batches(order: Sequence[int], batch_size: int) -> Iterator[list[Tensor]]:
        rows = chosen[torch.as_tensor(order, dtype=torch.int64)]
        ahead = max(1, _AHEAD_BYTES // max(1, row_bytes * batch_size))
        for index in torch.split(rows[: len(rows) // batch_size * batch_size], ahead * batch_size):
            read = (torch.split(tensor.index_select(0, index), batch_size) for tensor in tensors)
            yield from map(list, zip(*read, strict=True))

    return batches


@dataclass(frozen=True, eq=False)
class SyntheticDataset(Dataset[dict[str, Tensor]]):
    """Random samples, a function of (seed, i) only. Floats are standard normal; integers and booleans are uniform."""

    inputs: Sequence[InputSpec]
    samples: int = DEFAULT_SAMPLES
    seed: int = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        generator, sample = torch.Generator().manual_seed(_mix(self.seed, index)), {}
        for spec in self.inputs:
            if spec.dtype in FLOAT_DTYPES:
                drawn = torch.randn(spec.shape, generator=generator)
            else:  # without a bound, 0 and 1, which are valid indices in every model
                bound = 2 if spec.exclusive_bound is None else spec.exclusive_bound
                drawn = torch.randint(bound, spec.shape, generator=generator)
            sample[spec.name] = drawn.to(getattr(torch, spec.dtype))
        return sample


def _mix(seed: int, index: int) -> int:
    """One 64-bit seed from two, independent for neighbouring indices (splitmix64; Steele et al., OOPSLA 2014)."""
    mask = 2**64 - 1
    state = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


InputSpecs: TypeAlias = tuple[InputSpec, ...]
Datasets: TypeAlias = tuple[MapStyle | Loader, MapStyle | Loader | None]


@dataclass(frozen=True, slots=True)
class Given:
    """What a call of Python gives in place of what options name: `data` as a data function returns it, a function
    `collate`, `metrics` by name, `weights` as in a state_dict; and `callbacks` beside that of the options."""

    data: object = None
    collate: Collate | None = None
    metrics: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    weights: Mapping[str, object] | None = None
    callbacks: Sequence[object] = ()


NOTHING = Given()

SPLIT_SEED = 1998
"""A constant and not an option: every rank and every run must hold out the same samples."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open data source. A DataLoader over its datasets needs `batches.collate`."""

    name: str
    train: WatchedDataset
    evaluation: WatchedDataset | None
    description: str

    @property
    def loaders(self) -> tuple[Loader | None, Loader | None]:
        return self.train.loader, None if self.evaluation is None else self.evaluation.loader

    def identity(self) -> str:
        held = [watched.dataset for watched in (self.train, self.evaluation) if watched is not None]
        return identity_of(*{id(dataset): dataset for dataset in held}.values())


def open_source(
    options: DataOptions,
    inputs: InputSpecs | None,
    in_call: Given = NOTHING,
    optional: Collection[str] = frozenset(),
    held_out_by: EvaluationOptions | None = None,
) -> Source:
    """Open the data source that `options` name, or what is given `in_call`. `inputs` are the PEF's, per sample; None
    when compiling. A file may lack those that are `optional`. `held_out_by` may name a source of its own for
    evaluations, which replaces what that of `options` holds out. Raises DataError."""
    given, collate = in_call.data, in_call.collate
    if given is None and options.source is None:
        by_app = "" if inputs is None else "; an app runs its PEF itself: sambasim app APP.py run --pef PEF"
        remedy = f"--set data.source=module:function, or FILE.npz, or synthetic{by_app}"
        raise DataError("no data source is named", remedy=remedy)
    name = "the given data" if given is not None else options.source or ""
    train, evaluation = _datasets(options, inputs, optional) if given is None else _pair(given, name)
    of_evaluation = name
    if held_out_by is not None and held_out_by.data is not None and not (given is not None and evaluation is not None):
        of_evaluation, changes = held_out_by.data, {"source": held_out_by.data, "args": held_out_by.args}
        only, of_pair = _datasets(options.model_copy(update=changes), inputs, optional)
        evaluation = only if of_pair is None else of_pair
    if evaluation is not None and options.evaluation_fraction > 0:
        what = f"gives an evaluation set, and data.evaluation_fraction = {options.evaluation_fraction} asks for another"
        raise DataError(f"{of_evaluation} {what}", remedy="--set data.evaluation_fraction=0")
    named = collate_of(options.collate)
    padding = Padding(options.padding, [spec.name for spec in inputs or ()]) if options.buckets else None

    def watched(given: Any, name: str, what: str) -> WatchedDataset:
        function = collate or (own_collate(given) if isinstance(given, DataLoader) else None) or named or padding
        who = f"the length of the {what} set of {name}"
        dataset = guarded(lambda: WatchedDataset(given, name, collate=function), who, DataError)
        if not len(dataset) and not dataset.is_stream:
            raise DataError(f"the {what} set of {name} is empty", remedy="check where its samples come from")
        return dataset

    to_train, held_out = watched(train, name, "training"), None
    if evaluation is not None:
        held_out = watched(evaluation, of_evaluation, "evaluation")
    elif options.evaluation_fraction > 0:
        to_train, held_out = _split(to_train, options.evaluation_fraction)
    size = f"{len(to_train):,} samples" if len(to_train) else "a stream"
    described = "" if held_out is None else f", {len(held_out):,} held out" if len(held_out) else ", a stream held out"
    return Source(name, to_train, held_out, f"{name}: {size} to train{described}")


def collate_of(given: Collate | str | None) -> Collate | None:
    """The function that is given or named. Raises DataError for what cannot be called."""
    if isinstance(given, str):
        return load_function(given, "collate function")
    if given is None or callable(given):
        return given
    what = f"collate_fn is of type {type(given).__name__}, which cannot be called"
    raise DataError(what, remedy="give a function that makes a batch of a list of samples, or its name")


def _split(dataset: WatchedDataset, fraction: float) -> tuple[WatchedDataset, WatchedDataset]:
    name, asked = dataset.name, f"data.evaluation_fraction = {fraction}"
    if dataset.is_stream:
        raise DataError(f"{name} is a stream, and {asked} holds out some", remedy="give (train, evaluation)")
    if dataset.is_sampled:
        what = f"{name} gives a DataLoader with a sampler, which is of all samples, and {asked} holds out some"
        raise DataError(what, remedy="give (train_loader, eval_loader), and --set data.evaluation_fraction=0")
    kept, held = split_indices(len(dataset), fraction)
    if not kept or not held:
        what = f"{name} has {len(dataset)} samples: {asked} leaves {len(kept)} to train and {len(held)} to evaluate"
        raise DataError(what, remedy="give more samples, or another data.evaluation_fraction")
    return dataset.part(kept), dataset.part(held)


def split_indices(count: int, fraction: float) -> tuple[list[int], list[int]]:
    """Indices to train on and indices to hold out, both ascending. They depend on the arguments only."""
    # RandomState's stream is frozen by NumPy's policy: the split stays the same from one release to the next.
    order = np.random.RandomState(SPLIT_SEED).permutation(count).tolist()
    held = round(count * fraction)
    return sorted(order[held:]), sorted(order[:held])


def _datasets(options: DataOptions, inputs: InputSpecs | None, optional: Collection[str]) -> Datasets:
    name = options.source or ""
    if name == SYNTHETIC:
        specs = inputs or parse_inputs(options.inputs or {})
        if not specs:
            remedy = """--set 'data.inputs={x = "float32[784]", target = "int64[] < 10"}'"""
            raise DataError("synthetic data needs the inputs of one sample", remedy=remedy)
        seed = options.args.get("seed", 0)
        return SyntheticDataset(specs, options.samples or DEFAULT_SAMPLES, seed if isinstance(seed, int) else 0), None
    if name.endswith(DATA_SUFFIXES):
        return open_file(Path(name), inputs, optional), None
    return _pair(call_object(BUILTIN_SOURCES.get(name, name), options.args, "data source"), name)


def _pair(given: object, name: str) -> Datasets:
    parts = given if isinstance(given, tuple) else (given, None)
    if len(parts) != 2 or all(isinstance(part, Tensor) for part in parts):
        what = f"{name} gave a tuple of {len(parts)}; it must give a dataset, or (train, evaluation)"
        raise DataError(what, remedy="return (train, evaluation), or torch.utils.data.TensorDataset(*tensors)")
    for part in parts if parts[1] is not None else parts[:1]:
        if isinstance(part, DataLoader):
            check_loader(part, name)
        dataset = part.dataset if isinstance(part, DataLoader) else part
        is_map_style = isinstance(dataset, MapStyle) and not isinstance(dataset, Mapping | str | bytes)
        if not is_map_style and not _is_stream(dataset):
            remedy = "return a map-style Dataset, one with __len__ and __getitem__, or (train, evaluation); or an "
            remedy += "IterableDataset, or a generator function itself, which gives an epoch at each call"
            raise DataError(f"{name} gave {type(dataset).__name__}, which is no data set", remedy=remedy)
    return parts
