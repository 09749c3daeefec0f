"""From data options to datasets: one for training, and optionally one for evaluation."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sambasim.data.datasets import DEFAULT_SAMPLES, MapStyle, SyntheticDataset, WatchedDataset, open_file
from sambasim.data.user_code import call_object, guarded
from sambasim.errors import DataError
from sambasim.options.grammar import BUILTIN_SOURCES, InputSpec, SourceKind
from sambasim.options.training import DataOptions

InputSpecs: TypeAlias = tuple[InputSpec, ...]

SPLIT_SEED = 1998
"""A constant and not an option: every rank and every run must hold out the same samples."""


_GIVEN = "the given data"


@dataclass(frozen=True, slots=True)
class Source:
    """An open data source. Its datasets are map-style; a DataLoader over them needs `batches.collate`."""

    name: str
    train: WatchedDataset
    evaluation: WatchedDataset | None
    description: str


def open_source(
    options: DataOptions, inputs: InputSpecs | None, given: object = None, optional: Collection[str] = frozenset()
) -> Source:
    """Open the data source that `options` name, or what is `given` instead, as a data function returns it. `inputs` are
    the PEF's, per sample; None when compiling. A file may lack those that are `optional`. Raises DataError."""
    if given is not None:
        return _source(_GIVEN, *_pair(given, _GIVEN), options)
    if options.source is None:
        raise DataError(
            "no data source is named", remedy="--set data.source=module:function, or FILE.npz, or synthetic"
        )
    return _source(options.source, *_datasets(options, inputs, optional), options)


def _source(name: str, train: MapStyle, evaluation: MapStyle | None, options: DataOptions) -> Source:
    if evaluation is not None and options.evaluation_fraction > 0:
        asked = f"data.evaluation_fraction = {options.evaluation_fraction} asks for another"
        raise DataError(f"{name} gives an evaluation set, and {asked}", remedy="--set data.evaluation_fraction=0")
    count = _length(train, name, "training")
    if evaluation is not None:
        _length(evaluation, name, "evaluation")
        held_out: WatchedDataset | None = WatchedDataset(evaluation, name)
        kept = None
    elif options.evaluation_fraction > 0:
        kept, held = split_indices(count, options.evaluation_fraction)
        if not kept or not held:
            raise DataError(
                f"{name} has {count} samples: data.evaluation_fraction = {options.evaluation_fraction} leaves "
                f"{len(kept)} to train and {len(held)} to evaluate",
                remedy="give more samples, or another data.evaluation_fraction",
            )
        held_out = WatchedDataset(train, name, held)
    else:
        kept, held_out = None, None
    watched = WatchedDataset(train, name, kept)
    described = "" if held_out is None else f", {len(held_out):,} held out"
    return Source(name, watched, held_out, f"{name}: {len(watched):,} samples to train{described}")


def split_indices(count: int, fraction: float) -> tuple[list[int], list[int]]:
    """Indices to train on and indices to hold out, both ascending. They depend on the arguments only."""
    # RandomState's stream is frozen by NumPy's policy: the split stays the same from one release to the next.
    order = np.random.RandomState(SPLIT_SEED).permutation(count).tolist()
    held = round(count * fraction)
    return sorted(order[held:]), sorted(order[:held])


def _datasets(
    options: DataOptions, inputs: InputSpecs | None, optional: Collection[str]
) -> tuple[MapStyle, MapStyle | None]:
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
        return open_file(Path(name), inputs, optional), None
    given = call_object(BUILTIN_SOURCES.get(name, name), options.args, "data source")
    return _pair(given, name)


def _pair(given: object, name: str) -> tuple[MapStyle, MapStyle | None]:
    if not isinstance(given, tuple):
        return _map_style(given, name), None
    if len(given) == 2 and not all(isinstance(item, Tensor) for item in given):
        train, evaluation = given
        return _map_style(train, name), None if evaluation is None else _map_style(evaluation, name)
    raise DataError(
        f"{name} gave a tuple of {len(given)}; it must give a dataset, or (train, evaluation)",
        remedy="return (train, evaluation), or torch.utils.data.TensorDataset(*tensors)",
    )


def _map_style(given: object, name: str) -> MapStyle:
    others = (IterableDataset, DataLoader, Tensor, Mapping, str, bytes)
    if isinstance(given, MapStyle) and not isinstance(given, others):
        return given
    remedy = "return a map-style Dataset, one with __len__ and __getitem__, or (train, evaluation)"
    raise DataError(f"{name} gave {type(given).__name__}, which is no map-style dataset", remedy=remedy)


def _length(dataset: MapStyle, name: str, what: str) -> int:
    count = guarded(lambda: len(dataset), f"the length of the {what} set of {name}", DataError)
    if count == 0:
        raise DataError(f"the {what} set of {name} is empty", remedy="check where its samples come from")
    return count
