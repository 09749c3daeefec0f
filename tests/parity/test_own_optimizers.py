"""Optimizers of the user's own: functions that are captured, beside the same functions in an eager loop."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sambasim as ss
from sambasim.compiler.own_optimizer import updates_of
from sambasim.errors import CaptureError, InvariantError, OperatorError, OptionError, SambasimError
from sambasim.ir.graph import Graph, Node, Output, Ref
from sambasim.ir.program import Optimizer, Program
from sambasim.ir.types import PART
from sambasim.ir.verify import verify
from sambasim.optimizers import FORM_OF_OWN
from sambasim.options.training import OptimizerOptions
from sambasim.pef.digests import digests_of_model
from sambasim.runtime.values.operators import entry_of
from tests.parity import refused_updates as refused
from tests.support.whole import whole_case

Update = Callable[..., object]


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, step: int, lr: float = 1e-3, beta2: float = 0.999,
          weight_decay: float = 0.01) -> None:  # fmt: skip
    p.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - 0.9)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.addcdiv_(m, (v.sqrt() / (1 - beta2**step) ** 0.5).add_(1e-8), value=-lr / (1 - 0.9**step))


def lion(p: Tensor, g: Tensor, m: Tensor, *, lr: float = 1e-4, beta1: float = 0.9, weight_decay: float = 0.0) -> None:
    p.mul_(1 - lr * weight_decay).add_(m.lerp(g, 1 - beta1).sign_(), alpha=-lr)
    m.lerp_(g, 1 - 0.99)


def signs(p: Tensor, g: Tensor, *, lr: float = 1e-3) -> None:
    g += 0.1 * p
    p -= lr * g.sign()


def warm(p: Tensor, g: Tensor, m: Tensor, *, step: float, lr: float = 1e-3, warm_up: int = 20) -> None:
    smaller: Any = torch.sym_min
    at = torch.zeros_like(g) + step
    m.mul_(0.9).add_(torch.where(g > lr, g.clamp(max=1.0).tanh(), torch.where(at < 10, lr * 0.1, lr)))
    p.add_(m * smaller(1.0, step / warm_up), alpha=-lr)


def _numbers(function: Update, **given: float) -> tuple[list[str], dict[str, float]]:
    """Its states, and its keywords with what is given of them."""
    arguments = inspect.signature(function).parameters.values()
    states = [one.name for one in arguments if one.kind is one.POSITIONAL_OR_KEYWORD][2:]
    return states, {one.name: given.get(one.name, one.default) for one in arguments if one.kind is one.KEYWORD_ONLY}


def _graph(function: Update) -> Graph:
    (update,) = updates_of(OptimizerOptions(name=f"mine:{function.__name__}"), {f"mine:{function.__name__}": function})
    assert update.graph is not None
    return update.graph


@pytest.mark.parametrize("function", [adamw, lion, signs, warm])
@pytest.mark.usefixtures("one_thread")
def test_slices_are_updated_to_the_bits_of_an_eager_loop(function: Update) -> None:
    states, _ = _numbers(function)
    update: Any = entry_of(Optimizer("mine0", "own", tuple(states), _graph(function))).update
    wanted, held = [torch.randn(192), *(torch.zeros(192) for _ in states)], list[Tensor]()
    held += [tensor.clone() for tensor in wanted]
    for step in range(1, 50):
        gradient, (_, numbers) = torch.randn(192), _numbers(function, step=step, lr=0.01 / step)
        function(wanted[0], gradient.clone(), *wanted[1:], **numbers)
        for part in (slice(0, 64), slice(64, 192)):
            kept = {name: tensor[part] for name, tensor in zip(states, held[1:], strict=True)}
            update(held[0][part], gradient[part], kept, {name: float(value) for name, value in numbers.items()})
    assert all(map(torch.equal, held, wanted))


def _net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 3))


X, Y = torch.linspace(-1, 1, 192).sin().view(32, 6), torch.arange(32) % 3
STEPS, WARMUP = 12, 5


def _eager(function: Update) -> dict[str, Tensor]:
    """The weights after training in two groups, each update of a tensor of a multiple of 64 elements."""
    model, states = _net(), dict[str, list[Tensor]]()
    for step in range(STEPS):
        batch = slice(step % 2 * 16, step % 2 * 16 + 16)
        parts = [(X[batch][replica::2], Y[batch][replica::2]) for replica in range(2)]
        gradients = [torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters())) for x, y in parts]
        for (name, parameter), first, second in zip(model.named_parameters(), *gradients, strict=True):
            padded = torch.zeros(2, -(-parameter.numel() // 64) * 64)
            padded[:, : parameter.numel()] = torch.stack([parameter.detach().flatten(), (first + second).flatten() / 2])
            rate = (1e-2 if parameter.ndim > 1 else 1e-3) * min(1.0, (step + 1) / WARMUP)
            decay = 0.1 if parameter.ndim > 1 else 0.0
            kept, numbers = _numbers(function, step=step + 1, lr=rate, weight_decay=decay)
            function(*padded, *states.setdefault(name, [torch.zeros_like(padded[0]) for _ in kept]), **numbers)
            parameter.data.copy_(padded[0, : parameter.numel()].view_as(parameter))
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("own")
    return ss.compile(
        _net(), (X[:8], Y[:8]), loss="cross_entropy", optimizer=warm, output_folder=folder, check=1
    ).program


CASES = [pytest.param(adamw, 2, id="adamw"), *(whole_case(one, zero) for one in (adamw, lion) for zero in (0, 1, 3))]


@pytest.mark.parametrize(("function", "zero"), CASES)
@pytest.mark.usefixtures("one_thread")
def test_replicas_train_two_groups_to_the_bits_of_an_eager_loop(function: Update, zero: int, tmp_path: Path) -> None:
    others = {"match": ["*.bias", "1.*"], "lr": 1e-3, "weight_decay": 0.0}
    options: dict[str, Any] = {"data_parallel": True, "zero": zero, "lr": 1e-2, "weight_decay": 0.1, "check": 1}
    more: dict[str, Any] = {"set": {"optimizer.groups": [others]}, "output_folder": tmp_path, "quiet": True}
    pef = ss.compile(_net(), (X[:8], Y[:8]), loss="cross_entropy", optimizer=function, **options, **more)
    assert pef.checked is not None
    assert not pef.checked.exceptions
    order = {"data.shuffle": False, "training.schedule.warmup_steps": WARMUP}
    run: dict[str, Any] = {"replicas": 2, "threads": 1, "quiet": True, "set": order}
    ss.run(pef, (X, Y), steps=STEPS // 2, checkpoint_dir=tmp_path / "c", **run)
    saved = tmp_path / "w.safetensors"
    ss.run(pef, (X, Y), steps=STEPS, resume="newest", checkpoint_dir=tmp_path / "c", save=saved, **run)
    found = load_file(saved)
    assert all(torch.equal(found[name], wanted) for name, wanted in _eager(function).items())


REFUSED: list[tuple[Update, type[SambasimError], str]] = [
    (refused.branches, CaptureError, "a number that is not known before a run"),
    (refused.roots, CaptureError, "a number that is not known before a run"),
    (refused.alphas, CaptureError, "a number that is not known before a run"),
    (refused.chooses, CaptureError, r"(?s)where\(\).*at = torch.zeros_like\(gradient\) \+ step"),
    (refused.asks, OperatorError, r"(?s)uses lt of numbers.*at = torch.zeros_like\(gradient\) \+ step"),
    (refused.betas, OptionError, "has other arguments: betas\n"),
    (refused.sizes, OptionError, "depends on the shape of a tensor, or on what earlier"),
    (refused.matrices, OptionError, "depends on the shape of a tensor, or on what earlier"),
    (refused.calls, OptionError, "depends on the shape of a tensor, or on what earlier"),
    (refused.norms, CaptureError, "aten.linalg_vector_norm.default is not element-wise"),
    (refused.items, CaptureError, "aten.max.default is not element-wise"),
    (refused.views, CaptureError, "aten.view_copy.default is not element-wise"),
    (refused.draws, CaptureError, "aten.randn_like.default is not element-wise"),
    (refused.returns, OptionError, "does not change the parameter"),
    (refused.no_rate, OptionError, "has other arguments"),
    (refused.no_default, OptionError, "has other arguments"),
    (refused.switch, OptionError, "has other arguments"),
    (refused.masters, OptionError, "has other arguments"),
    (refused.others, OptionError, "has other arguments"),
]


@pytest.mark.parametrize(("function", "error", "said"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_what_cannot_be_is_refused_at_its_line(function: Update, error: type[SambasimError], said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        _graph(function)
    assert f"refused_updates.py:{function.__code__.co_firstlineno}: def {function.__name__}" in str(raised.value.where)


class Mine(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any: ...


def test_hyperparameters_and_objects_that_there_are_not_are_refused(tmp_path: Path) -> None:
    for given, missing in (({"args": {"beta": 0.5}}, "beta"), ({"weight_decay": 0.5}, "weight_decay")):
        options = OptimizerOptions.model_validate({"name": "mine:signs", **given})
        with pytest.raises(OptionError, match=f"mine:signs takes no {missing}"):
            updates_of(options, {"mine:signs": signs})
    model = _net()
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (signs, {"momentum": 0.5}, "is not for .*:signs, which takes lr, weight_decay, args"),
        (lion, {"set": {"optimizer.betas": [0.9, 0.99]}}, r'(?s)is not for.*set={"optimizer.args.beta1": …}'),
        (partial(lion), {}, "(?s)type partial.*function itself"),
        (signs, {"set": {"optimizer.args.beta": "x"}}, "must be a number"),
        (signs, {"set": {"optimizer.args.lr": 0.5}}, "is the option lr of the optimizer"),
        ("adamw", {"set": {"optimizer.args.lr": 0.5}}, "args.*is not for adamw"),
        ("no.such:thing", {}, "there is no module no"),
        (Mine(model.parameters()), {}, "step of torch.optim.AdamW is not torch's"),
    ]
    for optimizer, more, said in rows:
        more |= {"output_folder": tmp_path, "quiet": True}
        with pytest.raises(OptionError, match=said) as raised:
            ss.compile(model, (X[:8], Y[:8]), loss="cross_entropy", optimizer=optimizer, **more)
    assert FORM_OF_OWN in str(raised.value.remedy)  # of the last


def test_a_foreign_update_is_verified(program: Program) -> None:
    (optimizer,) = program.optimizers
    assert optimizer.update is not None
    assert optimizer.states == ("m",)
    verify(program)
    ref = Ref("parameter")

    def changed(operator: str, *args: Any, writes: str = "parameter", shape: tuple[int, ...] = PART.shape) -> Optimizer:
        node, values = Node("n", operator, args, (), ("v",)), {"v": replace(PART, shape=shape)}
        graph = Graph("mine", ("parameter", "lr"), (node,), (Output("v", writes),), values)
        return replace(optimizer, update=graph)

    bad = [
        (3, changed("aten.cumsum.default", ref, 0)),
        (3, changed("aten.randn_like.default", ref)),
        (2, changed("aten.neg.default", Ref("gradient"))),
        (19, changed("aten.neg.default", ref, shape=(128,))),
        (19, changed("aten.neg.default", ref, writes="gradient")),
        (19, changed("aten.neg.default", ref, writes="elsewhere")),
        (19, changed("number.pow", Ref("lr"), 10**9)),
        (19, changed("number.neg", ref)),
        (19, replace(optimizer, update=replace(optimizer.update, outputs=()))),
        (19, replace(optimizer, update=replace(optimizer.update, inputs=("parameter", "beta9")))),
        (19, replace(optimizer, update=None)),
    ]
    for number, one in bad:
        with pytest.raises(InvariantError, match=rf"\b{number}\b"):
            verify(replace(program, optimizers=(one,)))


def test_another_update_makes_another_model(program: Program) -> None:
    (update,) = program.updates
    others = (), (update,), (replace(update, nodes=update.nodes[1:]),)
    assert len({digests_of_model(program, {}, updates)["operators_sha256"] for updates in others}) == 3
