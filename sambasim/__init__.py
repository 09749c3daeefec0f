"""sambasim: the SambaFlow workflow without the hardware.

import sambasim as ss

pef = ss.compile(model, (x, y), loss="cross_entropy", optimizer="adamw", data_parallel=True, world_size=2)
run = ss.run(pef, data=(inputs, labels), replicas=2, epochs=3)
run.load_into(model)

Importing this package imports neither torch nor MPI; its names are loaded at their first use.
"""

import atexit
import importlib
import os
import sys

__version__ = "0.1.0"
TESTED_TORCH = "2.13.0"

__all__ = ["Pef", "Prediction", "Run", "SambasimError", "Simulation", "compile", "load", "predict", "run", "simulate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'sambasim' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module("sambasim.api.names"), name)
    globals()[name] = value
    return value


def leave_script() -> None:
    ends_itself = bool({"sambasim.cli", "sambasim.samba"} & sys.modules.keys())
    if "sambasim.api.ranks" in sys.modules or not ends_itself:
        importlib.import_module("sambasim.api.ranks").leave(ends_itself)


if {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & os.environ.keys():  # a script of mpirun
    importlib.import_module("concurrent.futures.thread")  # which cannot be imported at exit
    atexit.register(leave_script)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
