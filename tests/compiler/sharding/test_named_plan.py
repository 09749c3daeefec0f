"""Weights that are cut by name: of a config, and of `tp_plan` of Hugging Face models."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.sharding.plan import tp_plan_of
from sambasim.compiler.sharding.sharder import Layout, cut
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.errors import OptionError
from sambasim.ir.dataflow import gathers
from sambasim.ir.mesh import TENSOR
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from tests.compiler.sharding.test_plan import built_from, check_gradients_of, example, linears
from tests.support.compiled import Made, compile_from_options
from tests.support.examples import example_options
from tests.support.whole import whole_case


def layouts_of(program: Program) -> dict[str, Layout]:
    """Of the weights that are cut, by their names in the model."""
    return {
        symbol.torch_names[0].removesuffix(".weight"): cut(symbol.cuts[0].dim, symbol.cuts[0].outer)
        for symbol in program.symbols.values()
        if symbol.kind is SymbolKind.PARAMETER and symbol.cuts and len(symbol.type.shape) > 1
    }


def gathered(program: Program) -> Mapping[str, int]:
    """The bytes that a rank gathers in the training step, by operator."""
    received: Counter[str] = Counter()
    for gather in gathers(program.step, TENSOR, 2):
        received[gather.operator.removeprefix("aten.native_").removesuffix(".default")] += gather.received_bytes
    return received


_TABLES = {"tokens": "embedding_rowwise", "positions": "rowwise"}
_COLUMNS = {"blocks.*.attention.qkv": "colwise", "blocks.*.mlp.0": "colwise_rep"}
_ROWS = {"blocks.*.attention.proj": "rowwise", "blocks.*.mlp.2.weight": "local_rowwise"}


@pytest.mark.parametrize("names", [_TABLES | _COLUMNS | _ROWS, {"head": "colwise", "positions": "rowwise"} | _COLUMNS])
def test_names_of_what_the_search_cuts_give_the_same_program(names: Mapping[str, str]) -> None:
    """So the bits are the same. Rows follow from columns, and tied weights have two names."""
    program = example("char_gpt")[0].program
    assert TensorParallel(2, names)(program) == TensorParallel(2)(program)


_MLPS = [f"blocks.{block}.mlp" for block in range(2)]
_PART = 8192
"""Half of an activation `[4, 32, 32]`, in bytes."""


@pytest.mark.parametrize(
    ("names", "layouts", "bytes_gathered"),
    [
        ({"tokens": "colwise"}, {"tokens": cut(1)}, {"layer_norm": 5 * _PART, "layer_norm_backward": _PART}),
        ({"blocks.*.mlp.2": "colwise"}, {f"{one}.2": cut(0) for one in _MLPS}, {"layer_norm": 3 * _PART}),
        (
            {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "replicate"},
            {f"{one}.0": cut(0) for one in _MLPS},
            {"gradients": 2 * 32 * 128 // 2 * 4},  # of the weights that stay whole
        ),
        (
            {"blocks.*.mlp.0": "colwise", "blocks.1.mlp.0": "replicate"},  # the last one holds
            {"blocks.0.mlp.0": cut(0), "blocks.0.mlp.2": cut(1)},
            {},
        ),
        (
            {"blocks.1.attention.qkv": "colwise"},
            {"blocks.1.attention.qkv": cut(0, 3), "blocks.1.attention.proj": cut(1)},
            {},
        ),
    ],
)
def test_what_a_plan_gathers_is_counted_and_gradients_are_those_of_the_whole(
    names: Mapping[str, str], layouts: Mapping[str, Layout], bytes_gathered: Mapping[str, int]
) -> None:
    built, inputs = example("char_gpt")
    program = TensorParallel(2, names)(built.program)
    assert layouts_of(program) == layouts
    assert gathered(program) == bytes_gathered
    check_gradients_of(program, built, inputs)


@pytest.mark.parametrize(
    ("names", "ranks", "text", "remedy"),
    [
        ({"mlp.2": "colwise"}, 2, 'parallel.tensor_plan."mlp.2" = "colwise": matches no', "blocks.*.mlp.2?"),
        ({"blocks.*.mlp.2": "colwise", "blocks.*.norm_1": "replicate"}, 2, "matches no parameter", "blocks.*.norm1?"),
        ({"blocks.*.norm1": "colwise"}, 2, "matches no weight of a linear layer", "replicate"),
        ({"blocks.*.mlp.2": "colwise"}, 3, "blocks.0.mlp.2.weight has 32 columns, which 3 chips do not", "--n-chips"),
        ({"tokens": "rowwise"}, 5, "tokens.weight has 96 rows, which 5 chips do not divide", "--n-chips"),
        ({"tokens": "replicate"}, 2, "cuts no tensor", "colwise"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(
    names: Mapping[str, str], ranks: int, text: str, remedy: str
) -> None:
    with pytest.raises(OptionError) as caught:
        TensorParallel(ranks, names)(example("char_gpt")[0].program)
    assert text in caught.value.what
    assert remedy in (caught.value.remedy or "")


def test_the_compile_says_what_stays_whole_and_what_is_gathered(tmp_path: Path) -> None:
    on_chips = ('parallel.tensor_parallel="weight"', "parallel.n_chips=2")
    compiled = compile_from_options(example_options("lstm_classifier", tmp_path, *on_chips))
    assert any(
        "lstm.weight_hh_l0 (9.0 KiB: aten.mkldnn_rnn_layer.default has no rule)" in one for one in compiled.notices
    )
    plan = 'parallel.tensor_plan={ tokens = "colwise" }'
    compiled = compile_from_options(example_options("char_gpt", tmp_path, *on_chips, plan))
    whole, parts = compiled.notices
    assert whole.startswith("whole on every rank: blocks.*.mlp.0.weight (32.0 KiB), blocks.*.mlp.2.weight (32.0 KiB), ")
    assert parts.startswith("gathered along tp, 48.0 KiB a pass, to compute whole: aten.native_layer_norm.default of ")


STYLES = {"gate": "colwise", "odd": "colwise", "norm": "sequence_parallel", "experts": "moe_tp_experts"}
ODD_IS_WHOLE = 'of it, these have no effect: "odd" odd.weight has 5 columns, which 2 chips do not divide'


def gated() -> nn.Module:
    """Its plan cuts what the search leaves whole, since `glu` mixes the parts; and it names what no plan can cut."""

    def then(net: Any, x: Tensor) -> Tensor:
        x = net.norm(x + net.down(net.up(x).relu()))
        loss: Tensor = F.glu(net.gate(x)).square().mean() + net.odd(x).square().mean()
        return loss

    layers = linears("gate", "up", size=(8, 16)) | linears("down", size=(16, 8)) | linears("odd", size=(8, 5))
    return Made(then, **layers, norm=nn.LayerNorm(8), tp_plan=STYLES)


def test_the_plan_of_a_model_adds_to_what_the_search_cuts() -> None:
    torch.manual_seed(0)
    model = Made(lambda net, x: net.inner(x), inner=gated())
    assert tp_plan_of(model) == {f"inner.{name}": style for name, style in STYLES.items()}
    built, inputs = built_from(model, x=torch.randn(4, 8))
    notices: list[str] = []
    assert layouts_of(TensorParallel(2)(built.program)) == {"inner.up": cut(0), "inner.down": cut(1)}
    program = TensorParallel(2, {}, tp_plan_of(model), notices.append)(built.program)
    assert layouts_of(program) == {"inner.up": cut(0), "inner.down": cut(1), "inner.gate": cut(0)}
    assert notices == [
        "tp_plan of the model is used, because the search alone leaves weights whole: inner.gate.weight; of it, these "
        'have no effect: "inner.experts" matches no parameter; "inner.odd" inner.odd.weight has 5 columns, which 2 '
        'chips do not divide; "inner.norm" is a style for other weights than those of linear layers, convolutions and '
        "embeddings",
        "whole on every rank: inner.odd.weight (160 B)",
    ]
    check_gradients_of(program, built, inputs)


@pytest.mark.parametrize(
    ("styles", "said"),
    [
        ({"up": "colwise"}, "the search cuts all weights that the plan can cut"),
        ({"up": "colwise", "odd": "colwise"}, f"the search cuts all weights that the plan can cut; {ODD_IS_WHOLE}"),
        ({"odd": "colwise"}, f"it can cut no weight; {ODD_IS_WHOLE}"),
    ],
)
def test_a_plan_that_is_not_used_is_not_said_to_cut_more_than_it_can(styles: Mapping[str, str], said: str) -> None:
    built, _ = built_from(gated(), x=torch.randn(4, 8))
    notices: list[str] = []
    program = TensorParallel(2, {}, styles, notices.append)(built.program)
    assert layouts_of(program) == {"up": cut(0), "down": cut(1)}
    assert notices[0] == f"tp_plan of the model is not used: {said}"


@pytest.mark.parametrize(
    ("ranks", "key_heads", "used"), [whole_case(2, 2, False), whole_case(4, 2, True), whole_case(2, 1, True)]
)
def test_tp_plan_of_a_llama_is_used_where_the_search_cuts_less(ranks: int, key_heads: int, used: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, num_key_value_heads=key_heads, max_position_embeddings=8, **sizes)
    )
    words = torch.randint(0, 32, (4, 8))
    built, inputs = built_from(model, input_ids=words, labels=words)
    notices: list[str] = []
    program = TensorParallel(ranks, {}, tp_plan_of(model), notices.append)(built.program)
    assert (program == TensorParallel(ranks)(built.program)) is not used
    assert (program == TensorParallel(ranks, tp_plan_of(model))(built.program)) is True
    assert len(layouts_of(program)) == 2 * 7 + 2
    assert bool(gathered(program)) is used
    assert notices[0].startswith("tp_plan of the model is used") is used
    assert [notice.startswith("whole on every rank") for notice in notices[1:]] == [True] * used
    check_gradients_of(program, built, inputs)
