"""Hyperparameters of a run that are turned on, off and changed between steps, by `hyperparam_dict` and by the options
of the optimizers in `trace_graph`: against plain PyTorch with the same changes, also across checkpoints."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import PefError
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from sambasim.samba.utils.checkpoint import load_checkpoint, save_checkpoint
from tests.samba.harness import Load, LogReg, Made, PefOf, batch_of, equal, plain, same_weights, seeded

pytestmark = pytest.mark.usefixtures("app")

Changes = Sequence[Mapping[str, Any]]
"""What each step is given."""

KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
ON, OFF = {"momentum": 0.9}, {"momentum": 0.0}
STOP: Mapping[str, Any] = {**OFF, "nesterov": False}


def _made(kind: Any = samba.optim.SGD, groups: int = 1, **options: Any) -> Made:
    model = samba.from_torch_model_(seeded(LogReg))
    given: Any = [{"params": [one]} for one in model.parameters()] if groups > 1 else model.parameters()
    return model, kind(given, **{"lr": 0.1, **options})


_two_groups = partial(_made, groups=2)
_clipped = partial(_made, max_grad_norm=0.05)
_adam, _adamw = partial(_made, samba.optim.Adam), partial(_made, samba.optim.AdamW)


class Eagerly:
    """A copy of `model` that plain PyTorch trains, with the hyperparameters that steps were given so far."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = seeded(LogReg)
        own = dict(zip(model.parameters(), self.model.parameters(), strict=True))
        groups = [{**group, "params": [own[one] for one in group["params"]]} for group in optimizer.param_groups]
        self.bound = groups[0].pop("max_grad_norm")
        self.optimizer: Any = KINDS[optimizer.kind]([{**group, "fused": True} for group in groups])

    def step(self, batch: Sequence[Tensor], given: Mapping[str, Any]) -> None:
        numbers = {name: value if name == "nesterov" else _plain_numbers(value) for name, value in given.items()}
        self.bound = numbers.pop("max_grad_norm", self.bound)
        for group in self.optimizer.param_groups:
            group.update(numbers)
        self.optimizer.zero_grad()
        self.model(*map(plain, batch))[0].backward()
        if self.bound is not None:  # as torch does, with a norm in float64
            gradients: Any = [parameter.grad for parameter in self.model.parameters()]
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
            torch._foreach_mul_(gradients, min(1.0, self.bound / (norm + 1e-6)))
        self.optimizer.step()


def _plain_numbers(value: Any) -> Any:
    if value is None:
        return None
    numbers = tuple(map(float, np.asarray(value).flatten()))
    return numbers if len(numbers) > 1 else numbers[0]


def _check(model: nn.Module, optimizer: Any, eagerly: Eagerly) -> None:
    """Weights and states on the host have the bits of PyTorch, and no other states are there."""
    session.to_cpu(model)
    for ours, theirs in zip(model.parameters(), eagerly.model.parameters(), strict=True):
        assert equal(ours, theirs)
        state, expected = optimizer.state.get(ours, {}), eagerly.optimizer.state.get(theirs, {})
        assert state.keys() == {name for name, value in expected.items() if value is not None}
        assert all(equal(state[name], expected[name]) for name in state)


TABLE: dict[str, tuple[Callable[[], Made], Changes]] = {
    "momentum": (_made, [{}, ON, {}, OFF, {}, {"momentum": 0.5}]),
    "momentum from the first step": (_made, [ON, {}, OFF, ON]),
    "dampening": (_made, [{"dampening": 0.5}, ON, {}, OFF, {**ON, "dampening": 0.25}, {"dampening": 0}]),
    "nesterov": (_made, [{}, {**ON, "nesterov": True}, {}, {"nesterov": False}, {"nesterov": True}, STOP]),
    "decay": (_made, [{}, {"weight_decay": 0.1}, ON, {"weight_decay": 0.0}, {"weight_decay": 0.01}]),
    "rates of 0": (_made, [{"lr": 0.0}, ON, {"lr": 0.2}, {"lr": 0.0, **OFF}, {"lr": 0.1}]),
    "tensors and arrays": (
        _made,
        [{"lr": torch.tensor(0.25)}, {"momentum": np.float32(0.5)}, {"lr": np.array([0.125])}, {"momentum": 1},
         {"momentum": np.int64(0)}, {"lr": torch.tensor([[0.5]]), "weight_decay": np.float64(0.1)}],
    ),
    "groups": (_two_groups, [{}, ON, {"lr": 0.2}, OFF, {"dampening": 0.5, **ON}]),
    "clipping": (_clipped, [{}, {"max_grad_norm": None}, {"max_grad_norm": 0.01, **ON}, {"max_grad_norm": math.inf}]),
    "clipping that only steps are given": (_made, [{}, {"max_grad_norm": 0.01}, {}]),
    "adam": (_adam, [{}, {"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"weight_decay": 0.1}, {"betas": [0.9, 0.999]}]),
    "adamw": (
        _adamw,
        [{"betas": np.array([0.75, 0.5])}, {"weight_decay": 0.0}, {"eps": 1.0}, {"lr": 0.0},
         {"betas": torch.tensor([0.5, 0.75]), "weight_decay": 0.5}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("row", TABLE)
def test_each_step_has_the_bits_of_pytorch(row: str, resumes: bool, pef_of: PefOf, tmp_path: Path) -> None:
    """Also if each step is one of a new process, which loads the checkpoint of the last."""
    make, changes = TABLE[row]
    of_pef = _clipped if any("max_grad_norm" in given for given in changes) else make
    pef, (model, optimizer), file = pef_of(of_pef, batch_of()), make(), tmp_path / "net.pt"
    eagerly = Eagerly(model, optimizer)
    trace_graph(model, batch_of(), optimizer, pef=pef)
    for number, given in enumerate(changes):
        session.run(batch_of(number), hyperparam_dict=given)
        eagerly.step(batch_of(number), given)
        if resumes:
            save_checkpoint(file, model, optimizer)
            model, optimizer = make()
            load_checkpoint(file, model, optimizer)
            trace_graph(model, batch_of(), optimizer, pef=pef)
        _check(model, optimizer, eagerly)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_momentum_that_is_turned_on_begins_as_that_of_a_new_optimizer(
    dtype: str, pef_of: PefOf, tmp_path: Path
) -> None:
    pef, found = pef_of(_made, batch_of(), dtype=dtype), []
    model, optimizer = _made()
    trace_graph(model, batch_of(), optimizer, pef=pef)
    for number in range(2):
        session.run(batch_of(number))
    session.to_cpu(model)
    assert optimizer.state_dict()["state"] == {}
    between = copy.deepcopy(model.state_dict())
    session.run(batch_of(2), hyperparam_dict=ON)
    for turned_on in (True, False):
        if not turned_on:
            model, optimizer = _made(momentum=0.9)  # as `run --momentum 0.9` makes it
            model.load_state_dict(between)
            trace_graph(model, batch_of(), optimizer, pef=pef)
            session.run(batch_of(2))
        session.run(batch_of(3))
        session.to_cpu(model)
        states = [state["momentum_buffer"] for state in optimizer.state.values()]
        found.append([*map(plain, (*model.parameters(), *states))])
    assert len(found[0]) == 4
    assert all(map(torch.equal, *found))


def test_momentum_given_between_the_backward_and_its_step_begins_in_that_step(load: Load) -> None:
    model, optimizer = load(_made, batch_of())
    eagerly = Eagerly(model, optimizer)
    for number, given in enumerate([{}, {**ON, "dampening": 0.5}, {}, OFF]):
        session.run(batch_of(number), section_types=["FWD"])
        session.run(section_types=["BCKWD"])
        if number == 1:
            session.to_cpu(model)
            assert not optimizer.state, "the step has begun, and no state"
        session.run(section_types=["OPT"], hyperparam_dict=given)
        eagerly.step(batch_of(number), given)
        _check(model, optimizer, eagerly)


@pytest.mark.parametrize("after_trace", [False, True])
def test_options_of_a_checkpoint_are_those_of_the_app(after_trace: bool, pef_of: PefOf, tmp_path: Path) -> None:
    """So rates that are derived from them decay once. What the app has changed itself, as a scheduler does, is kept."""
    pef, made, file = pef_of(_dropping, batch_of()), _dropping, tmp_path / "net.pt"
    model, optimizer = made()
    trace_graph(model, batch_of(), optimizer, pef=pef)
    optimizer.param_groups[0]["momentum"] = 0.25
    session.run(batch_of(), hyperparam_dict={"lr": 0.05, "weight_decay": 0.5, "momentum": 0.125, "p": 0.0, CHANNELS: 1})
    save_checkpoint(file, model, optimizer)
    model, resumed = made()
    if after_trace:
        trace_graph(model, batch_of(), resumed, pef=pef)
        load_checkpoint(file, model, resumed)
        session.to_device(model)
    else:
        load_checkpoint(file, model, resumed)
        resumed.param_groups[0]["weight_decay"] = 0.0625
        trace_graph(model, batch_of(), resumed, pef=pef)
    names = ("lr", "weight_decay", "momentum")
    weight_decay, momentum = (0.5, 0.0) if after_trace else (0.0625, 0.25)
    assert session.machine is not None
    on_device = session.machine.replica.hyperparameters[0]
    assert [on_device[name] for name in names] == [0.05, weight_decay, momentum]
    assert [resumed.param_groups[0][name] for name in names] == [0.1, 0.0 if after_trace else 0.0625, 0.25]
    _, out = session.run(batch_of())
    assert not plain(out).any(), "the rates of dropouts are kept"


@pytest.mark.parametrize("clips", [False, True])
def test_clipping_is_turned_off_and_not_on_by_the_options_of_a_run(clips: bool, pef_of: PefOf) -> None:
    pef = pef_of(_clipped if clips else _made, batch_of())
    model, optimizer = (_made if clips else _clipped)()
    eagerly = Eagerly(model, optimizer)
    if not clips:
        with pytest.raises(PefError, match="another graph: the optimizer has max_grad_norm, and the PEF does not clip"):
            trace_graph(model, batch_of(), optimizer, pef=pef)
        return
    trace_graph(model, batch_of(), optimizer, pef=pef)
    session.run(batch_of())
    eagerly.step(batch_of(), {})
    _check(model, optimizer, eagerly)


class Dropping(LogReg):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.planes = nn.Dropout(0.5), nn.Dropout2d(0.25)

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        out = self.planes(self.drop(self.lin_layer(inputs)).view(-1, 16, 2, 2)).flatten(1)
        return self.criterion(out, targets), out


def _dropping() -> Made:
    model = samba.from_torch_model_(seeded(Dropping))
    return model, samba.optim.SGD(model.parameters(), lr=0.1)


ELEMENTS, CHANNELS = "dropping__drop__dropout_p", "dropping__planes__dropout2d_p"


def test_dropout_rates_are_those_of_pytorch(load: Load) -> None:
    model, _ = load(_dropping, batch_of())
    eagerly: Any = seeded(Dropping)
    optimizer = torch.optim.SGD(eagerly.parameters(), lr=0.1, fused=True)
    rates: Changes = [
        {}, {"p": 0.0}, {"p": 1.0}, {"p": 0.75}, {ELEMENTS: 0.0}, {CHANNELS: 0.0}, {ELEMENTS: 0.25}, {CHANNELS: 1.0},
        {ELEMENTS: 1.0, CHANNELS: 0.5}, {"p": np.float32(0.5)}, {CHANNELS: torch.tensor(0.25), "lr": 0.5},
    ]  # fmt: skip
    for number, given in enumerate(rates):
        numbers = {name: float(value) for name, value in given.items()}
        eagerly.drop.p = numbers.get(ELEMENTS, numbers.get("p", eagerly.drop.p))
        eagerly.planes.p = numbers.get(CHANNELS, numbers.get("p", eagerly.planes.p))
        optimizer.param_groups[0]["lr"] = numbers.get("lr", 0.1)
        torch.manual_seed(number)
        loss, out = session.run(batch_of(number), hyperparam_dict=given)
        drawn = torch.get_rng_state()
        torch.manual_seed(number)
        expected = eagerly(*map(plain, batch_of(number)))
        assert torch.equal(drawn, torch.get_rng_state()), given
        assert equal(loss, expected[0].detach())
        assert equal(out, expected[1].detach())
        optimizer.zero_grad()
        expected[0].backward()
        optimizer.step()
        session.to_cpu(model)
        assert same_weights(model, eagerly), given


@pytest.mark.parametrize(
    ("given", "findings"),
    [
        ({"p": 0.0}, []),
        ({ELEMENTS: 0, CHANNELS: torch.tensor(0.0), "p": np.float32(0)}, []),
        ({"p": 0.5}, ["AP04: p in hyperparam_dict is 0.5, and this PEF drops nothing: it is left out"]),
        ({"lr": 0.1, "p": 0.0}, ["AP07: session.run is given lr, and this PEF predicts: nothing is trained"]),
        (
            {"betas": (0.9, 0.99), "max_grad_norm": 1.0},
            ["AP07: session.run is given betas, max_grad_norm, and this PEF predicts: nothing is trained"],
        ),
        ({"rate": 1}, ["AP04: hyperparam_dict has rate, which no optimizer of this PEF takes: it is left out"]),
    ],
)
def test_an_inference_pef_takes_rates_of_0(
    given: Mapping[str, Any], findings: list[str], pef_of: PefOf, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = _dropping()
    trace_graph(model, batch_of(), None, pef=pef_of(_predicting, batch_of(), inference=True))
    capsys.readouterr()
    for _ in range(2):
        _, out = session.run(batch_of(), hyperparam_dict=given)
        assert equal(out, model.eval()(*map(plain, batch_of()))[1].detach())
    notices = [line.removeprefix("notice: ") for line in capsys.readouterr().err.splitlines() if line[0] != " "]
    assert notices == findings


def test_a_checkpoint_gives_a_pef_what_it_takes(
    pef_of: PefOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, (model, optimizer) = tmp_path / "net.pt", _dropping()
    trace_graph(model, batch_of(), optimizer, pef=pef_of(_dropping, batch_of()))
    session.run(batch_of(), hyperparam_dict={"lr": 0.05, "p": 0.0})
    save_checkpoint(file, model, optimizer)
    for make, options, told in (
        (_predicting, {"inference": True}, []),
        (_made, {}, ["notice: p of the checkpoint has no effect: this PEF does not take it"]),
    ):
        model = make()[0]
        resumed = samba.optim.SGD(model.parameters(), lr=0.1)
        load_checkpoint(file, model, resumed)
        capsys.readouterr()
        trace_graph(model, batch_of(), resumed, pef=pef_of(make, batch_of(), **options))
        session.run(batch_of())
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("notice")] == told


def _predicting() -> Made:
    return _dropping()[0].eval(), None
