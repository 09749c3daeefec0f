"""Promise one, for one replica: loss and every gradient equal eager PyTorch's, bit for bit, step after step.

The runtime and a plain PyTorch loop train the same weights on the same samples. Each updates its own parameters, so
one bit that is off in one step shows in all that follow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim.data.datasets import open_source
from sambasim.ir.program import MASTER, Program
from sambasim.ir.types import NORM_BLOCK_ELEMENTS
from sambasim.options.run import RunOptions
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.plan import plan
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import assemble, set_up
from sambasim.runtime.run.training import Trainer
from sambasim.runtime.values.memory import DeviceMemory
from tests.parity.conftest import Variant
from tests.support.compiled import compile_from_options
from tests.support.eager import CONSTANT_RATE, EagerReplica
from tests.support.examples import EXAMPLES, OPTIMIZERS, example_options
from tests.support.whole import whole_case

STEPS = 5


def _options(
    path: Path, *, accumulation: int = 1, schedule: Mapping[str, object] = CONSTANT_RATE, seed: int = 0
) -> RunOptions:
    training = {"steps": STEPS, "accumulation_steps": accumulation, "schedule": dict(schedule), "seed": seed}
    return RunOptions(pef=str(path), overrides={"training": training})


class Ours:
    """One replica, as `sambasim run` trains it at np 1."""

    def __init__(self, path: Path, options: RunOptions) -> None:
        setup = set_up(path, options, single_rank("here"))
        source = open_source(setup.resolved.data, tuple(input_specs(setup.program)))
        team = assemble(setup, [source], RunObserver())
        self.program, self.memory = setup.program, team.memory
        steps = plan(len(source.train), 1, setup.resolved.training)
        self.trainer = Trainer(team.replicas, steps, setup.resolved.training, team.hub)
        self.trainer.begin_epoch(0)

    def regions(self, region: str) -> list[Tensor]:
        return [self.memory.region(group, region) for group in self.program.groups]


def _differing(ours: DeviceMemory, theirs: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in theirs.items() if not torch.equal(ours.tensor(name), tensor)]


def _compare(path: Path, options: RunOptions, factor: Callable[[int], float] = lambda step: 1.0) -> list[float]:
    """STEPS steps, compared after each: loss, gradients, parameters, buffers and learning rates, which are returned."""
    ours, eager = Ours(path, options), EagerReplica(path, options)
    optimizer = eager.optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    before = {name: tensor.clone() for name, tensor in eager.state().items()}
    losses, rates = set(), []
    for step in range(STEPS):
        record = ours.trainer.step(0)
        loss = eager.differentiate(step, eager.resolved.training.accumulation_steps)
        assert [record.lr] == scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
        assert record.loss == loss, f"step {step}"
        assert _differing(ours.memory, eager.gradients()) == [], f"step {step}"
        assert _differing(ours.memory, eager.state()) == [], f"step {step}"
        losses.add(loss)
        rates.append(record.lr)
    assert len(losses) == STEPS, "batches differ"
    assert len(_differing(ours.memory, before)) == len(before), "everything is trained"
    return rates


_MORE = [row for example in EXAMPLES for row in ((example, "adamw", 2, 1), (example, "sgd", 1, 2))]


@pytest.mark.parametrize(
    ("example", "optimizer", "accumulation", "threads"),
    [
        *((example, one, 1, 1) for example in EXAMPLES for one in OPTIMIZERS),
        *((example, "adamw", 3, 1) for example in EXAMPLES),
        *(row if row[0] == "char_gpt" else whole_case(*row) for row in _MORE),
    ],
)
def test_loss_gradients_parameters_and_buffers_are_those_of_eager(
    example: str, optimizer: str, accumulation: int, threads: int, pefs: Mapping[Variant, Path]
) -> None:
    """To accumulate, eager runs `(loss / k).backward()` k times: here the backward starts from 1/k, and all passes but
    one add. (A sum that is divided afterwards has other bits, unless k is a power of two.)"""
    torch.set_num_threads(threads)
    path = pefs[example, optimizer, False]
    _compare(path, _options(path, accumulation=accumulation, seed=7))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_clipping_follows_its_rule_bit_for_bit_and_torch_closely(
    example: str, optimizer: str, pefs: Mapping[Variant, Path]
) -> None:
    """The rule is written out in `_norm`. torch.nn.utils.clip_grad_norm_ takes the norm in float32, in an order of
    its own: the norms, and so the clipped gradients, agree to a relative 1e-6."""
    path = pefs[example, optimizer, True]
    options = _options(path)
    ours, eager = Ours(path, options), EagerReplica(path, options)
    fused = eager.optimizer()
    assert eager.resolved.optimizer is not None
    largest = eager.resolved.optimizer.max_grad_norm
    assert largest is not None
    for step in range(STEPS):
        record = ours.trainer.step(0)
        assert record.loss == eager.differentiate(step)
        gradients = eager.gradients()
        norm = _norm(gradients, ours.program)
        assert record.grad_norm == norm
        assert norm > largest, "otherwise nothing is clipped"
        theirs = {name: nn.Parameter(gradient.clone()) for name, gradient in gradients.items()}
        for parameter in theirs.values():
            parameter.grad = parameter.detach().clone()
        their_norm = torch.nn.utils.clip_grad_norm_(theirs.values(), largest)
        assert math.isclose(norm, their_norm.item(), rel_tol=1e-6)
        for name, gradient in gradients.items():
            gradient.mul_(largest / (norm + 1e-6))
            torch.testing.assert_close(ours.memory.tensor(name), theirs[name].grad, rtol=1e-6, atol=0.0)
        assert _differing(ours.memory, gradients) == [], f"step {step}"
        fused.step()
        assert _differing(ours.memory, eager.state()) == [], f"step {step}"


@pytest.mark.parametrize("dtype", [("dtype=fp16",), ("dtype=bf16", "master_weights=true")])
def test_with_master_weights_clipping_is_computed_in_float32(dtype: Sequence[str], tmp_path: Path) -> None:
    """And of float16 together with the loss scale. Gradients in memory stay as they are."""
    chosen = (*(f"compile.{one}" for one in dtype), "optimizer.lr=0.05", "optimizer.max_grad_norm=0.05")
    cleared = ("optimizer.momentum=", "optimizer.nesterov=", "optimizer.weight_decay=")
    path = compile_from_options(example_options("logistic_regression", tmp_path, *cleared, *chosen)).path
    ours = Ours(path, _options(path))
    masters = [nn.Parameter(parameter.float()) for parameter in ours.regions("parameter")]
    optimizer = torch.optim.SGD(masters, lr=0.05, fused=True)
    for step in range(STEPS):
        record = ours.trainer.step(0)
        assert record.grad_norm is not None
        assert record.grad_norm > 0.05, "otherwise nothing is clipped"
        factor = 0.05 / (record.grad_norm + 1e-6) / (record.loss_scale or 1.0)
        for master, gradient in zip(masters, ours.regions("gradient"), strict=True):
            assert gradient.dtype is not torch.float32
            master.grad = gradient.float() * factor
        optimizer.step()
        for master, found, parameter in zip(masters, ours.regions(MASTER), ours.regions("parameter"), strict=True):
            assert torch.equal(master, found), f"step {step}"
            assert torch.equal(master.to(parameter.dtype), parameter), f"step {step}"


def _norm(gradients: Mapping[str, Tensor], program: Program) -> float:
    """Squares in float64, summed block by block; the blocks added in the order of parameters, not of groups."""
    of_parameter = {
        member.parameter: gradients[member.gradient] for group in program.groups for member in group.members
    }
    in_order = [of_parameter[name].flatten() for name in program.symbols if name in of_parameter]
    blocks = [block for gradient in in_order for block in torch.split(gradient, NORM_BLOCK_ELEMENTS)]
    return math.sqrt(sum(block.double().square().sum().item() for block in blocks))


def test_the_learning_rate_follows_its_schedule_as_under_lambda_lr(pefs: Mapping[Variant, Path]) -> None:
    """The rate that a schedule gives is the rate that the optimizer uses: bit for bit again."""
    path = pefs["digits", "adamw", False]

    def factor(step: int) -> float:
        return (step + 1) / 2 if step < 2 else (1 + math.cos(math.pi * ((step - 2) / (STEPS - 2)))) / 2

    cosine = {"name": "cosine", "warmup_steps": 2, "final_factor": 0.0}
    rates = _compare(path, _options(path, schedule=cosine), factor)
    assert rates == [0.0015, 0.003, 0.003, *rates[3:]]
    assert 0 < rates[4] < rates[3] < 0.003
