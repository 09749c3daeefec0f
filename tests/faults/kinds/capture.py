"""What PyTorch runs and a graph cannot hold: each with the user's line, and the way to write it instead."""

from tests.faults.fault import Fault
from tests.faults.texts import TRAIN, net

_STEP = "error[capture]: the training step cannot be captured"
_RNN = "self.rnn = nn.LSTM(1, 3, batch_first=True)"
_PACKED = """lengths = (x > -9).sum(1)
packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(-1), lengths, batch_first=True)
return self.rnn(packed)[1][0][0]"""
_OPERATOR = """@torch.library.custom_op("faults::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return x.clone()


double.register_autograd(lambda context, gradient: gradient * 2)


"""

CAPTURE: tuple[Fault, ...] = (
    Fault(
        "a branch on a value",
        TRAIN,
        (
            f"{_STEP}: a branch on the value of a tensor",
            "where: HERE/net.py:18: if h.sum() > 0:",
            "compute both sides, and choose by torch.where",
        ),
        {"net.py": net("h = self.linear(x)\nif h.sum() > 0:\n    h = h * 2\nreturn h")},
    ),
    Fault(
        ".item()",
        TRAIN,
        (
            f"{_STEP}: the value of a tensor as a Python number",
            "net.py:18: return h / h.max().item()",
            "keep it a tensor",
        ),
        {"net.py": net("h = self.linear(x)\nreturn h / h.max().item()")},
    ),
    Fault(
        "a boolean mask",
        TRAIN,
        (
            f"{_STEP}: a shape that depends on the values",
            "net.py:18: return h - h[h > 0].mean()",
            "torch.where(mask, a, b)",
        ),
        {"net.py": net("h = self.linear(x)\nreturn h - h[h > 0].mean()")},
    ),
    Fault(
        "a packed sequence",
        TRAIN,
        (f"{_STEP}: a packed sequence", "net.py:18: packed = nn.utils.rnn.pack_padded_sequence", "on the padded batch"),
        {"net.py": net(_PACKED, init=_RNN)},
    ),
    Fault(
        "an input changed in place",
        TRAIN,
        (f"{_STEP}: an input that is changed in place", "net.py:17: x *= 2", "x = x * 2 instead of"),
        {"net.py": net("x *= 2\nreturn self.linear(x)")},
    ),
    Fault(
        "a parameter changed in place",
        TRAIN,
        (
            f"{_STEP}: a parameter that is changed in place",
            "net.py:18: self.linear.weight.clamp_(-1, 1)",
            "register_buffer()",
        ),
        {"net.py": net("with torch.no_grad():\n    self.linear.weight.clamp_(-1, 1)\nreturn self.linear(x)")},
    ),
    Fault(
        "activation checkpointing",
        TRAIN,
        (f"{_STEP}: activation checkpointing", "net.py:20: return checkpoint(self.linear, x", "call the block itself"),
        {
            "net.py": net(
                "return checkpoint(self.linear, x, use_reentrant=False)",
                before="from torch.utils.checkpoint import checkpoint\n\n\n",
            )
        },
    ),
    Fault(
        "random numbers of NumPy",
        TRAIN,
        (f"{_STEP}: Python code that depends on the value of a tensor", "net.py:20: return", "torch.rand"),
        {"net.py": net("return self.linear(x) * np.random.rand()", before="import numpy as np\n\n\n")},
    ),
    Fault(
        "complex numbers on the way",
        TRAIN,
        ("error[operator]: a PEF cannot hold aten._fft_r2c.default", "net.py:17: return", "the imaginary part"),
        {"net.py": net("return self.linear(torch.fft.rfft(x).abs())", init="self.linear = nn.Linear(5, 3)")},
    ),
    Fault(
        "an operator of the user's own",
        TRAIN,
        ("error[operator]: a PEF cannot hold faults.double.default", "return torch.ops", "PyTorch's own operators"),
        {"net.py": net("return torch.ops.faults.double(self.linear(x))", before=_OPERATOR)},
    ),
    Fault(
        "several at once",
        TRAIN,
        (
            f"{_STEP}, for 4 reasons:",
            "HERE/net.py:17: x *= 2   (an input that is changed in place)",
            "HERE/net.py:19: if h.sum() > 0:   (a branch on the value of a tensor)",
            "HERE/net.py:21: if h.max() > 3:   (a branch on the value of a tensor)",
            "HERE/net.py:23: return h / h.max().item()   (the value of a tensor as a Python number)",
            "try:   make a new tensor",
            "torch.where(condition, a, b)",
            "keep it a tensor",
        ),
        {
            "net.py": net(
                "x *= 2\nh = self.linear(x)\nif h.sum() > 0:\n    h = h * 2\nif h.max() > 3:\n    h = h - 1\n"
                "return h / h.max().item()"
            )
        },
    ),
)
