"""The data: not there, no dataset, or samples that do not go together, when compiling and when running."""

from pathlib import Path

import numpy as np

from tests.faults.fault import Fault
from tests.faults.texts import SAMPLES, TRAIN, dataset, net

_RUN = "run --pef net --data net.py:samples"
_ENDLESS = "class Endless(IterableDataset):\n    def __iter__(self):\n        return iter([])\n\n\n"
_DAMAGED = "if i == {0}:\n    raise OSError('image {0} is damaged')\nreturn torch.randn(8), i % 3"


def _other_names(folder: Path) -> None:
    np.savez(folder / "samples.npz", pixels=np.zeros((16, 8), np.float32), label=np.zeros(16, np.int64))


DATA: tuple[Fault, ...] = (
    Fault(
        "a source that is none",
        "run --pef net --data digts",
        ('data.source = "digts": must be digits, synthetic', "did you mean digits?"),
        pefs=("net",),
    ),
    Fault(
        "no such file",
        TRAIN.replace("net.py:samples", "samples.npz"),
        ("there is no data file HERE/samples.npz", "check the path, or name another: --set data.source="),
        {"net.py": net()},
    ),
    Fault(
        "no samples", TRAIN, ("the training set of HERE/net.py:samples is empty",), {"net.py": net(samples="return []")}
    ),
    Fault(
        "too few samples for a batch",
        TRAIN,
        ("the training data has 3 samples, fewer than one batch of 4", "--batch-size 3 or less"),
        {"net.py": net(samples=SAMPLES.replace("16", "3"))},
    ),
    Fault(
        "a sample that raises",
        TRAIN,
        (
            "sample 2 of HERE/net.py:samples raised OSError: image 2 is damaged",
            "where: HERE/net.py:13: raise OSError('image 2 is damaged')",
            "read it alone in Python: dataset[2]",
        ),
        {"net.py": dataset(_DAMAGED.format(2))},
    ),
    Fault(
        "no target for the loss",
        TRAIN,
        ("the loss cross_entropy needs a target, and a sample gives one value", "give (x, label) in the dataset"),
        {"net.py": net(samples="return TensorDataset(torch.randn(16, 8))")},
    ),
    Fault(
        "fewer values than the model needs",
        TRAIN,
        (
            "error[data]: forward(x, mask) needs mask, and a sample gives x and the target of the loss",
            "where: HERE/net.py:16: def forward(self, x, mask):",
            "give it in every sample",
        ),
        {"net.py": net("return self.linear(x * mask)", parameters="x, mask")},
    ),
    Fault(
        "a name that the model does not take",
        TRAIN,
        ("forward(x) needs x, and a sample gives pixels and the target", "def forward(self, x):", "in every sample"),
        {"net.py": dataset("return {'pixels': torch.randn(8), 'target': 1}")},
    ),
    Fault(
        "a sample that raises, in a run",
        _RUN + " --metrics m.jsonl --save w.safetensors",
        (
            "sample 11 of HERE/net.py:samples raised OSError: image 11 is damaged",
            "where: HERE/net.py:13: raise OSError('image 11 is damaged')",
            "dataset[11]",
        ),
        {"net.py": dataset(_DAMAGED.format(11))},
        pefs=("net",),
        may_leave=("m.jsonl",),
    ),
    Fault(
        "a sample that is no number, in a run",
        _RUN + " --save w.safetensors --metrics m.jsonl",
        (
            "error[numerics]: the loss of step ",
            " is not finite: nan",
            "where: epoch 1, step ",
            "nothing of it was saved",
            "try:   sambasim run --pef net --data net.py:samples --save w.safetensors --metrics m.jsonl",
            " --debug-numerics to see where it begins, or ",
            "--on-nonfinite skip",
        ),
        {"net.py": dataset("return torch.randn(8) / (0.0 if i == 11 else 1.0) * 0.0, i % 3")},
        pefs=("net",),
        may_leave=("m.jsonl",),
    ),
    Fault(
        "labels out of range",
        _RUN + " --save w.safetensors",
        (
            "the samples hold values that the model cannot take (IndexError: Target",
            "target goes from",
            "and went up to 2 when compiled",
            "where: the operator aten.nll_loss_forward.default",
            "correct the samples, or enlarge the model",
        ),
        {"net.py": dataset("return torch.randn(8), 7 + i % 3")},
        pefs=("net",),
    ),
    Fault(
        "too few samples for all replicas",
        "run --pef pair --emulate-replicas 5",
        ("has 16 samples, but one step takes 20: batch 4 × 1 accumulation steps × 5 replicas", "fewer replicas"),
        pefs=("pair",),
    ),
    Fault(
        "too many accumulation steps for the data",
        _RUN + " --grad-accumulation-steps 9",
        ("one step takes 36: batch 4 × 9 accumulation steps × 1 replica", "--grad-accumulation-steps 4 at most"),
        {"net.py": net(samples=SAMPLES)},
        pefs=("net",),
    ),
)
