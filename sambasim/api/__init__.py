"""The Python API: what `import sambasim` gives, see `docs/python.md`. Importing this imports torch."""

from sambasim.api.pef import Pef, compile, load
from sambasim.api.predicting import Prediction, Simulation, predict, simulate
from sambasim.api.training import Run, run
from sambasim.errors import SambasimError

__all__ = ["Pef", "Prediction", "Run", "SambasimError", "Simulation", "compile", "load", "predict", "run", "simulate"]
