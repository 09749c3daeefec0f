"""Every family of the model zoo: compiled into a PEF, read back, and one step of it held against eager PyTorch."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sambasim.compiler.capture.step import Example
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.engine.executor import Executor, outputs_in_order
from sambasim.runtime.values.memory import DeviceMemory
from tests.support.compiled import compile_model, loaded, net_options, outputs_of, step_of
from tests.support.whole import whole_case
from tests.zoo.case import Batch, Case, evaluate_loss
from tests.zoo.families import CASES

BATCH_SIZE = 4
SEED = 5

INEXACT_BOUND = 1e-6
"""For a family that is exempt from bits: how far loss and gradients may be off, relative to the largest."""

BY_DEFAULT = (
    "perceptron", "recommender", "convolutional", "lstm", "encoder", "NeuralField", "gpt2",
)  # fmt: skip
FAMILIES = [one if one.name in BY_DEFAULT else whole_case(one) for one in CASES.values()]


@pytest.mark.parametrize("one", FAMILIES, ids=lambda one: one.name)
def test_a_step_and_an_evaluation_are_those_of_eager(one: Case, tmp_path: Path) -> None:
    inputs, loss = one.batch(BATCH_SIZE, seed=1), {"name": one.loss} if one.loss else None
    changes = {"optimizer": {"name": "adamw"}, "training": {"batch_size": BATCH_SIZE}}
    parallel = {"data_parallel": True, "world_size": 2}
    options = net_options(tmp_path, loss=loss, pef_name=one.name, **changes, **parallel)
    made = compile_model(one.module(), Example(inputs, by_keyword=one.loss is None), options)
    unused = ", ".join(sorted(one.unused))
    expected = [f"parameters without a gradient, which training leaves as they are: {unused}"] if unused else []
    assert [notice for notice in made.notices if "gradient" in notice] == expected
    _check_step(one, *loaded(made.path, inputs))
    _check_evaluation(one, *loaded(made.path, inputs))


def _check_step(one: Case, program: Program, memory: DeviceMemory) -> None:
    """Its loss, gradients and buffers."""
    loss, gradients = step_of(program, memory, SEED)
    model = one.module()
    torch.manual_seed(SEED)
    their_loss = evaluate_loss(one, model, one.batch(BATCH_SIZE, seed=1))
    torch.autograd.backward(their_loss)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    if one.expected == "exact":
        assert torch.equal(loss, their_loss.detach())
        assert [name for name in theirs if not torch.equal(gradients[name], theirs[name])] == []
    else:
        assert float(loss) == pytest.approx(their_loss.item(), rel=INEXACT_BOUND)
        assert max(_apart(gradients[name], theirs[name]) for name in theirs) <= INEXACT_BOUND
    buffers = {s.name: s.torch_names[0] for s in program.symbols.values() if s.kind is SymbolKind.BUFFER}
    assert [b for b, name in buffers.items() if not torch.equal(memory.tensor(b), model.get_buffer(name))] == []


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _check_evaluation(one: Case, program: Program, memory: DeviceMemory) -> None:
    """Outputs have the bits of `model.eval()`. A named loss is there for each sample, and the mean of them is eager's
    to 1e-6; a model's own loss has its bits, and there is a second graph that gives it for a single sample.

    Under no_grad, eager takes other kernels for a Transformer layer and for an LSTM: then it is within 1e-5 of itself.
    """

    def evaluated(graph: Graph, given: Batch) -> list[Tensor]:
        executable = Executor(graph, program, lambda name: given.get(name, memory.tensor(name)))
        return outputs_in_order(graph, outputs_of(executable))

    model, batch = one.module().eval(), one.batch(BATCH_SIZE, seed=1)
    loss, *outputs = evaluated(program.evaluation, {})
    their_loss = evaluate_loss(one, model, batch).detach()
    their_outputs = _outputs(one, model)
    assert len(outputs) == len(their_outputs) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, their_outputs, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(outputs, _outputs(one, model), rtol=1e-5, atol=1e-5)
    assert program.per_sample_loss == (one.loss is not None)
    if program.per_sample_loss:
        assert loss.shape == (BATCH_SIZE,)
        torch.testing.assert_close(loss.double().mean(), their_loss.double(), rtol=1e-6, atol=0.0)
        return
    assert torch.equal(loss, their_loss)
    assert program.single is not None
    for index in range(BATCH_SIZE):
        sample = {name: tensor[index : index + 1].clone() for name, tensor in batch.items()}
        assert torch.equal(evaluated(program.single, sample)[0], evaluate_loss(one, model, sample))


def _outputs(one: Case, model: nn.Module) -> list[Tensor]:
    batch = one.batch(BATCH_SIZE, seed=1)
    result = model(**batch) if one.loss is None else model(*list(batch.values())[:-1])
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return tensors if one.loss else tensors[1:]
