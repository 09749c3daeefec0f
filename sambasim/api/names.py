"""What `import sambasim` gives, see `docs/python.md`. Importing this imports torch."""

from sambasim.api.jobs import Prediction, Run, Simulation, predict, run, simulate
from sambasim.api.pef import Pef, compile, load
from sambasim.errors import SambasimError

__all__ = ["Pef", "Prediction", "Run", "SambasimError", "Simulation", "compile", "load", "predict", "run", "simulate"]
