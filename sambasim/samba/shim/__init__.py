"""The `sambaflow` import shim: `import sambaflow` in a script imports sambasim. `_SOURCES` says which file answers for
each module of `sambaflow`, `ABSENT` which names are refused. The names outside of `sambaflow.samba` are here.

    command                               how the shim gets on `sys.path`
    sambasim app SCRIPT.py run ...        the folder `path_entry` is inserted behind the script's own folder
    python -m sambasim SCRIPT.py ...      the same
    eval "$(sambasim env)"                the folder is at the front of PYTHONPATH, for plain `python SCRIPT.py run ...`

The folder holds a package `sambaflow` that only calls `enter`. An installed SambaFlow takes precedence.

A `Facade` is a module of sambasim under SambaFlow's name. It is a separate object, so that our module keeps its own
name. It is always a package: if `from ... import` does not find a name, Python asks the finder for it in packages only,
and there the error can propose similar names.
"""

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from sambasim import __version__ as sambasim_version
from sambasim.errors import UserError
from sambasim.samba import ending
from sambasim.samba.notices import AbsentName, AbsentNameError
from sambasim.samba.process import print_notice

ROOT = "sambaflow"

__version__ = f"1.19.0+sambasim.{sambasim_version}"
"""The imitated release of SambaFlow, and the version of sambasim."""


class _No:
    def __bool__(self) -> bool:
        return False

    __call__ = __bool__


is_demo = _No()
"""False, as a value and as a call."""


@dataclass(frozen=True, slots=True)
class ConvTilingMetadata:
    """A hint for the hardware's compiler, without effect here: an app gives it, by `key`, in the `metadata` of
    session.compile. `original_size` is the shape of the image before it is tiled, without the batch dimension."""

    key: ClassVar[str] = "conv_tiling"

    original_size: Sequence[int]


@dataclass(frozen=True, slots=True)
class TilingMetadata:
    """Likewise of a model; `num_tiles` is None if the compiler decides."""

    key: ClassVar[str] = "tiling"

    original_size: Sequence[int]
    num_tiles: int | Sequence[int] | None = None


_SOURCES: Mapping[str, str | tuple[str, ...]] = {
    **{f"sambaflow.{name}": f"sambasim.{name}" for name in (
        "samba", "samba.functional", "samba.graph", "samba.nn", "samba.optim", "samba.profiler", "samba.test",
        "samba.utils", "samba.utils.argparser", "samba.utils.checkpoint", "samba.utils.common",
    )},
    "sambaflow": (__name__, "__version__", "is_demo"),
    "sambaflow.logging.samba_logger": (
        "sambasim.samba.shim.samba_logger",
        *("critical", "debug", "error", "exception", "info", "log", "samba_logger", "setLevel", "warning"),
    ),
    "sambaflow.mac.metadata": (__name__, "ConvTilingMetadata", "TilingMetadata"),
    "sambaflow.samba.directives": "sambasim.samba.notices",
    "sambaflow.samba.env": "sambasim.samba.notices",
    "sambaflow.samba.functional.stir": "sambasim.samba.functional",
    "sambaflow.samba.lazy_param": "sambasim.samba.models",
    "sambaflow.samba.materialize": "sambasim.samba.models",
    "sambaflow.samba.nn.parameter": "sambasim.samba.nn",
    "sambaflow.samba.sambaloader": "sambasim.samba.inputs",
    "sambaflow.samba.sambatensor": "sambasim.samba.tensor",
    "sambaflow.samba.tensor": "sambasim.samba.tensor",
    "sambaflow.samba.schema.snconfig": "sambasim.samba.utils.argparser",
    "sambaflow.samba.utils.benchmark_acc": "sambasim.samba.test",
    "sambaflow.samba.utils.dataset": ("sambasim.samba.utils.common", "dataset_transform", "prepare_dataloader"),
    "sambaflow.samba.utils.dataset.mnist": ("sambasim.samba.utils.common", "dataset_transform", "prepare_dataloader"),
    "sambaflow.samba.utils.numeric": "sambasim.samba.test",
    "sambaflow.samba.utils.pef_utils": "sambasim.samba.utils.parser",
    "sambaflow.samba.utils.tensorboard_debug": "sambasim.samba.test",
    "sambaflow.sambacollections": ("torch.utils._ordered_set", "OrderedSet"),
}  # fmt: skip
"""By the name that an app imports: the module of sambasim that answers; or a module, and which of its names."""

_FIGURES = "keep the figures in the app, or samba.utils.benchmark_acc.AccuracyReport"
_METER = ("SambaFlow's logger of experiments", _FIGURES)
_TRAIN = ("a training loop of SambaFlow's own", "write the loop of session.run calls in the app, as in examples/")
_RANDOM = ("draws random numbers for lazy parameters", "samba.materialize(model), which draws from torch's generator")

ABSENT: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "sambaflow.frameworks.quantized.quantized_linear": {
        "QuantizedLinear": ("a Linear layer with int8 weights", "torch.nn.Linear, in fp32, or in bf16 by --dtype bf16"),
    },
    "sambaflow.models.unet": {"UNet": ("a model of SambaFlow's own", "define the model in the app, with torch.nn")},
    "sambaflow.online_inference_service.sn_sqs_handler": {
        "Queue": ("a queue of SambaFlow's inference service", "queue.Queue, or one request after another"),
    },
    "sambaflow.samba": {
        "groupby": ("an operator of the RDU whose arguments are not public", "write it with torch operators"),
    },
    "sambaflow.samba.experiment_logger": dict.fromkeys(("AccMeter", "CountMeter", "DisplayMeter", "Logger"), _METER),
    "sambaflow.samba.lazy_param": dict.fromkeys(("RNGProvider", "RNGProviderFactory"), _RANDOM),
    "sambaflow.samba.utils": {
        "SNType": ("an enumeration of the RDU's number types", "dtypes of torch, and --dtype at the compile"),
        "trace_multigraph": (
            "loads a PEF of several graphs", "samba.session.add_graph, and samba.session.init_multigraph_runtime(pef)",
        ),
    },
    "sambaflow.samba.utils.trainer.samba": {"train": _TRAIN},
    "sambaflow.samba.utils.trainer.torch": {"train": _TRAIN},
}  # fmt: skip
"""Names that apps import and sambasim does not have: what each is, and what to use. The import succeeds; a use raises
AbsentNameError."""

_NAMED = (*_SOURCES, *ABSENT)
MODULES: Mapping[str, str | tuple[str, ...]] = {
    **{".".join(name.split(".")[:depth]): () for name in _NAMED for depth in range(1, name.count(".") + 2)},
    **_SOURCES,
}
"""All modules of `sambaflow`: `_SOURCES`; modules that have absent names alone; and the packages of both."""


class AbsentModuleError(UserError, ModuleNotFoundError, code="absent"):
    """An import of a module of `sambaflow` that sambasim does not have; an app may catch it as an ImportError."""


class Facade(ModuleType):
    """A module of `sambaflow`. It has the names of our module, and the modules below it."""

    def __getattr__(self, name: str) -> object:
        child = f"{self.__name__}.{name}"
        try:
            value: object = getattr(_ours(self.__name__), name)
        except AttributeError:
            if child in MODULES:
                return import_module(child)
            if name in ABSENT.get(self.__name__, ()):
                return AbsentName(child, *ABSENT[self.__name__][name])
            if name == "__all__":
                return exported_names(self.__name__)
            raise AbsentNameError(f"sambasim has no {child}", remedy=_instead(self.__name__, name)) from None
        # An object takes precedence over a module of the same name: `samba.session` is the session.
        return import_module(child) if isinstance(value, ModuleType) and child in MODULES else value

    def __call__(self, *arguments: object, **options: object) -> object:
        """Calls the object that has the name of the module: Python may have put either under `samba.lazy_param`."""
        package, _, name = self.__name__.rpartition(".")
        value = getattr(_ours(package), name, None)
        if callable(value):
            return value(*arguments, **options)
        raise TypeError(f"{self.__name__} is a module, and not callable")

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(_ours(self.__name__)), *children(self.__name__)})


@cache
def _ours(module: str) -> ModuleType:
    source = MODULES[module]
    if isinstance(source, str):
        return import_module(source)
    ours, names = ModuleType(module), source[1:]
    vars(ours).update({name: getattr(import_module(source[0]), name) for name in names}, __all__=list(names))
    return ours


def children(package: str) -> list[str]:
    """The last parts of the names of the modules directly below `package` that have any names here."""
    used = [name for name, source in MODULES.items() if source and name.startswith(f"{package}.")]
    return list(dict.fromkeys(name.removeprefix(f"{package}.").partition(".")[0] for name in used))


def exported_names(module: str) -> list[str]:
    """The exports of a module of `sambaflow`: those of our module, and the modules below."""
    ours = _ours(module)
    public = ((name, getattr(value, "__module__", None)) for name, value in vars(ours).items() if name[0] != "_")
    exported = vars(ours).get("__all__") or [name for name, owner in public if owner == ours.__name__]
    return sorted({*exported, *children(module)})


def _instead(module: str, name: str) -> str:
    """The remedy for an absent `name`: similar names, or else what the module exports."""
    ours, exported = _ours(module), exported_names(module)
    # dir() also lists what a module imports, unless it defines __dir__ itself, as those with all names of torch do.
    known = [*exported, *dir(ours)] if "__dir__" in vars(ours) else exported
    spelled = {word.lower(): word for word in known}
    near = difflib.get_close_matches(name.lower(), spelled, n=3)
    if near:
        return " or ".join(f"{module}.{spelled[word]}" for word in near)
    return f"what {module} has: {', '.join(exported) or 'nothing'}"


class SambaflowFinder(MetaPathFinder, Loader):
    """Finds `sambaflow` and the modules of the table, and makes their facades."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        if fullname in MODULES:
            return ModuleSpec(fullname, self, origin="sambasim", is_package=True)
        owner, _, name = fullname.rpartition(".")
        raise AbsentModuleError(f"sambasim has no {fullname}", remedy=_instead(owner, name))

    def create_module(self, spec: ModuleSpec) -> Facade:
        return Facade(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import our module now, so that an error in it points to the script's import line."""
        module.__doc__ = _ours(module.__name__).__doc__


def install() -> None:
    """Find `sambaflow` here from now on. A second call changes nothing."""
    if not any(isinstance(finder, SambaflowFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, SambaflowFinder())


def enter(folder: Path) -> None:
    """Puts the `sambaflow` that the app gets into `sys.modules`: an installed one, or ours.

    folder: the folder on `sys.path` with the package that calls this, which is replaced"""
    others = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != folder.resolve()]
    installed = PathFinder.find_spec(ROOT, others)
    del sys.modules[ROOT]
    if installed is None or installed.origin is None:  # without origin it is a folder without code, such as data
        install()
        ending.install()
    else:
        print_notice(f"SambaFlow is installed ({installed.origin}), and is used in place of sambasim")
        sys.path[:] = others
    import_module(ROOT)
