from sambasim.api import Pef as Pef
from sambasim.api import Prediction as Prediction
from sambasim.api import Run as Run
from sambasim.api import SambasimError as SambasimError
from sambasim.api import Simulation as Simulation
from sambasim.api import compile as compile
from sambasim.api import load as load
from sambasim.api import predict as predict
from sambasim.api import run as run
from sambasim.api import simulate as simulate

__version__: str
