"""Which parameters are cut, and that a cut program computes the gradients of the whole one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.build import Built
from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import capture_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.compiler.passes import Place
from sambasim.compiler.sharding.plan import find_plan, propagate
from sambasim.compiler.sharding.rules import RULES
from sambasim.compiler.sharding.sharder import Layout, Sharder, cut
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.compiler.update import AttachOptimizers, Update
from sambasim.errors import DataError, OptionError
from sambasim.ir.mesh import PIPELINE, replica_mesh
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import verify
from sambasim.options.compile import compile_options
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.transports.connect import connect_here
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, joined, place_inputs, place_weights
from tests.support.compiled import Made
from tests.support.examples import example_options
from tests.support.whole import whole_case


def linears(*names: str, size: tuple[int, int] = (16, 16), **how: Any) -> dict[str, nn.Module]:
    return {name: nn.Linear(*size, **how) for name in names}


def gated(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """As in Llama: separate query, key and value, and a gated feed-forward layer without biases."""
    q, k, v = (part(x).view(4, 6, 4, 4).transpose(1, 2) for part in (net.q, net.k, net.v))
    x = net.norm(x + net.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 6, 16)))
    return F.mse_loss(x + net.down(F.silu(net.gate(x)) * net.up(x)), target)


def masked(shape: tuple[int, ...], dropout: float = 0.0) -> nn.Module:
    """Attention with a mask for all heads, or one for each; with dropout, PyTorch computes it by products."""

    def then(net: Any, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (one.view(4, 6, 4, 4).transpose(1, 2) for one in net.qkv(x).split(16, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=net.mask, dropout_p=dropout)
        return F.mse_loss(net.o(mixed.transpose(1, 2).reshape(4, 6, 16)), target)

    return Made(then, qkv=nn.Linear(16, 48), o=nn.Linear(16, 16), mask=torch.rand(shape) > 0.3)


def grouped(query: int, key: int) -> nn.Module:
    """Attention whose key heads serve several query heads, and a feed-forward layer."""

    def then(net: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (net.q, net.k, net.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=query > key)
        x = x + net.o(mixed.transpose(1, 2).flatten(2))
        outputs: Tensor = x + net.down(net.up(x).relu())
        return outputs

    parts = linears("k", "v", size=(16, 4 * key)) | linears("o", size=(4 * query, 16))
    return Made(then, q=nn.Linear(16, 4 * query), **parts, up=nn.Linear(16, 32), down=nn.Linear(32, 16))


def in_a_row(net: Any, x: Tensor, target: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return F.mse_loss(x, target)


def traps(net: Any, words: Tensor, target: Tensor) -> Tensor:
    """What rules once got wrong: a number added to a sum over ranks, joined sums, GLU, shuffled channels, a table that
    scales gradients by frequency, and two losses of one target."""
    hidden = net.up(net.words(words)).relu()
    x = torch.cat([net.left(hidden) + 1.0, net.right(hidden)], -1)
    x = net.down(F.glu(net.gate(x), -1))
    x = x + net.narrow(F.channel_shuffle(net.wide(x.view(-1, 1, 4, 4)), 2)).reshape(x.shape)
    logits, classes = net.head(x).flatten(0, 1), target.flatten()
    return F.cross_entropy(logits, classes, ignore_index=3) + F.cross_entropy(logits, classes)


@cache
def trapped() -> tuple[Built, dict[str, Tensor]]:
    torch.manual_seed(0)
    words, target = torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6))
    words[:, 0], words[:, 1], target[0] = 0, 8, 3  # the first word of each part, and an ignored class
    parts = linears("left", "right", size=(16, 8), bias=False) | linears("down", "head")
    pictures = {"wide": nn.Conv2d(1, 8, 1), "narrow": nn.Conv2d(8, 1, 1, bias=False)}
    table = nn.Embedding(16, 8, scale_grad_by_freq=True)
    net = Made(traps, words=table, up=nn.Linear(8, 16), gate=nn.Linear(16, 32), **parts, **pictures)
    return built_from(net, words=words, target=target)


@cache
def example(name: str) -> tuple[Built, dict[str, Tensor]]:
    """The captured example called `name`, and a batch."""
    options = example_options(name, Path())
    model = build_model(options)
    batch = example_batch(model, options)
    return capture_model(model, batch, options), dict(batch.inputs)


def built_from(model: nn.Module, *, quick: bool = False, **inputs: Tensor) -> tuple[Built, dict[str, Tensor]]:
    options = compile_options(None, "net:Net", ["optimizer.name=sgd"], {})
    return capture_model(model, Example(inputs, by_keyword=True), options, quick=quick), dict(inputs)


def seed(number: int) -> None:
    torch.manual_seed(100 + number)


def placed(program: Program) -> Program:
    optimized = Place()(AttachOptimizers((Update("sgd", {"lr": 0.1}),))(program))
    verify(optimized)
    return optimized


def run_here(
    program: Program, weights: Mapping[str, Tensor], batches: Sequence[Mapping[str, Tensor]]
) -> tuple[list[DeviceMemory], list[list[dict[str, Tensor]]]]:
    """One training pass of all ranks of a replica, in this process: the memory of each, and what each returns, by
    micro-batch."""
    mesh, stages = replica_mesh(program.mesh), of_ranks(program)
    programs = [stages[mesh.coordinate(rank, PIPELINE)] for rank in range(mesh.world_size)]
    memories, passes = [DeviceMemory.private(one) for one in programs], []
    transports = connect_here(memories, mesh)
    for rank, (own, memory, transport) in enumerate(zip(programs, memories, transports, strict=True)):
        place_weights(memory, weights, mesh.coordinates(rank))
        if program.schedule is None:
            place_inputs(memory, batches[0])
        executor = Executor(own.step, own, memory.tensor, wanted=own.loss, transport=transport)
        passes.append(executor.run(tangent_of(own, 1 / len(batches)), batches, seed))
    return memories, run_together(passes, transports[0].hub)


def gradients(program: Program, built: Built, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole gradients of one pass."""
    program = placed(program)
    memories, _ = run_here(program, built.weights, [inputs])
    found = {}
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.GRADIENT:
            parts = [memory.tensor(symbol.name) for memory in memories]
            assert symbol.cuts or all(torch.equal(part, parts[0]) for part in parts), symbol.name
            found[symbol.name] = joined(parts, symbol.cuts).clone()
    return found


def activations(model: nn.Module, *, quick: bool = False) -> tuple[Built, dict[str, Tensor]]:
    torch.manual_seed(0)
    return built_from(model, quick=quick, x=torch.randn(4, 6, 16), target=torch.randn(4, 6, 16))


def check_gradients(built: Built, inputs: dict[str, Tensor], ranks: int) -> None:
    check_gradients_of(TensorParallel(ranks)(built.program), built, inputs)


def check_gradients_of(cut: Program, built: Built, inputs: dict[str, Tensor]) -> None:
    whole = gradients(built.program, built, inputs)
    in_parts = gradients(cut, built, inputs)
    assert in_parts.keys() == whole.keys()
    largest = max(float(one.norm()) for one in whole.values())
    for name, right in whole.items():
        distance, size = float((in_parts[name] - right).norm()), float(right.norm())
        # A bias before a normalization has no gradient but rounding.
        assert distance <= (1e-5 * size if size > 1e-6 * largest else 1e-6 * largest), name


WITHOUT_RULE: Mapping[str, set[str]] = {
    "char_gpt": {"arange.default"},
    "digits": {"_native_batch_norm_legit_no_training.default"},
    "resnet": {"_native_batch_norm_legit_no_training.default"},
    "lstm_classifier": {"mkldnn_rnn_layer.default", "mkldnn_rnn_layer_backward.default", "zeros.default"},
}
"""By example, the operators that have no rule, which every rank computes whole: batch norm is that of evaluation."""


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_a_cut_example_computes_the_gradients_of_the_whole_one(name: str) -> None:
    built, inputs = example(name)
    without = {node.operator for graph in built.program.graphs for node in graph.nodes} - RULES.keys()
    assert {one.removeprefix("aten.") for one in without} == WITHOUT_RULE[name]
    check_gradients(built, inputs, 2)


@pytest.mark.parametrize("ranks", [whole_case(2), 4])
def test_separate_queries_and_gates_are_cut_together(ranks: int) -> None:
    parts = linears("q", "k", "v", "o", bias=False) | linears("gate", "up", size=(16, 32))
    built, inputs = activations(Made(gated, **parts, down=nn.Linear(32, 16), norm=nn.LayerNorm(16)))
    columns = ("q__weight", "k__weight", "v__weight", "gate__weight", "up__weight", "gate__bias", "up__bias")
    assert plan_of(built, ranks) == dict.fromkeys(columns, cut(0)) | {"o__weight": cut(1), "down__weight": cut(1)}
    check_gradients(built, inputs, ranks)


@pytest.mark.parametrize(
    ("shape", "dropout"), [((6, 6), 0.0), ((4, 1, 6, 6), 0.0), ((1, 4, 6, 6), 0.0), ((4, 1, 6, 6), 0.2)]
)
def test_attention_with_a_mask_is_cut_by_heads(shape: tuple[int, ...], dropout: float) -> None:
    torch.manual_seed(0)
    built, inputs = activations(masked(shape, dropout))
    assert plan_of(built, 2) == {"qkv__weight": cut(0, 3), "qkv__bias": cut(0, 3), "o__weight": cut(1)}
    check_gradients(built, inputs, 2)


def test_what_mixes_parts_is_computed_whole() -> None:
    built, inputs = trapped()
    assert {"words__weight", "head__weight", "up__weight"} <= plan_of(built, 2).keys()
    check_gradients(built, inputs, 2)
    program = TensorParallel(2)(built.program)
    for name in ("words", "target"):
        wrong = inputs[name].clone()
        wrong[1, 2] = 99
        with pytest.raises(DataError, match=f"{name} goes from"):  # of no rank
            gradients(program, built, inputs | {name: wrong})


def plan_of(built: Built, ranks: int) -> dict[str, Layout]:
    plan = find_plan(built.program, ranks)
    return {name.partition("__")[2]: layout for name, layout in plan.layouts.items()}


def test_a_gpt_is_cut_as_in_megatron() -> None:
    built, _ = example("char_gpt")
    of_block = {
        "attention__qkv__weight": cut(0, 3), "attention__qkv__bias": cut(0, 3), "attention__proj__weight": cut(1),
        "mlp__0__weight": cut(0), "mlp__0__bias": cut(0), "mlp__2__weight": cut(1),
    }  # fmt: skip
    blocks = {f"blocks__{block}__{name}": layout for block in range(2) for name, layout in of_block.items()}
    assert plan_of(built, 2) == {"tokens__weight": cut(0), "positions__weight": cut(0), **blocks}
    for_inference = replace(built, program=replace(built.program, training=None))
    assert plan_of(for_inference, 2).items() >= blocks.items()


@pytest.mark.parametrize(
    ("heads", "ranks", "told"), [((3, 3), 2, "3 attention heads"), ((8, 2), 4, "8 query heads and 2 key heads")]
)
def test_heads_that_ranks_do_not_divide_stay_whole(heads: tuple[int, int], ranks: int, told: str) -> None:
    built, inputs = activations(Made(in_a_row, layers=nn.ModuleList([grouped(*heads)])))
    notices: list[str] = []
    program = TensorParallel(ranks, tell=notices.append)(built.program)
    in_parts = {"up__weight": cut(0), "up__bias": cut(0), "down__weight": cut(1)}
    assert plan_of(built, ranks) == {f"layers__0__{name}": layout for name, layout in in_parts.items()}
    assert notices[0] == f"whole on every rank: {told}, which cannot be divided over {ranks} ranks"
    assert notices[1].startswith("whole on every rank: layers.*.q.weight (")
    check_gradients_of(program, built, inputs)


def test_the_search_does_not_try_more_for_more_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Mapping[str, Layout]] = []

    def counted(*given: Any) -> Sharder:
        trials.append(given[-1])
        return propagate(*given)

    monkeypatch.setattr("sambasim.compiler.sharding.plan.propagate", counted)
    counts, cut_in_each = [], ("up__weight", "up__bias", "down__weight")
    for layers in (4, 5):
        trials.clear()
        built, _ = activations(Made(in_a_row, layers=nn.ModuleList(grouped(3, 3) for _ in range(layers))), quick=True)
        assert set(plan_of(built, 2)) == {f"layers__{at}__{name}" for at in range(layers) for name in cut_in_each}
        counts.append(len(trials))
    assert counts[0] == counts[1]


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    built, _ = activations(masked((6, 6)), quick=True)
    with pytest.raises(OptionError, match="4 attention heads cannot be divided over 8 ranks, and no other") as raised:
        TensorParallel(8)(built.program)
    assert raised.value.remedy == "--n-chips 2 or 4, or leave out --tensor-parallel"
    assert "test_plan.py:" in str(raised.value.where)
    odd = Made(lambda net, x: net.second(net.first(x).relu()).square().mean(), **ODD)
    with pytest.raises(OptionError, match=r"no tensor of .* can be cut over 2 ranks"):
        TensorParallel(2)(built_from(odd, quick=True, x=torch.randn(4, 5))[0].program)


ODD = {"first": nn.Linear(5, 7), "second": nn.Linear(7, 3)}
