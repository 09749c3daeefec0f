"""The import finder that answers for `sambaflow`, and the modules that it gives.

A `Facade` stands for a module of ours under SambaFlow's name. It is not that module itself, which keeps its own name
and place; and it is a package even where ours is a plain file, because only of a package does Python ask the finder
about a name that `from ... import` does not find, and so lets it say more than "cannot import name".
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from sambasim.samba.absent import AbsentName
from sambasim.samba.door.absent import AbsentModuleError, AbsentNameError, what_is_absent, what_there_is
from sambasim.samba.door.table import ABSENT, MODULES, ROOT, children


class Facade(ModuleType):
    """A module of `sambaflow`: what it has is what our module has, and the modules below it."""

    def __getattr__(self, name: str) -> object:
        """Raises AbsentNameError if neither our module nor the table has the name."""
        child = f"{self.__name__}.{name}"
        ours = import_module(MODULES[self.__name__])
        try:
            value: object = getattr(ours, name)
        except AttributeError:
            if child in MODULES:
                return import_module(child)
            if name in ABSENT.get(self.__name__, ()):
                return AbsentName(child, *ABSENT[self.__name__][name])
            if name == "__all__":
                return exported_names(self.__name__)
            raise AbsentNameError(what_is_absent(self.__name__, name), remedy=_instead(self.__name__, name)) from None
        # An object wins over a module of the same name: `samba.session` is the session, wherever its class lives.
        return import_module(child) if isinstance(value, ModuleType) and child in MODULES else value

    def __call__(self, *arguments: object, **options: object) -> object:
        """What the thing does that the module is named after: `samba.lazy_param()` works, whichever of the two was
        imported last. Raises TypeError where there is none, as Python does."""
        value = vars(import_module(MODULES[self.__name__])).get(self.__name__.rpartition(".")[2])
        if not callable(value):
            raise TypeError(f"{self.__name__} is a module, and not callable")
        result: object = value(*arguments, **options)
        return result

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *dir(import_module(MODULES[self.__name__])), *children(self.__name__)})


def exported_names(module: str) -> list[str]:
    """What a module of `sambaflow` exports: what our module does, and the modules below."""
    ours = import_module(MODULES[module])
    exported = vars(ours).get("__all__") or [
        name
        for name, value in vars(ours).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == ours.__name__
    ]
    return sorted({*exported, *children(module)})


def _instead(module: str, name: str) -> str:
    ours = import_module(MODULES[module])
    exported = exported_names(module)
    # Only a module that says itself what it has is taken at its word: any other also has what it imported.
    known = [*exported, *dir(ours)] if "__dir__" in vars(ours) else exported
    return what_there_is(module, name, known, exported)


class DoorFinder(MetaPathFinder, Loader):
    """Finds `sambaflow` and every module below it that the table has, and makes its facade."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a facade; None if the name is not ours to answer for.

        Raises AbsentModuleError if it is, and there is no such module.
        """
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        if fullname in MODULES:
            return ModuleSpec(fullname, self, origin=MODULES[fullname], is_package=True)
        owner, _, name = fullname.rpartition(".")
        raise AbsentModuleError(what_is_absent(owner, name), remedy=_instead(owner, name))

    def create_module(self, spec: ModuleSpec) -> Facade:
        """An empty facade: it asks our module when it is asked itself."""
        return Facade(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import our module now, so that an error in it comes from the script's own import line."""
        ours = import_module(MODULES[module.__name__])
        module.__doc__ = ours.__doc__


def install() -> None:
    """Let this process find `sambaflow` here from now on. A second call changes nothing."""
    if not any(isinstance(finder, DoorFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DoorFinder())
