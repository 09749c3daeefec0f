"""`dump_accuracy_debug_info`: figures that show where a model goes wrong."""

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor, nn

from sambasim.errors import OptionError
from sambasim.ir.types import SymbolKind
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, to_torch
from sambasim.samba.utils.json_file import as_json
from sambasim.samba.utils.ranks import get_rank

__all__ = ["dump_accuracy_debug_info"]

_FILE = "accuracy_debug_info.rank{rank}.jsonl"
_DUMPED = (SymbolKind.PARAMETER, SymbolKind.GRADIENT, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


def dump_accuracy_debug_info(
    args: Namespace | str | os.PathLike[str],
    model: nn.Module,
    inputs: object = None,
    traced_outputs: object = None,
    step: int = 0,
) -> Path:
    """Add to the file of this rank a line of JSON for each parameter, gradient, buffer and optimizer state on the
    device, and for the inputs and outputs of the last run: its norm, mean, least and largest element, and how many are
    not finite. Returns the path.

    args: the folder; or the arguments of the app, for the folder accuracy_debug in its --output-folder, or in out
    inputs, traced_outputs: no effect
    step: a number for the lines, as the app counts

    For a parameter or buffer also its largest difference to the host's, which is not 0 where `to_cpu` or `to_device`
    was not called. No event file of TensorBoard is written.
    Raises OptionError if no PEF is loaded for `model`, or if the file cannot be written.
    """
    folder = Path(args.output_folder or "out", "accuracy_debug") if isinstance(args, Namespace) else Path(args)
    path = folder / _FILE.format(rank=get_rank())
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
            row["largest_difference_to_host"] = as_json(float(apart.max())) if apart.numel() else 0.0
        yield row
    for name, value in session.tensor_dict.items():
        if isinstance(value, SambaTensor) and value.has_data:
            yield {"name": name, "kind": program.symbols[name].kind.value, **_figures(to_torch(value).double())}


def _figures(values: Tensor) -> dict[str, JsonValue]:
    if not values.numel():
        return {"elements": 0}
    return {
        "elements": values.numel(),
        "norm": as_json(float(values.norm())),
        "mean": as_json(float(values.mean())),
        "least": as_json(float(values.min())),
        "largest": as_json(float(values.max())),
        "not_finite": int((~values.isfinite()).sum()),
    }
