from sambasim.api.names import Pef as Pef
from sambasim.api.names import Prediction as Prediction
from sambasim.api.names import Run as Run
from sambasim.api.names import SambasimError as SambasimError
from sambasim.api.names import Simulation as Simulation
from sambasim.api.names import compile as compile
from sambasim.api.names import load as load
from sambasim.api.names import predict as predict
from sambasim.api.names import run as run
from sambasim.api.names import simulate as simulate

__version__: str
TESTED_TORCH: str

def leave_script() -> None: ...
