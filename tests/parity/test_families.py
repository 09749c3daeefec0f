"""Every family of the model zoo: compiled into a PEF, read back, and one step of it held against eager PyTorch."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sambasim.compiler.capture.step import Example
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.runtime.engine.executor import Executor, outputs_in_order
from sambasim.runtime.values.memory import DeviceMemory
from tests.support.compiled import compile_model, loaded, net_options, outputs_of, step_of
from tests.support.whole import whole_case
from tests.zoo.case import Case, evaluate_loss
from tests.zoo.families import CASES

BATCH_SIZE = 4
SEED = 5

INEXACT_BOUND = 1e-6
"""For a family that is exempt from bits: how far loss and gradients may be off, relative to the largest."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One case: its inputs by name, what the compiler had to say, and the PEF as it was read back."""

    case: Case
    inputs: Mapping[str, Tensor]
    notices: tuple[str, ...]
    path: Path
    program: Program

    def memory(self) -> DeviceMemory:
        return loaded(self.path, self.inputs)[1]

    def evaluate(self, graph: Graph, memory: DeviceMemory, inputs: Mapping[str, Tensor] | None = None) -> list[Tensor]:
        given = inputs or {}
        executable = Executor(graph, self.program, lambda name: given.get(name, memory.tensor(name)))
        return outputs_in_order(graph, outputs_of(executable))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compiled once for all tests of one case, which run one after another."""
    one: Case = request.param
    inputs, loss = one.batch(BATCH_SIZE, seed=1), {"name": one.loss} if one.loss else None
    changes = {"optimizer": {"name": "adamw"}, "training": {"batch_size": BATCH_SIZE}}
    parallel = {"data_parallel": True, "world_size": 2}
    options = net_options(tmp_path_factory.mktemp(one.name), loss=loss, pef_name=one.name, **changes, **parallel)
    made = compile_model(one.module(), Example(inputs, by_keyword=one.loss is None), options)
    return Compiled(one, inputs, made.notices, made.path, read(made.path).program)


BY_DEFAULT = (
    "perceptron", "recommender", "convolutional", "lstm", "wide_gru", "encoder", "translator", "NeuralField", "gpt2",
    "t5",
)  # fmt: skip
FAMILIES = [one if one.name in BY_DEFAULT else whole_case(one) for one in CASES.values()]
EVERY_FAMILY = pytest.mark.parametrize("compiled", FAMILIES, ids=lambda one: one.name, indirect=True)


def _eager(one: Case, seed: int = SEED) -> tuple[nn.Module, Tensor]:
    """The module after one backward, and the loss."""
    model = one.module()
    torch.manual_seed(seed)
    loss = evaluate_loss(one, model, one.batch(BATCH_SIZE, seed=1))
    torch.autograd.backward(loss)
    return model, loss.detach()


@pytest.mark.parametrize("one", FAMILIES, ids=lambda one: one.name)
def test_claims_about_gradients_hold(one: Case) -> None:
    """Which gradients are missing or zero, in float64, where rounding is far below any other."""
    module = one.module().double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = {name: of.double() if of.is_floating_point() else of for name, of in one.batch(4).items()}
        torch.autograd.backward(evaluate_loss(one, module, batch))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert tuple(name for name, gradient in gradients.items() if gradient is None) == one.unused
    norms = {name: float(gradient.norm()) for name, gradient in gradients.items() if gradient is not None}
    zero = tuple(name for name, norm in norms.items() if norm < 1e-12 * max(norms.values()))
    assert zero == one.zero_gradients


@EVERY_FAMILY
def test_loss_gradients_and_buffers_of_one_step_are_those_of_eager(compiled: Compiled) -> None:
    memory = compiled.memory()
    loss, gradients = step_of(compiled.program, memory, SEED)
    model, their_loss = _eager(compiled.case)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    if compiled.case.expected == "exact":
        assert torch.equal(loss, their_loss)
        assert [name for name in theirs if not torch.equal(gradients[name], theirs[name])] == []
    else:
        assert float(loss) == pytest.approx(their_loss.item(), rel=INEXACT_BOUND)
        assert max(_apart(gradients[name], theirs[name]) for name in theirs) <= INEXACT_BOUND
    unused = ", ".join(sorted(compiled.case.unused))
    expected = [f"parameters without a gradient, which training leaves as they are: {unused}"] if unused else []
    assert [notice for notice in compiled.notices if "gradient" in notice] == expected
    buffers = {s.name: s.torch_names[0] for s in compiled.program.symbols.values() if s.kind is SymbolKind.BUFFER}
    assert [b for b, name in buffers.items() if not torch.equal(memory.tensor(b), model.get_buffer(name))] == []


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@EVERY_FAMILY
def test_evaluation_gives_the_outputs_and_the_loss_of_eager(compiled: Compiled) -> None:
    """Outputs have the bits of `model.eval()`. A named loss is there for each sample, and the mean of them is eager's
    to 1e-6; a model's own loss has its bits, and there is a second graph that gives it for a single sample.

    Under no_grad, eager takes other kernels for a Transformer layer and for an LSTM: then it is within 1e-5 of itself.
    """
    one, program, memory = compiled.case, compiled.program, compiled.memory()
    model = one.module().eval()
    loss, *outputs = compiled.evaluate(program.evaluation, memory)
    their_loss = evaluate_loss(one, model, one.batch(BATCH_SIZE, seed=1)).detach()
    their_outputs = _outputs(one, model)
    assert len(outputs) == len(their_outputs) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, their_outputs, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(outputs, _outputs(one, model), rtol=1e-5, atol=1e-5)
    assert program.per_sample_loss == (one.loss is not None)
    if program.per_sample_loss:
        assert loss.shape == (BATCH_SIZE,)
        torch.testing.assert_close(loss.double().mean(), their_loss.double(), rtol=1e-6, atol=0.0)
    else:
        assert torch.equal(loss, their_loss)
        _check_single_samples(compiled, model)


def _check_single_samples(compiled: Compiled, model: nn.Module) -> None:
    assert compiled.program.single is not None
    memory = compiled.memory()
    for index in range(BATCH_SIZE):
        inputs = {name: tensor[index : index + 1].clone() for name, tensor in compiled.inputs.items()}
        loss = compiled.evaluate(compiled.program.single, memory, inputs)[0]
        assert torch.equal(loss, evaluate_loss(compiled.case, model, inputs))


def _outputs(one: Case, model: nn.Module) -> list[Tensor]:
    batch = one.batch(BATCH_SIZE, seed=1)
    result = model(**batch) if one.loss is None else model(*list(batch.values())[:-1])
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return tensors if one.loss else tensors[1:]
