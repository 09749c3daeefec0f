"""Which parameters are cut, and that a cut program computes the gradients of the whole one."""

from collections.abc import Mapping
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
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.compiler.passes import Place
from sambasim.compiler.sharding.plan import find_plan, propagate
from sambasim.compiler.sharding.rules import RULES
from sambasim.compiler.sharding.sharder import Layout, Sharder, cut
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.compiler.update import AttachOptimizers, Update
from sambasim.errors import DataError, OptionError
from sambasim.ir.mesh import replica_mesh
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.transports.connect import connect_here
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, joined, place_inputs, place_weights
from tests.support.examples import example_options
from tests.support.whole import whole_case


class Attention(nn.Module):
    """As in Llama: separate query, key and value, and a gated feed-forward layer without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (part(x).view(4, 6, 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 6, 16))
        x = self.norm(x)
        return F.mse_loss(x + self.down(F.silu(self.gate(x)) * self.up(x)), target)


class Masked(nn.Module):
    """Attention with a mask for all heads, or one for each; with dropout, PyTorch computes it by products."""

    mask: Tensor

    def __init__(self, shape: tuple[int, ...], dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.rand(shape) > 0.3)
        self.dropout = dropout

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = (one.view(4, 6, 4, 4).transpose(1, 2) for one in self.qkv(x).split(16, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=self.dropout)
        return F.mse_loss(self.o(mixed.transpose(1, 2).reshape(4, 6, 16)), target)


class Grouped(nn.Module):
    """Attention whose key heads serve several query heads, and a feed-forward layer."""

    def __init__(self, query: int, key: int) -> None:
        super().__init__()
        self.heads = query, key
        self.q, self.k, self.v = (nn.Linear(16, 4 * heads) for heads in (query, key, key))
        self.o, self.up, self.down = nn.Linear(4 * query, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def outputs(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=len(set(self.heads)) > 1)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        outputs: Tensor = x + self.down(self.up(x).relu())
        return outputs

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.outputs(x), target)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Grouped(3, 3) for _ in range(count))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, Grouped)
            x = layer.outputs(x)
        return F.mse_loss(x, target)


class Traps(nn.Module):
    """What rules once got wrong: a number added to a sum over ranks, joined sums, GLU, shuffled channels, a table that
    scales gradients by frequency, and two losses of one target."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8, scale_grad_by_freq=True)
        self.up, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 16)
        self.wide, self.narrow = nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1, bias=False)
        self.head = nn.Linear(16, 16)

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        hidden = self.up(self.words(words)).relu()
        x = torch.cat([self.left(hidden) + 1.0, self.right(hidden)], -1)
        x = self.down(F.glu(self.gate(x), -1))
        x = x + self.narrow(F.channel_shuffle(self.wide(x.view(-1, 1, 4, 4)), 2)).reshape(x.shape)
        logits, classes = self.head(x).flatten(0, 1), target.flatten()
        return F.cross_entropy(logits, classes, ignore_index=3) + F.cross_entropy(logits, classes)


class Odd(nn.Module):
    """Nothing in it can be cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().mean()
        return result


def captured(options: CompileOptions) -> tuple[Built, dict[str, Tensor]]:
    model = build_model(options)
    example = example_batch(model, options)
    return capture_model(model, example, options, Stopwatch(lambda phase: None)), dict(example.inputs)


@cache
def example(name: str) -> tuple[Built, dict[str, Tensor]]:
    """The captured example called `name`, and a batch."""
    return captured(example_options(name, Path()))


def built_from(model: nn.Module, **inputs: Tensor) -> tuple[Built, dict[str, Tensor]]:
    options = compile_options(None, "net:Net", ["optimizer.name=sgd"], {})
    return capture_model(model, Example(inputs, by_keyword=True), options, Stopwatch(lambda phase: None)), dict(inputs)


def gradients(program: Program, built: Built, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole gradients of one pass, which every rank of a replica computes in this process."""
    mesh = replica_mesh(program.mesh)
    placed = Place()(AttachOptimizers((Update("sgd", {"lr": 0.1}),))(program))
    memories = [DeviceMemory.private(placed) for _ in range(mesh.world_size)]
    executors = []
    transports = connect_here(memories, mesh)
    for rank, (memory, transport) in enumerate(zip(memories, transports, strict=True)):
        place_weights(placed, memory, built.weights, mesh.coordinates(rank))
        place_inputs(memory, inputs)
        executors.append(Executor(placed.step, placed, memory.tensor, transport=transport))

    def passed(executor: Executor):  # type: ignore[no-untyped-def]  # a generator
        torch.manual_seed(7)  # every rank draws the same
        (outputs,) = yield from executor.run(tangent_of(placed, 1.0))
        return outputs

    run_together([passed(executor) for executor in executors], transports[0].hub)
    found = {}
    for symbol in placed.symbols.values():
        if symbol.kind is SymbolKind.GRADIENT:
            parts = [memory.tensor(symbol.name) for memory in memories]
            if not symbol.cuts:
                assert all(torch.equal(part, parts[0]) for part in parts), symbol.name
            found[symbol.name] = (joined(parts, symbol.cuts[0]) if symbol.cuts else parts[0]).clone()
    return found


def activations(model: nn.Module) -> tuple[Built, dict[str, Tensor]]:
    torch.manual_seed(0)
    return built_from(model, x=torch.randn(4, 6, 16), target=torch.randn(4, 6, 16))


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
    built, inputs = activations(Attention())
    assert plan_of(built, ranks) == {
        **dict.fromkeys(("q__weight", "k__weight", "v__weight"), cut(0)),
        **dict.fromkeys(("gate__weight", "up__weight", "gate__bias", "up__bias"), cut(0)),
        **dict.fromkeys(("o__weight", "down__weight"), cut(1)),
    }
    check_gradients(built, inputs, ranks)


@pytest.mark.parametrize(
    ("shape", "dropout"), [((6, 6), 0.0), ((4, 1, 6, 6), 0.0), ((1, 4, 6, 6), 0.0), ((4, 1, 6, 6), 0.2)]
)
def test_attention_with_a_mask_is_cut_by_heads(shape: tuple[int, ...], dropout: float) -> None:
    torch.manual_seed(0)
    built, inputs = activations(Masked(shape, dropout))
    assert plan_of(built, 2) == {"qkv__weight": cut(0, 3), "qkv__bias": cut(0, 3), "o__weight": cut(1)}
    check_gradients(built, inputs, 2)


def test_what_mixes_parts_is_computed_whole() -> None:
    torch.manual_seed(0)
    words, target = torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6))
    words[:, 0], words[:, 1], target[0] = 0, 8, 3  # the first word of each part, and an ignored class
    built, inputs = built_from(Traps(), words=words, target=target)
    assert {"words__weight", "head__weight", "up__weight"} <= plan_of(built, 2).keys()
    check_gradients(built, inputs, 2)


@pytest.mark.parametrize("name", ["words", "target"])
def test_a_word_or_a_class_of_no_rank_is_an_error_of_the_data(name: str) -> None:
    words, target = torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6))
    built, inputs = built_from(Traps(), words=words, target=target)
    inputs[name] = inputs[name].clone()
    inputs[name][1, 2] = 99
    with pytest.raises(DataError, match=f"{name} goes from"):
        gradients(TensorParallel(2)(built.program), built, inputs)


def plan_of(built: Built, ranks: int) -> dict[str, Layout]:
    plan = find_plan(built.program, ranks)
    return {name.partition("__")[2]: layout for name, layout in plan.layouts.items()}


def test_a_gpt_is_cut_as_in_megatron() -> None:
    built, _ = example("char_gpt")
    of_block = {
        "attention__qkv__weight": cut(0, 3),
        "attention__qkv__bias": cut(0, 3),
        "attention__proj__weight": cut(1),
        "mlp__0__weight": cut(0),
        "mlp__0__bias": cut(0),
        "mlp__2__weight": cut(1),
    }
    blocks = {f"blocks__{block}__{name}": layout for block in range(2) for name, layout in of_block.items()}
    assert plan_of(built, 2) == {"tokens__weight": cut(0), "positions__weight": cut(0), **blocks}
    of_forward = find_plan(replace(built.program, training=None), 2)  # as for inference
    assert {name.partition("__")[2]: layout for name, layout in of_forward.layouts.items()}.items() >= blocks.items()


@pytest.mark.parametrize(
    ("heads", "ranks", "told"), [((3, 3), 2, "3 attention heads"), ((8, 2), 4, "8 query heads and 2 key heads")]
)
def test_heads_that_ranks_do_not_divide_stay_whole(heads: tuple[int, int], ranks: int, told: str) -> None:
    built, inputs = activations(Grouped(*heads))
    notices: list[str] = []
    program = TensorParallel(ranks, tell=notices.append)(built.program)
    assert plan_of(built, ranks) == {"up__weight": cut(0), "up__bias": cut(0), "down__weight": cut(1)}
    assert notices[0] == f"whole on every rank: {told}, which cannot be divided over {ranks} ranks"
    assert notices[1].startswith("whole on every rank: q.weight (")
    check_gradients_of(program, built, inputs)


def test_the_search_does_not_try_more_for_more_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Mapping[str, Layout]] = []

    def counted(*given: Any) -> Sharder:
        trials.append(given[-1])
        return propagate(*given)

    monkeypatch.setattr("sambasim.compiler.sharding.plan.propagate", counted)
    counts, cut_in_each = [], ("up__weight", "up__bias", "down__weight")
    for layers in (4, 6):
        trials.clear()
        built, _ = activations(Layers(layers))
        assert set(plan_of(built, 2)) == {f"layers__{at}__{name}" for at in range(layers) for name in cut_in_each}
        counts.append(len(trials))
    assert counts[0] == counts[1]


def test_heads_that_ranks_do_not_divide_are_refused_if_nothing_else_can_be_cut() -> None:
    built, _ = activations(Masked((6, 6)))
    with pytest.raises(OptionError, match="4 attention heads cannot be divided over 8 ranks, and no other") as raised:
        TensorParallel(8)(built.program)
    assert raised.value.remedy == "--n-chips 2 or 4, or leave out --tensor-parallel"


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    built, _ = built_from(Odd(), x=torch.randn(4, 5))
    with pytest.raises(OptionError, match=r"no tensor of .* can be cut over 2 ranks"):
        TensorParallel(2)(built.program)
