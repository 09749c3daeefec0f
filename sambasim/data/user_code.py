"""User code: loading an object by its target, calling it, and locating the line that raised.

While a module loads, its folder is first on `sys.path`, and afterwards last: it shadows no other module.
"""

import importlib
import importlib.util
import inspect
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from sambasim.errors import CallbackError, DataError, ModelError, OptionError, SambasimError, UserError
from sambasim.options.grammar import missing_file, missing_module, split_target, target_problems
from sambasim.options.problem import nearest, show
from sambasim.whose_code import is_library_file, is_users_file

_ERRORS: Mapping[str, type[UserError]] = {
    "model": ModelError, "loss": ModelError, "optimizer": OptionError, "metric": OptionError,
    "callback": CallbackError,
}  # fmt: skip
_TABLES = {"model": "model", "loss": "loss", "data source": "data"}

T = TypeVar("T")


def user_line(error: BaseException) -> str | None:
    """`file:line: code` of the deepest frame of user code; without one, of the deepest of an installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    every = traceback.extract_tb(error.__traceback__)[::-1]
    frames = [frame for frame in every if not is_library_file(frame.filename)]
    frame = next((frame for frame in frames if is_users_file(frame.filename)), frames[0] if frames else None)
    return None if frame is None else f"{os.path.normpath(frame.filename)}:{frame.lineno}: {frame.line}"


def summary(error: BaseException) -> str:
    """The exception's class and the first line of its message: `ValueError: bad label`."""
    lines = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def missing_remedy(error: BaseException) -> str | None:
    """What to do about a module that user code imports and that is missing; None for another error."""
    lacking = error.name if isinstance(error, ModuleNotFoundError) else None
    return f"install {lacking}, or run where it can be imported" if lacking else None


def load_object(target: str, what: str) -> object:
    """The object that a target names; a file is loaded once. `what` is its purpose: "model", "loss", "optimizer",
    "metric", "callback", "data source" or "collate function". Raises the error of it, with the user's file and line if
    the module raises."""
    error = _ERRORS.get(what, DataError)
    for problem in target_problems(target):
        raise error(f"the {what} {show(target)} {problem.what}", remedy=problem.remedy)
    module_name, name = split_target(target)
    load = _load_file if module_name.endswith(".py") else _load_module
    try:
        module = load(module_name, target, what, error)
    except SambasimError:
        raise
    except (Exception, SystemExit) as raised:
        what = f"the {what} {target}: its module raised {summary(raised)}"
        remedy = _by_package(module_name, name, raised) or missing_remedy(raised) or "correct that line"
        raise error(what, where=user_line(raised), remedy=remedy) from raised
    return _attribute(module, name, target, what, error)


def _by_package(module_name: str, name: str, error: BaseException) -> str | None:
    """What to do if a file, which was loaded alone, imports from its own package; None otherwise."""
    if not (module_name.endswith(".py") and isinstance(error, ImportError)):
        return None
    path = Path(os.path.abspath(Path(module_name).expanduser()))
    folder, module = path.parent.parent, f"{path.parent.name}.{path.stem}"
    while (folder / "__init__.py").exists():
        folder, module = folder.parent, f"{folder.name}.{module}"
    if "relative import" not in str(error) and error.name != module.partition(".")[0]:
        return None
    here = "" if folder == Path.cwd() else f"cd {os.path.relpath(folder)}, and "
    return f"{here}name it by its package: {module}:{name}"


def load_function(target: str, what: str) -> Callable[..., object]:
    """As `load_object`, of what can be called."""
    if callable(function := load_object(target, what)):
        return function
    called = f"the {what} {target} is of type {type(function).__name__}, which cannot be called"
    raise _ERRORS.get(what, DataError)(called)


def call_object(target: str, args: Mapping[str, object], what: str) -> object:
    """Call the object that a target names with `args`. Raises as `load_object` does."""
    error, function = _ERRORS.get(what, DataError), load_function(target, what)
    check_arguments(function, args, target, what)
    remedy = f"correct that line, or call it with other arguments: --set {_TABLES[what]}.args.NAME=VALUE"
    return guarded(lambda: function(**args), f"the {what} {target}", error, remedy)


def guarded(action: Callable[[], T], who: str, error: type[UserError], remedy: str | None = None) -> T:
    """Run user code. An exception becomes `error`, with file and line; `who` is the subject of the message."""
    try:
        return action()
    except SambasimError:
        raise
    except (Exception, SystemExit) as raised:
        where = user_line(raised)  # None if the call itself failed
        remedy = remedy or ("correct that line" if where else "correct the arguments that it takes")
        raise error(f"{who} raised {summary(raised)}", where=where, remedy=remedy) from raised


def set_epoch(of: object, epoch: int) -> None:
    """If it has such a method."""
    if callable(method := getattr(of, "set_epoch", None)):
        guarded(lambda: method(epoch), f"set_epoch of {type(of).__name__}", DataError)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards all generators of random numbers are as they were."""
    import numpy as np
    import torch

    with torch._C._DisableTorchDispatch():  # or a mode of fake tensors has the state, which has no values
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with torch._C._DisableTorchDispatch():
            torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _load_module(name: str, target: str, what: str, error: type[UserError]) -> ModuleType:
    with _importable(os.getcwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as raised:
            if raised.name is None or not f"{name}.".startswith(f"{raised.name}."):
                raise
            problem = missing_module(raised.name, target)
            raise error(f"the {what} {target}: {problem.what}", remedy=problem.remedy) from None


def _load_file(path_text: str, target: str, what: str, error: type[UserError]) -> ModuleType:
    path = Path(os.path.abspath(Path(path_text).expanduser()))
    names = {"model": "path/file.py:NAME", "loss": "--set loss.name=path/file.py:NAME", "metric": "path/file.py:NAME"}
    names |= {"collate function": "--set data.collate=path/file.py:NAME", "callback": "--callback path/file.py:NAME"}
    if problem := missing_file(path, names.get(what, "--set data.source=…")):
        raise error(f"the {what} {target}: {problem.what}", remedy=problem.remedy)
    name = f"sambasim_file_{path.stem}"  # so that a file `random.py` does not replace Python's `random`
    if getattr(sys.modules.get(name), "__file__", str(path)) != str(path):
        name += f"_{zlib.crc32(str(path).encode()):08x}"  # another file of the same name was loaded before
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"the {what} {target}: {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importable(str(path.parent)):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _attribute(module: ModuleType, name: str, target: str, what: str, error: type[UserError]) -> object:
    value: object = module
    parts = name.split(".")
    for index, part in enumerate(parts, 1):
        try:
            value = getattr(value, part)
        except AttributeError:
            held = getattr(value, "__dict__", {})
            # `dir` has what a module imports when it is asked for. A module is no model.
            choices = [key for key in dir(value) if index < len(parts) or not isinstance(held.get(key), ModuleType)]
            public = sorted(key for key in held if not key.startswith("_"))
            own = [key for key in public if getattr(getattr(value, key), "__module__", None) == module.__name__]
            guess = nearest(part, choices)
            remedy = f"did you mean {guess}?" if guess else f"it has {', '.join(own) or 'nothing of its own'}"
            raise error(f"the {what} {target}: {module.__file__} has no {part}", remedy=remedy) from None
    return value


def check_arguments(function: Callable[..., object], args: Mapping[str, object], target: str, what: str) -> None:
    """Raises as `load_object` does if `function`, which `target` names, cannot be called with `args`."""
    error = _ERRORS.get(what, DataError)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some functions written in C have no signature
    try:
        signature.bind(**args)
    except TypeError as raised:
        table = _TABLES[what]
        unknown = [name for name in args if name not in signature.parameters]
        guess = nearest(unknown[0], signature.parameters) if unknown else None
        remedy = f"leave out {table}.args.{unknown[0]}" if unknown else f"--set {table}.args.NAME=VALUE"
        message = f"the {what} {target}{signature} cannot be called with {table}.args {dict(args)}: {raised}"
        raise error(message, remedy=f"did you mean {table}.args.{guess}?" if guess else remedy) from None
