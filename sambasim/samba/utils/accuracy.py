"""Accuracy of an app: `assert_close`, `AccuracyReport`, `dump_accuracy_debug_info`, and their JSON files."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn

from sambasim.errors import DataError, OptionError
from sambasim.ir.types import SymbolKind
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.hyperparameters import rate_names
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, to_torch
from sambasim.samba.utils.helpers import get_rank

__all__ = ["MAX_BF16_TRUNCATE_NORMAL_REL", "AccuracyReport", "assert_close", "dump_accuracy_debug_info"]

MAX_BF16_TRUNCATE_NORMAL_REL = 2.0**-7
"""The largest relative error of truncating a normal fp32 number to bf16, which has 8 significant bits."""

_ROUNDING = 2.0**-8
"""The largest relative error of rounding to bf16."""

_DEBUG_FILE = "accuracy_debug_info.rank{rank}.jsonl"
_DUMPED = (SymbolKind.PARAMETER, SymbolKind.GRADIENT, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


def write_json(path: str | os.PathLike[str], figures: Mapping[str, JsonValue]) -> None:
    """Writes `figures` as one line of JSON. Raises OptionError if the file cannot be written."""
    try:
        Path(path).write_text(f"{json.dumps(figures)}\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}", remedy="give another file") from error


def _as_json(number: float) -> float | str:
    """`number`, with infinity and NaN as text: JSON does not have them."""
    return number if math.isfinite(number) else str(number)


@checks_keywords_beside("assert_close", ())
def assert_close(
    samba: Any, gold: Any, label: str, threshold: float = 3e-3, rtol: float = 0.0, visualize: bool = False
) -> None:
    """Checks that every element of `samba` is within `threshold + rtol * |gold|` of the same element of `gold`.

    Both are tensors, arrays or numbers, compared in float64. Equal infinities are close, and NaN is not close to
    anything. If one is bf16, 1/256 is added to `rtol`. `visualize` has no effect.
    Raises AssertionError with the number of elements that differ and the worst one, or with the shapes if they differ;
    DataError for what cannot be compared, such as an sn_grad that is None.
    """
    found, expected = _float64(samba, label), _float64(gold, label)
    rounded = any(isinstance(one, Tensor) and one.dtype is torch.bfloat16 for one in (samba, gold))
    if rounded:
        rtol += _ROUNDING
    if found.shape != expected.shape:
        raise AssertionError(f"{label}: the shape is {tuple(found.shape)}, and {tuple(expected.shape)} was expected")
    difference = (found - expected).abs()
    apart = ~((found == expected) | (difference <= threshold + rtol * expected.abs()))
    if not apart.any():
        return
    # NaN counts as infinitely far away, so that it is the worst element.
    distance = torch.where(apart, difference.nan_to_num(nan=torch.inf), -torch.inf)
    worst = np.unravel_index(int(distance.argmax()), tuple(found.shape))
    hint = "; in bf16: are both inputs the same, as of samba.randn(…).bfloat16().float()?" if rounded else ""
    training = None if session.machine is None else session.machine.program.training
    if training is not None and rate_names(training):
        hint += '; the model has dropout, for which host and device draw different numbers: hyperparam_dict={"p": 0.0}'
    place = f" at {[int(index) for index in worst]}" if worst else ""
    raise AssertionError(
        f"{label}: {int(apart.sum())} of {apart.numel()} elements differ by more than "
        f"{threshold:g}{f' + {rtol:g} of the expected value' if rtol else ''}; the worst{place} is "
        f"{float(found[worst]):g}, and {float(expected[worst]):g} was expected{hint}"
    )


def _float64(value: Any, label: str) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "give two tensors, arrays or numbers"
        if value is None:
            remedy += "; a gradient is None before the first backward, and where requires_grad is False"
        raise DataError(
            f"{label}: a {type(value).__name__} cannot be compared", where=app_line(), remedy=remedy
        ) from error
    return to_torch(tensor).detach().to(torch.float64)


class AccuracyReport:
    """Figures under names: `AccuracyReport(val_metrics={"acc": 97.5, "loss": 0.1}, batch_size=32)`.

    Each figure is an attribute. Names are free; values are numbers, texts, tensors of one element, and dictionaries of
    these. Nothing is computed or checked here. Raises OptionError for a value that JSON cannot hold.
    """

    def __init__(self, **figures: object) -> None:
        self.figures: dict[str, JsonValue] = {name: _plain(name, value) for name, value in figures.items()}

    def __getattr__(self, name: str) -> object:
        figures = vars(self).get("figures", {})
        if name not in figures:
            raise AttributeError(f"this report has no {name}; it has {', '.join(figures) or 'nothing'}")
        return figures[name]

    def save(self, path: str | os.PathLike[str] | None) -> None:
        """Writes the figures as one line of JSON; nothing for None, the default of --acc-report-json. Raises
        OptionError if the file cannot be written."""
        if path is not None:
            write_json(path, self.figures)


def _plain(name: str, value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return _as_json(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise OptionError(
        f"a report holds numbers and texts, and {name} is {type(value).__name__}",
        remedy="give one number, a tensor of one element, a text, or a dictionary of these",
    )


def dump_accuracy_debug_info(
    args: Namespace | str | os.PathLike[str],
    model: nn.Module,
    inputs: object = None,
    traced_outputs: object = None,
    step: int = 0,
) -> Path:
    """Appends to this rank's file a line of JSON for each parameter, gradient, buffer and optimizer state on the
    device, and for the inputs and outputs of the last run: norm, mean, least and largest element, and how many are not
    finite; for parameters and buffers also the largest difference to the host's. Returns the path.

    args: the folder; or the arguments of the app, for the folder accuracy_debug in its --output-folder, or in out
    inputs, traced_outputs: no effect
    step: the app's number of the step, for the lines

    No event file of TensorBoard is written.
    Raises OptionError if no PEF is loaded for `model`, or if the file cannot be written.
    """
    folder = Path(args.output_folder or "out", "accuracy_debug") if isinstance(args, Namespace) else Path(args)
    path = folder / _DEBUG_FILE.format(rank=get_rank())
    lines = "".join(f"{json.dumps({'step': step, **row})}\n" for row in _rows(model))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}", remedy="give another folder") from error
    return path


def _rows(model: nn.Module) -> Iterator[dict[str, JsonValue]]:
    program = session.program(model)
    host = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    symbols = [symbol for symbol in program.symbols.values() if symbol.kind in _DUMPED]
    tensors = session.get_tensors_by_name([symbol.name for symbol in symbols])
    for symbol, tensor in zip(symbols, tensors, strict=True):
        device = tensor.sn_data.double()
        row: dict[str, JsonValue] = {"name": symbol.name, "kind": symbol.kind.value, **_figures(device)}
        if symbol.torch_names and symbol.torch_names[0] in host:
            apart = (device - host[symbol.torch_names[0]].detach().double()).abs()
            row["largest_difference_to_host"] = _as_json(float(apart.max())) if apart.numel() else 0.0
        yield row
    for name, value in session.tensor_dict.items():
        if isinstance(value, SambaTensor) and value.has_data:
            yield {"name": name, "kind": program.symbols[name].kind.value, **_figures(to_torch(value).double())}


def _figures(values: Tensor) -> dict[str, JsonValue]:
    if not values.numel():
        return {"elements": 0}
    return {
        "elements": values.numel(),
        "norm": _as_json(float(values.norm())),
        "mean": _as_json(float(values.mean())),
        "least": _as_json(float(values.min())),
        "largest": _as_json(float(values.max())),
        "not_finite": int((~values.isfinite()).sum()),
    }
