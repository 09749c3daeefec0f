"""The model: not found, not built, not called, or returning what cannot be trained."""

from tests.faults.fault import Fault
from tests.faults.texts import COMPILE, TRAIN, net

_LOSS = "--set loss.name=net.py:wrong"

MODEL: tuple[Fault, ...] = (
    Fault(
        "without a name",
        "compile net.py --set optimizer.name=sgd",
        ("error[option]", 'model.target = "net.py" (from the MODEL argument)', "add the name: net.py:NAME"),
        {"net.py": net()},
    ),
    Fault(
        "no such file",
        TRAIN.replace("net.py:Net", "nett.py:Net"),
        ("error[model]", "there is no file HERE/nett.py", "did you mean HERE/net.py?"),
        {"net.py": net()},
    ),
    Fault(
        "a file that is not Python",
        TRAIN,
        ("its module raised SyntaxError: '(' was never closed", "where: HERE/net.py:", "return self.linear(x"),
        {"net.py": net("return self.linear(x")},
    ),
    Fault(
        "a program that ends itself",
        TRAIN,
        ("its module raised SystemExit: 0", "where: HERE/net.py:", 'under `if __name__ == "__main__":`'),
        {"net.py": f"{net()}\n\nraise SystemExit(0)\n"},
    ),
    Fault(
        "arguments that are missing",
        TRAIN,
        ("Net(width) cannot be called with model.args {}", "argument: 'width'", "--set model.args.NAME=VALUE"),
        {"net.py": net(arguments="width")},
    ),
    Fault(
        "layers that do not fit the samples",
        TRAIN,
        (
            "the model does not run on the example batch: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
            "where: HERE/net.py:17: return self.linear(x)",
            "check the model against its inputs, which were float32[4, 8], int64[4]",
        ),
        {"net.py": net(init="self.linear = nn.Linear(7, 3)")},
    ),
    Fault(
        "a forward that raises",
        TRAIN,
        ("on the example batch: KeyError: 'head'", "where: HERE/net.py:18: raise KeyError('head')", "its inputs"),
        {"net.py": net("h = self.linear(x)\nraise KeyError('head')")},
    ),
    Fault(
        "a normalisation over one sample",
        TRAIN.replace("-b 4", "-b 1"),
        ("Expected more than 1 value per channel when training", "where: HERE/net.py:18: return self.norm"),
        {
            "net.py": net(
                "return self.norm(self.linear(x))", init="self.linear = nn.Linear(8, 3)\nself.norm = nn.BatchNorm1d(3)"
            )
        },
    ),
    Fault(
        "a loss that does not depend on parameters",
        COMPILE,
        ("does not depend on any parameter that requires a gradient", "check requires_grad, detach()"),
        {"net.py": net("return F.cross_entropy(self.linear(x).detach(), y)", parameters="x, y")},
    ),
    Fault(
        "a loss that is no tensor",
        f"{COMPILE} {_LOSS}",
        ("the loss function returns a float, not a tensor", "without .item()"),
        {"net.py": net(before="def wrong(outputs, target):\n    return 3.0\n\n\n")},
    ),
    Fault(
        "nothing returned",
        TRAIN,
        ("the model returns None", "where: HERE/net.py:16: def forward(self, x):", "return a loss, (loss, outputs"),
        {"net.py": net("self.linear(x)")},
    ),
    Fault(
        "no parameters",
        TRAIN,
        ("the model has no parameters to train", "compile it with --inference"),
        {"net.py": net("return x[:, :3]", init="pass")},
    ),
    Fault(
        "parameters on another device",
        TRAIN,
        (
            "the model has 2 things that a PEF cannot hold:",
            "the parameter linear.weight is on the device meta",
            "the parameter linear.bias is on the device meta",
            "build the model on the CPU",
        ),
        {"net.py": net(init="self.linear = nn.Linear(8, 3, device='meta')")},
    ),
    Fault(
        "lazy parameters",
        TRAIN,
        ("the parameter linear.weight has no shape yet: its module is lazy", "nn.Linear(…) instead of nn.LazyLinear"),
        {"net.py": net(init="self.linear = nn.LazyLinear(3)")},
    ),
    Fault(
        "a sparse embedding",
        TRAIN,
        ("the module table is Embedding(sparse=True)", "leave out sparse=True: nn.Embedding(10, 3)"),
        {
            "net.py": net(
                "return self.table((x > 0).long()).mean(1)", init="self.table = nn.Embedding(10, 3, sparse=True)"
            )
        },
    ),
)
