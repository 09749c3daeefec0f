"""Branches on the values of tensors that a capture may follow as the example batch did: those of libraries, and those
that only raise or warn. The graph checks in each step that they go the same way."""

import ast
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from sambasim.compiler.explain import line_of, user_frame
from sambasim.compiler.names import is_library_file
from sambasim.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_REPORTS = {"warn", "warning", "warning_once", "warn_once", "print", "debug", "info", "error", "exception", "critical"}
_OTHER_WAY = "a branch of forward() goes another way than for the example batch"


class Recorded(TorchFunctionMode):
    """Around one eager call: records which way each branch goes. Raises CaptureError for a branch of the user's that
    does more than raise or warn."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[tuple[bool, str | None]] = []
        """For each branch, its way, and what is wrong if it goes another way: None if nothing is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_branch(func, args):
            self.ways.append((bool(result), _said(_asker())))
        return result


class Followed(TorchFunctionMode):
    """Around a trace: each branch goes the way that was recorded, and an assertion says so. Marks what is traced with
    the user's line."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._ways = recorded.ways
        self._next = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _mark_line()
        if not _is_branch(func, args):
            return func(*args, **(kwargs or {}))
        way, said = self._ways[self._next % len(self._ways)]  # the step is called several times
        self._next += 1
        if said is not None:
            torch._assert_async(args[0] if way else args[0].logical_not(), said)
        return way


@contextmanager
def modules_marked(step: nn.Module) -> Iterator[None]:
    """What is traced has the path of its module, as Dynamo gives it."""
    paths = {id(module): path for path, module in step.named_modules()}
    stack: list[tuple[str, type]] = []

    def enter(module: nn.Module, given: object) -> None:
        stack.append((f"L['self'].{paths.get(id(module), '')}", type(module)))
        mark()

    def leave(module: nn.Module, given: object, result: object) -> None:
        stack.pop()
        mark()

    def mark() -> None:
        traceback.current_meta["nn_module_stack"] = {str(depth): place for depth, place in enumerate(stack) if depth}

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with traceback.preserve_node_meta():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_branch(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__bool__", "item") and isinstance(args[0], Tensor) and args[0].dtype is torch.bool


def _mark_line() -> None:
    frame = user_frame()
    if frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        code = linecache.getline(file, line).strip()
        traceback.current_meta["stack_trace"] = f'  File "{file}", line {line}, in {frame.f_code.co_name}\n    {code}\n'


def _asker() -> FrameType | None:
    """The frame that asks for a value: the user's, or one of torch.nn."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _may_ask(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@cache
def _may_ask(file: str) -> bool:
    return file.startswith(f"{_TORCH}/nn/") or not is_library_file(file)


def _said(frame: FrameType | None) -> str | None:
    """What is wrong if the branch in `frame` goes another way. Raises CaptureError if it does more than report."""
    if frame is None:
        return _OTHER_WAY
    file, line = frame.f_code.co_filename, frame.f_lineno
    if file.startswith(_TORCH) or "-packages" in file:
        return _OTHER_WAY
    for node in _statements(file):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or line):
            return ast.unparse(node)
        is_test = isinstance(node, ast.If) and node.test.lineno <= line <= (node.test.end_lineno or line)
        if is_test and isinstance(node, ast.If) and not node.orelse and all(map(_only_reports, node.body)):
            return ast.unparse(node.body[-1]) if isinstance(node.body[-1], ast.Raise) else None
    raise CaptureError("a branch on the value of a tensor", where=line_of(file, line))


@cache
def _statements(file: str) -> Iterable[ast.AST]:
    try:
        return tuple(ast.walk(ast.parse(Path(file).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return ()


def _only_reports(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    called = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(called, ast.Call):
        return False
    function = called.func
    if isinstance(function, ast.Attribute):  # of `warnings` or a logger: other objects may do more by such a name
        owner = ast.unparse(function.value).lower()
        return function.attr in _REPORTS and ("log" in owner or owner == "warnings")
    return isinstance(function, ast.Name) and function.id in _REPORTS
