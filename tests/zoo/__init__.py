"""The model zoo: 137 models as people train them, each compiled, run with one and two replicas, and held against eager
PyTorch.

python -m tests.zoo [NAME …] [--package own] [--vision PYTHON] [--jobs 2]
"""

from tests.zoo.case import Case
from tests.zoo.huggingface import HUGGINGFACE
from tests.zoo.own import OWN
from tests.zoo.vision import VISION

ENTRIES: dict[str, Case] = {entry.name: entry for entry in (*HUGGINGFACE, *VISION, *OWN)}
