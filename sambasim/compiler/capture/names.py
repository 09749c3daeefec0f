"""SambaFlow's names of symbols and nodes (`logreg__lin_layer__weight`), and lines of the user's own program,
found in errors and stacks."""

import inspect
import os
import re
import sys
import traceback

from torch import fx, nn

from sambasim.ir.graph import SourceLine
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.whose_code import is_library_file, is_ours, is_package_file, torch_folder

_WEIGHT_NORM = re.compile(r"(^|\.)parametrizations\.weight\.original([01])$")


def symbol_name(prefix: str, path: str) -> str:
    """`("logreg", "lin_layer.weight")` -> `"logreg__lin_layer__weight"`; under weight_norm `…weight_magnitude` and
    `…weight_direction`, as in SambaFlow."""
    path = _WEIGHT_NORM.sub(lambda found: f"{found[1]}weight_{('magnitude', 'direction')[int(found[2])]}", path)
    return "__".join((prefix, *(re.sub(r"\W", "_", part) for part in path.split(".") if part)))


def loss_name(prefix: str) -> str:
    """The symbol of the training step's loss, unless something else has that name."""
    return f"{prefix}__loss"


def prefix_of(loss: str) -> str:
    """The model's prefix, from the symbol of its loss: `"logreg__loss"` or `"logreg__loss_1"` -> `"logreg"`."""
    return loss.rpartition("__loss")[0]


class UniqueNames:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def take(self, name: str, *suffixes: str) -> str:
        """`name`, or `name` with the first free number behind it. Takes that name with each of `suffixes` too."""
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if count == 0 and not any(f"{name}{suffix}" in self._counts for suffix in suffixes):
            self._counts |= {f"{name}{suffix}": 1 for suffix in suffixes}
            return name
        return self.take(f"{name}_{max(count, 1)}", *suffixes)


_NAMED_BY_LAYER = {
    OperatorKind.MATMUL, OperatorKind.CONVOLUTION, OperatorKind.RECURRENT, OperatorKind.NORMALIZATION,
    OperatorKind.POOLING, OperatorKind.RESIZE, OperatorKind.LOSS,
}  # fmt: skip


def layer_name(node: fx.Node, operator: str) -> str | None:
    """`linear` for the matrix product of an nn.Linear, as SambaFlow names it; None for an operator that is no layer of
    torch.nn, or only prepares or finishes the work of one."""
    _, layer = _module(node)
    if layer is None or OPERATORS[operator].kind not in _NAMED_BY_LAYER or layer.__name__ == "MultiheadAttention":
        return None
    return layer.__name__.lower() if layer.__module__.startswith("torch.nn.modules.") else None


def module_path(node: fx.Node) -> str:
    return _module(node)[0]


def _module(node: fx.Node) -> tuple[str, type | None]:
    """The path and the class of the module that made `node`, as `line_marks` has noted them."""
    noted = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    found: tuple[str, type | None] = next(iter(noted.values()), ("", None))
    return found


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost line of the user's program that made `node`, its file relative to the folder from which Python
    imported it."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    users = [(frame["file"], int(frame["line"]), frame["code"].strip()) for frame in frames]
    last = next((frame for frame in reversed(users) if not is_library_file(frame[0])), None)
    return SourceLine(_imported_as(last[0]), *last[1:]) if last else None


def _imported_as(path: str) -> str:
    folders = [entry for entry in (*sys.path, os.getcwd()) if entry and path.startswith(f"{entry.rstrip('/')}/")]
    return os.path.relpath(path, max(folders, key=len)) if folders else os.path.basename(path)


def source_files(model: nn.Module) -> set[str]:
    """The files of the user's classes in `model`, named as in `source_line`, and not those of a prompt or of code."""
    classes = {type(module) for module in model.modules()}
    written = {cls for cls in classes if hasattr(sys.modules.get(cls.__module__), "__file__")}
    files = map(inspect.getsourcefile, written)
    return {_imported_as(file) for file in files if file is not None and not is_library_file(file)}


def read_by(node: fx.Node) -> str | None:
    return next((str(line) for line in map(source_line, node.users) if line), None)


def user_line(error: BaseException) -> str | None:
    """The innermost line of the user's program that `error` went through; else one of an installed library."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library_file(frame.filename)]
    users = [frame for frame in frames if not is_package_file(frame.filename)]
    last = next(reversed(users or frames), None)
    return f"{last.filename}:{last.lineno}: {last.line}" if last else None


_FORWARDING = ("__torch_function__", "__torch_dispatch__", "set_data")
"""Functions of sambasim that call what the user's code calls."""


def is_bug(error: BaseException) -> bool:
    """Whether code of sambasim raised `error`, itself or by Python's own library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_ours(frame.filename) and frame.name not in _FORWARDING:
            return True
        if frame.filename.startswith(torch_folder()) or not is_library_file(frame.filename):
            return False
    return True


def forward_line(model: nn.Module) -> str | None:
    """The first line of its `forward`; None if that is a library's."""
    try:
        file, (lines, number) = inspect.getsourcefile(model.forward), inspect.getsourcelines(model.forward)
    except (OSError, TypeError):
        return None
    return None if file is None or is_library_file(file) else f"{file}:{number}: {lines[0].strip()}"
