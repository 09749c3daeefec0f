"""Where a model is cut into stages, and that the stages compute what one rank computes that accumulates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.build import Built
from sambasim.compiler.pipeline import PipelineParallel
from sambasim.compiler.stages import _DEEPEST
from sambasim.errors import InvariantError, OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.spec import load_device
from sambasim.ir.dataflow import axis_of, is_view
from sambasim.ir.graph import Argument, Node, SectionKind, with_sections
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.schedule import make
from sambasim.ir.types import GRADIENT_SUFFIX, SymbolKind
from sambasim.ir.verify import Progress, verify
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.values.memory import DeviceMemory, place_inputs, place_weights
from tests.compiler.sharding.test_plan import built_from, example, placed, run_here, seed
from tests.support.compiled import Made, outputs_of
from tests.support.whole import whole_case

MICRO_BATCHES = 4
BUDGET = budget_of(load_device("sn30"))

Batch = dict[str, Tensor]


def layers(width: int, count: int, then: Callable[[Any, Tensor, Tensor], Any], **parts: Any) -> Made:
    return Made(then, layers=nn.ModuleList(nn.Linear(width, width) for _ in range(count)), **parts)


def norms(*, affine: bool = True) -> nn.ModuleList:
    return nn.ModuleList(nn.BatchNorm1d(8, affine=affine) for _ in range(4))


def sharing(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """One layer used in the first and the last stage, a mask, dropout, running statistics and a skip."""
    first = hidden = net.tied(x) * net.frozen
    mask = torch.arange(8).lt(6).to(x.dtype)
    for layer, norm in zip(net.layers, net.norms, strict=True):
        hidden = F.dropout(norm(layer(hidden)).relu(), 0.25, training=net.training) * mask
    return F.mse_loss(net.tied((hidden + first) * net.frozen), target)


def turning(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """What crosses is transposed and then viewed, as its strides allow."""
    first, second = net.layers
    turned = first(x).transpose(0, 1).relu()  # keeps the strides of the transposed view
    return F.mse_loss(second(turned.transpose(0, 1).view(-1, 6)), target.view(-1, 6))


def with_batches(model: nn.Module, *shape: int) -> tuple[Built, list[Batch]]:
    """`model`, captured, and micro-batches with two tensors of `shape`."""
    torch.manual_seed(0)
    batches = [{"x": torch.randn(shape), "target": torch.randn(shape)} for _ in range(MICRO_BATCHES)]
    return built_from(model, x=batches[0]["x"], target=batches[0]["target"])[0], batches


@cache
def shared() -> tuple[Built, list[Batch]]:
    frozen = nn.Parameter(torch.ones(8), requires_grad=False)
    return with_batches(layers(8, 4, sharing, tied=nn.Linear(8, 8), norms=norms(), frozen=frozen), 3, 8)


@cache
def turned() -> tuple[Built, list[Batch]]:
    return with_batches(layers(6, 2, turning), 4, 5, 6)


@cache
def rolled(name: str) -> tuple[Built, list[Batch]]:
    """An example, and micro-batches of its samples in other orders."""
    built, inputs = example(name)
    return built, [{key: one.roll(number, 0) for key, one in inputs.items()} for number in range(MICRO_BATCHES)]


def cut(built: Built, ranks: int, schedule: str = "1f1b") -> Program:
    return PipelineParallel(make(schedule, ranks, MICRO_BATCHES), BUDGET)(built.program)


def accumulated(built: Built, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """By symbol: gradients and buffers of one rank after all micro-batches; and the losses."""
    program = placed(built.program)
    memory = DeviceMemory.private(program)
    place_weights(memory, built.weights)
    executor = Executor(program.step, program, memory.tensor, wanted=program.loss)
    losses = []
    for number, batch in enumerate(batches):
        place_inputs(memory, batch)
        seed(number)
        outputs = outputs_of(executor, tangent_of(program, 1 / len(batches)), accumulate=number > 0)
        losses.append(outputs[program.loss or ""])
    return {"losses": torch.stack(losses)} | kept_in(memory)


def pipelined(built: Built, batches: Sequence[Batch], program: Program) -> dict[str, Tensor]:
    """The same of all ranks of a pipeline, which run in this process."""
    program = placed(program)
    memories, outputs = run_here(program, built.weights, batches)
    found = {"losses": torch.stack([one[program.loss or ""] for one in outputs[-1]])}
    for memory in memories:
        found |= kept_in(memory)
    return found


def kept_in(memory: DeviceMemory) -> dict[str, Tensor]:
    kinds = (SymbolKind.GRADIENT, SymbolKind.BUFFER)
    return {name: memory.tensor(name).clone() for name, one in memory.program.symbols.items() if one.kind in kinds}


def check_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def check_bits(built: Built, batches: Sequence[Batch], ranks: int, schedule: str) -> None:
    check_equal(pipelined(built, batches, cut(built, ranks, schedule)), accumulated(built, batches))


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(2, "gpipe"), (2, "zb-h1"), (4, "1f1b"), whole_case(4, "zb-h1"), (2, "interleaved-1f1b"), whole_case(4, "gpipe")],
)
def test_a_model_that_shares_layers_and_draws_has_the_bits_of_accumulation(ranks: int, schedule: str) -> None:
    check_bits(*shared(), ranks, schedule)


def test_a_message_keeps_its_strides() -> None:
    check_bits(*turned(), 2, "1f1b")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("char_gpt", 2), whole_case("char_gpt", 4), whole_case("resnet", 2), ("resnet", 4), whole_case("digits", 2)],
)
def test_an_example_has_the_bits_of_accumulation(name: str, ranks: int) -> None:
    check_bits(*rolled(name), ranks, "1f1b")


def crossing(program: Program, kind: SectionKind) -> list[Node]:
    """The messages between stages of one pass of the training step."""
    nodes = [node for one in program.step.sections if one.kind is kind for node in program.step.section_nodes(one)]
    return [node for node in nodes if axis_of(node) == PIPELINE and node.operator == "comm.send"]


def test_a_gpt_in_two_stages() -> None:
    """Beside tied weights one activation and one gradient cross, and each rank holds its own parameters only. Gradients
    are complete where they are computed: a view of a product too, at which its group would else wait for the stage."""
    built, _ = example("char_gpt")
    program = cut(built, 2)
    forward, backward = crossing(program, SectionKind.FWD), crossing(program, SectionKind.BCKWD)
    assert len(forward) == len(backward) == 2
    assert any(node.name.startswith("chargpt__tokens__weight") for node in forward)
    training = program.step
    place_of = {name: at for at, node in enumerate(training.nodes) for name in node.results}
    for output in training.outputs:
        if output.symbol.endswith(GRADIENT_SUFFIX):
            product = node = training.nodes[place_of[output.value]]
            while is_view(product):
                (operand,) = product.reads
                product = training.nodes[place_of[operand]]
            assert training.nodes.index(node) - training.nodes.index(product) < 8
    in_stages, whole = placed(program), placed(built.program)
    first, second = (names_of(part, SymbolKind.PARAMETER) for part in of_ranks(in_stages))
    assert first.isdisjoint(second)
    assert first | second == names_of(whole, SymbolKind.PARAMETER)
    assert in_stages.device_bytes < 0.75 * whole.device_bytes


def names_of(program: Program, kind: SymbolKind) -> set[str]:
    return {name for name, symbol in program.symbols.items() if symbol.kind is kind}


def test_a_split_backward_computes_gradients_of_weights_apart() -> None:
    training = cut(example("char_gpt")[0], 2, "zb-h1").step
    later = [node for one in training.sections if one.weights_only for node in training.section_nodes(one)]
    assert sum(node.operator == "aten.mm.default" for node in later) >= 8, "a product for each linear layer"
    assert not any(node.operator == "comm.send" for node in later), "no other stage waits for them"


def fixed(net: Any, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics without weights, a frozen layer, an input that is given out, and a weight that two stages read."""
    hidden = net.frozen(x)
    for layer, norm in zip(net.layers, net.norms, strict=True):
        hidden = norm(layer(hidden)).relu()
    return F.mse_loss(hidden @ net.layers[0].weight, target), x


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_evaluation_reads_statistics_where_training_changes_them(schedule: str) -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    built, batches = with_batches(layers(8, 4, fixed, norms=norms(affine=False), frozen=frozen), 3, 8)
    check_bits(built, batches, 2, schedule)
    first, second = (names_of(part, SymbolKind.BUFFER) for part in of_ranks(placed(cut(built, 2, schedule))))
    assert first.isdisjoint(second)


def long_of_inputs(net: Any, x: Tensor, target: Tensor) -> Tensor:
    hidden = x
    for _ in range(2 * _DEEPEST):
        hidden = hidden.sin()
    first, second = net.layers
    return F.mse_loss(second(first(hidden).relu() + hidden), target)


def test_what_is_computed_from_inputs_alone_is_sent_if_it_is_long() -> None:
    check_bits(*with_batches(layers(4, 2, long_of_inputs), 3, 4), 2, "1f1b")


def bare(net: Any, x: Tensor, target: Tensor) -> Tensor:
    first, second = net.layers
    loss: Tensor = F.mse_loss(second(first(x)), target) + net.offset
    return loss


def test_what_cannot_be_cut_is_refused() -> None:
    built, _ = with_batches(layers(4, 2, bare, offset=nn.Parameter(torch.zeros(()))), 3, 4)
    with pytest.raises(OptionError, match="no operator computes the gradient of offset"):
        cut(built, 2)
    with pytest.raises(OptionError, match="cannot be cut into 5 stages with parameters of their own") as raised:
        cut(turned()[0], 5)
    assert raised.value.remedy == "use fewer --pipeline-stages: at most 2"


def normed_twice(net: Any, x: Tensor, target: Tensor) -> Tensor:
    first, second, third, last = net.layers
    hidden = second(net.norm(first(x)).relu()).relu()
    return F.mse_loss(last(net.norm(third(hidden)).relu()), target)


def test_each_rank_updates_parameters_where_a_view_of_them_is_in_the_stage_before() -> None:
    built, _ = with_batches(layers(8, 4, normed_twice, norm=nn.BatchNorm1d(8, affine=False)), 3, 8)
    assert all(part.groups for part in of_ranks(placed(cut(built, 3))))
    with pytest.raises(OptionError, match="share the buffer"):
        cut(built, 4)


Change: TypeAlias = Callable[[tuple[Node, ...]], tuple[Node, ...]]


def damaged(program: Program, change: Change) -> Program:
    training = program.step
    first, *rest = map(training.section_nodes, training.sections)
    parts = zip(training.sections, [change(first), *rest], strict=True)
    return replace(program, training=with_sections(training, parts))


def with_tag(tag: Argument) -> Change:
    return lambda nodes: (*nodes[:-1], replace(nodes[-1], kwargs=(*nodes[-1].kwargs[:-1], ("tag", tag))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda nodes: nodes[:-1], "nothing sends what"),
        (lambda nodes: (*nodes, replace(nodes[-1], name="twice")), "twice sends 1 values"),
        (lambda nodes: (*nodes[:-1], replace(nodes[-1], args=())), "sends 0 values"),
        (with_tag(1 << 40), "has the tag 1099511627776"),
        (with_tag("x"), "the tag of .* is 'x'"),
    ],
)
def test_a_damaged_message_is_refused(change: Change, said: str) -> None:
    with pytest.raises(InvariantError, match=said):
        verify(damaged(cut(turned()[0], 2), change), Progress.CAPTURED)


def test_a_schedule_of_other_micro_batches_is_refused() -> None:
    program = cut(turned()[0], 2)
    assert program.schedule is not None
    with pytest.raises(InvariantError, match="none of 2 stages and 3 micro-batches"):
        verify(replace(program, schedule=replace(program.schedule, micro_batches=3)), Progress.CAPTURED)
