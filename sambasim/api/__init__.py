"""The Python API: what `import sambasim` gives, see `docs/python.md`. Importing this imports torch.

`pef` compiles, from what `given` makes of a script's tensors, loss and optimizer; `jobs` trains and predicts; `ranks`
has the ranks of the script, one or those of mpirun, and words errors for Python.
"""

from sambasim.api.jobs import Prediction, Run, Simulation, predict, run, simulate
from sambasim.api.pef import Pef, compile, load
from sambasim.errors import SambasimError

__all__ = ["Pef", "Prediction", "Run", "SambasimError", "Simulation", "compile", "load", "predict", "run", "simulate"]
