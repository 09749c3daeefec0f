"""sambasim: the SambaFlow workflow without the hardware.

import sambasim as ss

pef = ss.compile(model, (x, y), loss="cross_entropy", optimizer="adamw", data_parallel=True, world_size=2)
run = ss.run(pef, data=(inputs, labels), replicas=2, epochs=3)
run.load_into(model)

Importing this package imports neither torch nor MPI; its names are loaded at their first use.
"""

import importlib

__version__ = "0.1.0"

__all__ = ["Pef", "Prediction", "Run", "SambasimError", "Simulation", "compile", "load", "predict", "run", "simulate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'sambasim' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module("sambasim.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
