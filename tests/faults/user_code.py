"""Bad models and data: what a user's file does that cannot be built, captured, trained or read."""

from tests.faults.fault import COMPILE, SAMPLES, TRAIN, Fault, dataset, net

_LOSS = "--set loss.name=net.py:wrong"
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
_RUN = "run --pef net --data net.py:samples"
_DAMAGED = "if i == 11:\n    raise OSError('image 11 is damaged')\nreturn torch.randn(8), i % 3"


def _model(says: str, text: str) -> Fault:
    return Fault(TRAIN, says, text)


USER_CODE: tuple[Fault, ...] = (
    _model(
        "its module raised SyntaxError: '(' was never closed ... where: HERE/net.py: ... return self.linear(x",
        net("return self.linear(x"),
    ),
    _model(
        "the model does not run on the example batch: RuntimeError: mat1 and mat2 shapes cannot be multiplied ... "
        "where: HERE/net.py:17: return self.linear(x) ... "
        "check the model against its inputs, which were float32[4, 8], int64[4]",
        net(init="self.linear = nn.Linear(7, 3)"),
    ),
    Fault(
        COMPILE,
        "does not depend on any parameter that requires a gradient ... check requires_grad, detach()",
        net("return F.cross_entropy(self.linear(x).detach(), y)", parameters="x, y"),
    ),
    Fault(
        f"{COMPILE} {_LOSS}",
        "the loss function returns a float, not a tensor ... without .item()",
        net(before="def wrong(outputs, target):\n    return 3.0\n\n\n"),
    ),
    _model(
        "the model returns None ... where: HERE/net.py:16: def forward(self, x): ... return a loss, (loss, outputs",
        net("self.linear(x)"),
    ),
    _model("the model has no parameters to train ... compile it with --inference", net("return x[:, :3]", init="pass")),
    _model(
        "the model has 2 things that a PEF cannot hold: ... "
        "the parameter linear.weight is on the device meta ... "
        "the parameter linear.bias is on the device meta ... build the model on the CPU",
        net(init="self.linear = nn.Linear(8, 3, device='meta')"),
    ),
    _model(
        "the parameter linear.weight has no shape yet: its module is lazy ... nn.Linear(…) instead of nn.LazyLinear",
        net(init="self.linear = nn.LazyLinear(3)"),
    ),
    _model(
        f"{_STEP}: a shape that depends on the values ... net.py:18: return h - h[h > 0].mean() ... "
        "torch.where(mask, a, b)",
        net("h = self.linear(x)\nreturn h - h[h > 0].mean()"),
    ),
    _model(
        f"{_STEP}: a packed sequence ... net.py:18: packed = nn.utils.rnn.pack_padded_sequence ... on the padded batch",
        net(_PACKED, init=_RNN),
    ),
    _model(
        f"{_STEP}: a trained parameter that is changed in place ... net.py:18: self.linear.weight.clamp_(-1, 1) ... "
        "requires_grad_(False)",
        net("with torch.no_grad():\n    self.linear.weight.clamp_(-1, 1)\nreturn self.linear(x)"),
    ),
    _model(
        f"{_STEP}: random numbers of NumPy ... net.py:20: return ... torch.rand",
        net("return self.linear(x) * np.random.rand()", before="import numpy as np\n\n\n"),
    ),
    _model(
        "error[model]: output 2 of the model is complex64 ... net.py:16: def forward ... torch.view_as_real",
        net("return self.linear(x), torch.fft.rfft(x)"),
    ),
    _model(
        "error[operator]: a PEF cannot hold faults.double.default ... return torch.ops ... PyTorch's own operators",
        net("return torch.ops.faults.double(self.linear(x))", before=_OPERATOR),
    ),
    _model(
        f"{_STEP}, for 4 reasons: ... HERE/net.py:17: x *= 2   (an input that is changed in place) ... "
        "HERE/net.py:19: if h.sum() > 0:   (a branch on the value of a tensor) ... "
        "HERE/net.py:21: if h.max() > 3:   (a branch on the value of a tensor) ... "
        "HERE/net.py:23: return h / h.max().item()   (the value of a tensor as a Python number) ... "
        "try:   make a new tensor ... torch.where(condition, a, b) ... keep it a tensor",
        net(
            "x *= 2\nh = self.linear(x)\nif h.sum() > 0:\n    h = h * 2\nif h.max() > 3:\n    h = h - 1\n"
            "return h / h.max().item()"
        ),
    ),
    _model(
        "the training data has 3 samples, fewer than one batch of 4 ... --batch-size 3 or less",
        net(samples=SAMPLES.replace("16", "3")),
    ),
    _model(
        "the loss cross_entropy needs a target, and a sample gives one value ... give (x, label) in the dataset",
        net(samples="return TensorDataset(torch.randn(16, 8))"),
    ),
    _model(
        "error[data]: forward(x) takes 1 input, and a sample gives 2 inputs and the target of the loss ... "
        "take it in forward() or in a loss function: f(outputs, y, w)",
        net(samples="return TensorDataset(torch.randn(16, 8), torch.zeros(16).long(), torch.ones(16))"),
    ),
    _model(
        "error[data]: forward(x, mask) needs mask, and a sample gives x and the target of the loss ... "
        "where: HERE/net.py:16: def forward(self, x, mask): ... give it in every sample ... "
        'arguments={"mask": 0.1}',
        net("return self.linear(x * mask)", parameters="x, mask"),
    ),
    Fault(
        _RUN + " --metrics m.jsonl --save w.safetensors",
        "sample 11 of HERE/net.py:samples raised OSError: image 11 is damaged ... "
        "where: HERE/net.py:13: raise OSError('image 11 is damaged') ... dataset[11]",
        dataset(_DAMAGED),
        may_leave=("m.jsonl",),
    ),
    Fault(
        _RUN + " --save w.safetensors",
        "the samples hold values that the model cannot take (IndexError: Target ... target goes from ... "
        "and went up to 2 when compiled ... where: the operator aten.nll_loss_forward.default ... "
        "correct the samples, or enlarge the model",
        dataset("return torch.randn(8), 7 + i % 3"),
    ),
    Fault(
        "run --pef pair --emulate-replicas 5",
        "has 16 samples, but one step takes 20: batch 4 × 1 accumulation steps × 5 replicas ... fewer replicas",
    ),
)
