"""The user's files that rows are made of: one small sound model with its data, and what is changed in it."""

from textwrap import indent

_IMPORTS = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset


"""

SAMPLES = "return TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)"
"""What the function `samples` of `net` does: 16 samples of 8 numbers, each with a class from 0 to 2."""

COMPILE = "compile net.py:Net --set data.source=net.py:samples --set optimizer.name=sgd -b 4"
NAMED_LOSS = "--set loss.name=cross_entropy"
TRAIN = f"{COMPILE} {NAMED_LOSS}"
"""The command line with which `net()`, unchanged, becomes a PEF."""


def net(
    forward: str = "return self.linear(x)",
    *,
    init: str = "self.linear = nn.Linear(8, 3)",
    parameters: str = "x",
    samples: str = SAMPLES,
    before: str = "",
) -> str:
    """The text of net.py: `samples`, and the class `Net`; `forward` takes `parameters`.

    `before` stands between the imports and the rest.
    """
    return (
        f"{_IMPORTS}{before}"
        f"def samples():\n{indent(samples, ' ' * 4)}\n\n\n"
        f"class Net(nn.Module):\n"
        "    def __init__(self):\n"
        f"        super().__init__()\n{indent(init, ' ' * 8)}\n\n"
        f"    def forward(self{', ' + parameters if parameters else ''}):\n{indent(forward, ' ' * 8)}\n"
    )


def dataset(getitem: str, length: int = 16) -> str:
    """The text of net.py whose data are `length` samples, of which `getitem` reads sample `i`."""
    before = (
        f"class Samples(Dataset):\n    def __len__(self):\n        return {length}\n\n"
        f"    def __getitem__(self, i):\n{indent(getitem, ' ' * 8)}\n\n\n"
    )
    return net(samples="return Samples()", before=before)
