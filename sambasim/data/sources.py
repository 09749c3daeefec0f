"""From data options to datasets: one for training, and perhaps one held out for evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sambasim.data.files import open_file
from sambasim.data.resolve import call_object, guarded
from sambasim.data.samples import MapStyle, WatchedDataset
from sambasim.data.synthetic import DEFAULT_SAMPLES, SyntheticDataset
from sambasim.errors import DataError
from sambasim.options.grammar import BUILTIN_SOURCES, InputSpec, SourceKind
from sambasim.options.training import DataOptions

InputSpecs: TypeAlias = tuple[InputSpec, ...]

SPLIT_SEED = 1998
"""Every rank and every run must hold out the same samples, so this is a constant and no option."""


@dataclass(frozen=True, slots=True)
class Source:
    """An opened data source. Its datasets are map-style; a DataLoader over them needs `batches.collate`."""

    name: str
    train: WatchedDataset
    evaluation: WatchedDataset | None
    description: str


def open_source(options: DataOptions, inputs: InputSpecs | None) -> Source:
    """Opens what `options` name. `inputs` are the PEF's, per sample; None when compiling.

    Raises DataError if nothing is named, if the user's function fails or gives no map-style dataset, if a file does not
    hold the inputs, if a set is empty, or if samples are to be held out of a source that has an evaluation set already.
    """
    if options.source is None:
        raise DataError(
            "no data source is named", remedy="--set data.source=module:function, or FILE.npz, or synthetic"
        )
    name = options.source
    train, evaluation = _datasets(options, inputs)
    if evaluation is not None and options.evaluation_fraction > 0:
        asked = f"data.evaluation_fraction = {options.evaluation_fraction} asks for another"
        raise DataError(f"{name} gives an evaluation set, and {asked}", remedy="--set data.evaluation_fraction=0")
    count = _length(train, name, "training")
    if evaluation is not None:
        _length(evaluation, name, "evaluation")
        return _source(name, WatchedDataset(train, name), WatchedDataset(evaluation, name))
    if options.evaluation_fraction == 0:
        return _source(name, WatchedDataset(train, name), None)
    kept, held = split_indices(count, options.evaluation_fraction)
    if not kept or not held:
        raise DataError(
            f"{name} has {count} samples: data.evaluation_fraction = {options.evaluation_fraction} leaves "
            f"{len(kept)} to train and {len(held)} to evaluate",
            remedy="give more samples, or another data.evaluation_fraction",
        )
    return _source(name, WatchedDataset(train, name, kept), WatchedDataset(train, name, held))


def split_indices(count: int, fraction: float) -> tuple[list[int], list[int]]:
    """Indices to train on and indices held out, each rising, together 0 to count - 1; the same for equal arguments."""
    import numpy as np

    # RandomState's stream is frozen by NumPy's policy: the split stays the same from one release to the next.
    order = np.random.RandomState(SPLIT_SEED).permutation(count).tolist()
    held = round(count * fraction)
    return sorted(order[held:]), sorted(order[:held])


def _source(name: str, train: WatchedDataset, evaluation: WatchedDataset | None) -> Source:
    held_out = f", {len(evaluation):,} held out" if evaluation is not None else ""
    return Source(name, train, evaluation, f"{name}: {len(train):,} samples to train{held_out}")


def _datasets(options: DataOptions, inputs: InputSpecs | None) -> tuple[MapStyle, MapStyle | None]:
    name = options.source or ""
    if options.kind is SourceKind.SYNTHETIC:
        specs = inputs or options.input_specs()
        if not specs:
            raise DataError(
                "synthetic data needs the inputs of one sample",
                remedy="""--set 'data.inputs={x = "float32[784]", target = "int64[] < 10"}'""",
            )
        seed = options.args.get("seed", 0)
        return SyntheticDataset(specs, options.samples or DEFAULT_SAMPLES, seed if isinstance(seed, int) else 0), None
    if options.kind is SourceKind.FILE:
        return open_file(Path(name), inputs), None
    given = call_object(BUILTIN_SOURCES.get(name, name), options.args, "data source")
    return _pair(given, name)


def _pair(given: object, name: str) -> tuple[MapStyle, MapStyle | None]:
    if not isinstance(given, tuple):
        return _map_style(given, name), None
    if given and all(isinstance(item, Tensor) for item in given):
        raise DataError(
            f"{name} gave a tuple of {len(given)} tensors, which is no dataset",
            remedy="return torch.utils.data.TensorDataset(*tensors)",
        )
    if len(given) != 2:
        raise DataError(
            f"{name} gave a tuple of {len(given)}; it must give a dataset, or (train, evaluation)",
            remedy="return (train, evaluation)",
        )
    train, evaluation = given
    return _map_style(train, name), None if evaluation is None else _map_style(evaluation, name)


def _map_style(given: object, name: str) -> MapStyle:
    kind = type(given).__name__
    if isinstance(given, IterableDataset):
        raise DataError(
            f"{name} gave {kind}, an IterableDataset, which cannot be shared out among replicas",
            remedy="give a map-style Dataset, one with __len__ and __getitem__",
        )
    if isinstance(given, DataLoader):
        raise DataError(
            f"{name} gave a DataLoader; sambasim makes its own, one for each replica", remedy="return its dataset"
        )
    if isinstance(given, Tensor):
        raise DataError(f"{name} gave a tensor, which is no dataset", remedy="return TensorDataset(tensor)")
    if not isinstance(given, MapStyle) or isinstance(given, Mapping | str | bytes):
        raise DataError(
            f"{name} gave {kind}, which is no dataset",
            remedy="return a map-style Dataset, one with __len__ and __getitem__, or (train, evaluation)",
        )
    return given


def _length(dataset: MapStyle, name: str, what: str) -> int:
    count = guarded(lambda: len(dataset), f"the length of the {what} set of {name}", DataError)
    if count == 0:
        raise DataError(f"the {what} set of {name} is empty", remedy="look at where its samples should come from")
    return count
