"""`AccuracyReport`: what an app found about its model's accuracy, as a file of JSON."""

import os
from collections.abc import Mapping

from pydantic import JsonValue
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.samba.utils.json_file import as_json, write_json

__all__ = ["AccuracyReport"]


class AccuracyReport:
    """Figures under names: `AccuracyReport(val_metrics={"acc": 97.5, "loss": 0.1}, batch_size=32)`.

    Any names may be given, such as train_metrics, val_accuracy, num_iterations; each is an attribute. Values are
    numbers, texts, tensors of one element, and dictionaries of these. The figures are the app's: nothing is computed or
    checked here. Raises OptionError for a value that JSON cannot hold.
    """

    def __init__(self, **figures: object) -> None:
        self.figures: dict[str, JsonValue] = {name: _plain(name, value) for name, value in figures.items()}

    def __getattr__(self, name: str) -> object:
        figures = vars(self).get("figures", {})
        if name not in figures:
            raise AttributeError(f"this report has no {name}; it has {', '.join(figures) or 'nothing'}")
        return figures[name]

    def save(self, path: str | os.PathLike[str] | None) -> None:
        """Write the figures as one line of JSON; nothing for None, which --acc-report-json is by default. Raises
        OptionError if the file cannot be written."""
        if path is not None:
            write_json(path, self.figures)


def _plain(name: str, value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return as_json(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise OptionError(
        f"{name} is of type {type(value).__name__}, and a report holds numbers and texts",
        remedy="give one number, a tensor of one element, a text, or a dictionary of these",
    )
