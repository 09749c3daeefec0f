"""The data: not there, no dataset, or samples that do not go together, when compiling and when running."""

from pathlib import Path

import numpy as np

from tests.faults.fault import Fault
from tests.faults.texts import COMPILE, NAMED_LOSS, SAMPLES, TRAIN, dataset, net

_RUN = "run --pef net --data net.py:samples"
_ENDLESS = "class Endless(IterableDataset):\n    def __iter__(self):\n        return iter([])\n\n\n"
_DAMAGED = "if i == {0}:\n    raise OSError('image {0} is damaged')\nreturn torch.randn(8), i % 3"


def _other_names(folder: Path) -> None:
    np.savez(folder / "samples.npz", pixels=np.zeros((16, 8), np.float32), label=np.zeros(16, np.int64))


DATA: tuple[Fault, ...] = (
    Fault(
        "no source",
        f"compile net.py:Net --set optimizer.name=sgd {NAMED_LOSS}",
        2,
        ("error[data]: no data source is named", "--set data.source=module:function, or FILE.npz, or synthetic"),
        {"net.py": net()},
    ),
    Fault(
        "a source that is none",
        "run --pef net --data digts",
        2,
        ('data.source = "digts": must be digits, synthetic', "did you mean digits?"),
        pefs=("net",),
    ),
    Fault(
        "no such file",
        TRAIN.replace("net.py:samples", "samples.npz"),
        2,
        ("there is no data file HERE/samples.npz", "check the path, or name another: --set data.source="),
        {"net.py": net()},
    ),
    Fault(
        "a file that is no archive",
        "run --pef net --data samples.npz",
        2,
        ("the data file cannot be read", "where: HERE/samples.npz", "write it with numpy.savez"),
        {"samples.npz": "hello"},
        pefs=("net",),
    ),
    Fault(
        "arrays of other names",
        "run --pef net --data samples.npz",
        2,
        (
            "the data file lacks x, target: it holds pixels, label",
            "HERE/samples.npz",
            "name the arrays as the inputs",
        ),
        pefs=("net",),
        prepare=_other_names,
    ),
    Fault(
        "synthetic data without inputs",
        f"{COMPILE.replace('net.py:samples', 'synthetic')} {NAMED_LOSS}",
        2,
        ("synthetic data needs the inputs of one sample", "--set 'data.inputs={x ="),
        {"net.py": net()},
    ),
    Fault(
        "arguments that the function does not take",
        f"{TRAIN} --set data.args.root=images",
        2,
        ("samples() cannot be called with data.args {'root': 'images'}", "leave out data.args.root"),
        {"net.py": net()},
    ),
    Fault(
        "no samples",
        TRAIN,
        2,
        ("the training set of HERE/net.py:samples is empty",),
        {"net.py": net(samples="return []")},
    ),
    Fault(
        "an iterable dataset",
        TRAIN,
        2,
        ("gave Endless, an IterableDataset, which cannot be shared out among replicas", "one with __len__ and"),
        {"net.py": net(samples="return Endless()", before=_ENDLESS)},
    ),
    Fault(
        "tensors without a dataset",
        TRAIN,
        2,
        ("gave a tuple of 2 tensors, which is no dataset", "return torch.utils.data.TensorDataset(*tensors)"),
        {"net.py": net(samples="return torch.randn(16, 8), torch.arange(16) % 3")},
    ),
    Fault(
        "too few samples for a batch",
        TRAIN,
        2,
        ("the training data has 3 samples, fewer than one batch of 4", "--batch-size 3 or less"),
        {"net.py": net(samples=SAMPLES.replace("16", "3"))},
    ),
    Fault(
        "None in a sample",
        TRAIN,
        2,
        ("sample 0 of HERE/net.py:samples gives None for value 1", "give tensors and numbers"),
        {"net.py": net(samples="return [(torch.randn(8), None)] * 16")},
    ),
    Fault(
        "a sample that raises",
        TRAIN,
        2,
        (
            "sample 2 of HERE/net.py:samples raised OSError: image 2 is damaged",
            "where: HERE/net.py:13: raise OSError('image 2 is damaged')",
            "read it alone in Python: dataset[2]",
        ),
        {"net.py": dataset(_DAMAGED.format(2))},
    ),
    Fault(
        "shapes that vary",
        TRAIN,
        2,
        (
            "sample 1 of HERE/net.py:samples gives float32[9] for value 0, and sample 0",
            "gives float32[8]",
            "pad, crop or convert",
        ),
        {"net.py": dataset("return torch.randn(8 + i % 2), i % 3")},
    ),
    Fault(
        "no target for the loss",
        TRAIN,
        2,
        ("the loss cross_entropy needs a target, and a sample gives one value", "give (x, label) in the dataset"),
        {"net.py": net(samples="return TensorDataset(torch.randn(16, 8))")},
    ),
    Fault(
        "fewer values than the model needs",
        TRAIN,
        2,
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
        2,
        ("forward(x) needs x, and a sample gives pixels and the target", "def forward(self, x):", "in every sample"),
        {"net.py": dataset("return {'pixels': torch.randn(8), 'target': 1}")},
    ),
    Fault(
        "a sample that raises, in a run",
        _RUN + " --metrics m.jsonl --save w.safetensors",
        2,
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
        "a sample that ends the program",
        _RUN + " --metrics m.jsonl --save w.safetensors",
        2,
        ("sample 11 of HERE/net.py:samples raised SystemExit: 0", "where: HERE/net.py:13: raise SystemExit(0)"),
        {"net.py": dataset("if i == 11:\n    raise SystemExit(0)\nreturn torch.randn(8), i % 3")},
        pefs=("net",),
        may_leave=("m.jsonl",),
    ),
    Fault(
        "a sample that raises, in a worker process",
        _RUN + " --workers 1",
        2,
        ("sample 11 of HERE/net.py:samples raised OSError: image 11 is damaged", "net.py:13: raise OSError"),
        {"net.py": dataset(_DAMAGED.format(11))},
        pefs=("net",),
    ),
    Fault(
        "a worker process that ends itself",
        _RUN + " --workers 2",
        2,
        ("a worker process that reads HERE/net.py:samples died", "--workers 0"),
        {"net.py": dataset("if i == 11:\n    import os\n    os._exit(3)\nreturn torch.randn(8), i % 3")},
        pefs=("net",),
    ),
    Fault(
        "samples of another shape than the PEF's",
        _RUN,
        2,
        ("input x is float32[4, 9], and the PEF takes float32[4, 8]", "make the samples fit, or compile again"),
        {"net.py": dataset("return torch.randn(9), i % 3")},
        pefs=("net",),
    ),
    Fault(
        "a sample that is no number, in a run",
        _RUN + " --save w.safetensors --metrics m.jsonl",
        2,
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
        "no sample that is a number, and steps that are skipped",
        _RUN + " --on-nonfinite skip --save w.safetensors",
        2,
        (
            "error[numerics]: nothing was trained: the losses of all ",
            " steps were not finite, and the steps were skipped",
            " --debug-numerics to see where it begins",
        ),
        {"net.py": dataset("return torch.randn(8) / 0.0 * 0.0, i % 3")},
        pefs=("net",),
    ),
    Fault(
        "a sample that is no number, looked for",
        _RUN + " --debug-numerics --save w.safetensors",
        2,
        (
            "error[numerics]: the loss is not finite on replica 0, step ",
            "the input x of the batch of replica 0 holds nan (sample 11): 8 nan of 32 elements",
            "correct or leave out such samples",
        ),
        {"net.py": dataset("return torch.randn(8) / (0.0 if i == 11 else 1.0) * 0.0, i % 3")},
        pefs=("net",),
    ),
    Fault(
        "labels out of range",
        _RUN + " --save w.safetensors",
        2,
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
        2,
        ("has 16 samples, but one step takes 20: batch 4 × 1 accumulation steps × 5 replicas", "fewer replicas"),
        pefs=("pair",),
    ),
    Fault(
        "too many accumulation steps for the data",
        _RUN + " --grad-accumulation-steps 9",
        2,
        ("one step takes 36: batch 4 × 9 accumulation steps × 1 replica", "--grad-accumulation-steps 4 at most"),
        {"net.py": net(samples=SAMPLES)},
        pefs=("net",),
    ),
)
