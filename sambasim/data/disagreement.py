"""Why the samples of a batch do not go together, in terms of the user's dataset: which sample, which value, what it is.

Looked into only where collating has failed or widened a dtype; a sound batch costs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from sambasim.data.samples import Failure, Samples

_REMEDY = "give every sample the same values, shapes and dtypes: pad, crop or convert them in the dataset"


def disagreement(samples: Sequence[object]) -> Failure | None:
    """The first sample that holds something else than the first one, or what is no tensor or number; None if all agree.

    Samples that a WatchedDataset read are called by the index that the user's dataset was asked for.
    """
    first = dict(_values(samples[0]))
    for name, value in first.items():
        if not isinstance(value, Tensor | np.ndarray | np.generic | int | float | str | bytes):
            what = f"{_called(samples, 0)} gives {_kind(value)} for {name}, which is no tensor or number"
            return Failure(what, remedy="give tensors and numbers, side by side in one tuple or dict")
    for position, sample in enumerate(samples):
        values = dict(_values(sample))
        for name in {**first, **values}:
            is_, was = _kind_of(values, name), _kind_of(first, name)
            if is_ != was:
                what = f"{_called(samples, position)} gives {is_} for {name}, and {_called(samples, 0)} gives {was}"
                return Failure(what, remedy=_REMEDY)
    return None


def _called(samples: Sequence[object], position: int) -> str:
    if isinstance(samples, Samples):
        return f"sample {samples.indices[position]} of {samples.name}"
    return f"sample {position} of the batch"


def _values(sample: object) -> Iterator[tuple[str, object]]:
    """What a sample holds, by the name that it has in a message."""
    if isinstance(sample, Mapping):
        yield from ((str(name), value) for name, value in sample.items())
    elif isinstance(sample, tuple | list):
        yield from ((f"value {position}", value) for position, value in enumerate(sample))
    else:
        yield "its value", sample


def _kind_of(values: Mapping[str, object], name: str) -> str:
    return _kind(values[name]) if name in values else "nothing"


def _kind(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return "None" if value is None else f"a {type(value).__name__}"
