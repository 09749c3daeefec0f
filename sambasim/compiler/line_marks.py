"""Marks what a trace records with the user's line and the path of the module, as Dynamo does."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.fx import traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sambasim.compiler.recording import user_frame


@contextmanager
def modules_marked(step: nn.Module) -> Iterator[None]:
    """While this is open, what is traced has the path of its module."""
    paths = {id(module): path for path, module in step.named_modules()}
    stack: list[tuple[str, type]] = []

    def enter(module: nn.Module, given: object) -> None:
        stack.append((paths.get(id(module), "").removeprefix("model").lstrip("."), type(module)))
        mark()

    def leave(module: nn.Module, given: object, result: object) -> None:
        stack.pop()
        mark()

    def mark() -> None:
        traceback.current_meta["nn_module_stack"] = {"": stack[-1]} if len(stack) > 1 else {}

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with traceback.preserve_node_meta():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def mark_line() -> None:
    """What is traced next has the line that is running."""
    frame = user_frame()
    if frame is None:
        traceback.current_meta.pop("stack_trace", None)
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, line).strip()
    traceback.current_meta["stack_trace"] = f'  File "{file}", line {line}, in {frame.f_code.co_name}\n    {code}\n'
