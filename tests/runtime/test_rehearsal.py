"""What a PEF from elsewhere states is compared with what PyTorch would give, before anything is computed: rule 26.

Every case ended the process, or took memory that nobody had stated, before there was a rule for it.
"""

import re
from collections.abc import Mapping, Sequence

import pytest

from sambasim.errors import MachineError, PefError
from sambasim.ir.graph import Argument, Graph, Node, Ref, Section, SectionKind, TorchConstant
from sambasim.ir.program import Program
from sambasim.ir.types import TensorType
from sambasim.pef.rules import RESULTS
from sambasim.runtime.rehearsal import most_bytes, rehearse

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def program(nodes: Sequence[Node], values: Shapes) -> Program:
    types = {name: TensorType(*type_) for name, type_ in values.items()}
    graph = Graph("evaluation", (), tuple(nodes), (), types, (Section(0, SectionKind.FWD, "fwd", 0, len(nodes)),))
    return Program("net", 2, {}, None, graph, None, None, False, (), (), (), None, 512)


def filled(name: str, *shape: int, dtype: str = "float32", value: float = 1) -> tuple[Node, Shapes]:
    """A node that makes a tensor of `value`, and its type."""
    keywords = (("dtype", TorchConstant("dtype", dtype)), ("device", TorchConstant("device", "cpu")))
    return Node(name, "aten.full.default", (shape, value), keywords, (name,)), {name: (dtype, shape)}


def refused(operator: str, args: tuple[Argument, ...], results: Shapes, *makers: tuple[Node, Shapes]) -> str:
    """What is said of a node of `operator`, whose operands `makers` make."""
    values = dict(results)
    for _, types in makers:
        values |= types
    node = Node("n", f"aten.{operator}", args, (), tuple(results))
    with pytest.raises(PefError) as caught:
        rehearse(program([*(maker for maker, _ in makers), node], values))
    found = re.fullmatch(rf"node n \(.*\) breaks rule {RESULTS.number} .*?: (.*)", caught.value.what)
    assert found, caught.value.what
    return found[1]


ONE = {"y": ("float32", (2, 2))}
A, B, C = Ref("a"), Ref("b"), Ref("c")


def test_results_larger_than_stated_are_refused() -> None:
    fault = refused("repeat.default", (A, (1 << 20, 1 << 20)), ONE, filled("a", 2, 2))
    assert fault == "it gives float32[2097152, 2097152], and float32[2, 2] is stated"


def test_a_list_longer_than_stated_is_refused_before_it_is_made() -> None:
    for operator, more in (("unbind.int", ()), ("split.Tensor", (1,)), ("tensor_split.sections", (1 << 40,))):
        expand = Node("e", "aten.expand.default", (A, (1 << 40,)), (), ("e",))
        fault = refused(operator, (Ref("e"), *more), ONE, filled("a", 1), (expand, {"e": ("float32", (1 << 40,))}))
        assert fault == "it gives 1099511627776 results, and 1 are stated"


def test_memory_that_the_machine_does_not_have_is_refused() -> None:
    maker, types = filled("a", 1 << 20, 1 << 24)
    with pytest.raises(MachineError, match=re.escape("needs 64.0 TiB at once for what it computes")):
        rehearse(program([maker], types))


def test_the_most_at_once_counts_neither_views_nor_what_is_freed() -> None:
    first, types = filled("a", 4)
    nodes = [
        first,
        Node("v", "aten.expand.default", (A, (1 << 20, 4)), (), ("v",)),
        Node("b", "aten.neg.default", (A,), (), ("b",)),
        Node("c", "aten.neg.default", (B,), (), ("c",)),
    ]
    values = {**types, "v": ("float32", (1 << 20, 4)), "b": ("float32", (4,)), "c": ("float32", (4,))}
    assert most_bytes(program(nodes, values).evaluation) == 32


def test_operands_that_torch_cannot_take_are_refused() -> None:
    assert "PyTorch cannot say what it gives" in refused("mm.default", (A, A), ONE, filled("a", 2, 3))


def indices(*shape: int) -> tuple[Node, Shapes]:
    return filled("b", *shape, dtype="int64", value=1 << 40)


WINDOW = ((2, 2), (2, 2), (0, 0), (1, 1), False)

TRUSTING: Mapping[str, tuple[str, tuple[Argument, ...], tuple[tuple[Node, Shapes], ...], str]] = {
    "indices of a maximum": (
        "max_pool2d_with_indices_backward.default", (A, C, *WINDOW, B),
        (filled("a", 1, 1, 2, 2), indices(1, 1, 2, 2), filled("c", 1, 1, 4, 4)),
        "indices is not what aten.max_pool2d_with_indices.default has saved",
    ),
    "indices of an adaptive maximum": (
        "adaptive_max_pool2d_backward.default", (A, C, B),
        (filled("a", 1, 1, 2, 2), indices(1, 1, 2, 2), filled("c", 1, 1, 4, 4)),
        "indices is not what aten.adaptive_max_pool2d.default has saved",
    ),
    "classes of a loss": (
        "nll_loss_backward.default", (Ref("g"), A, B, None, 0, -100, Ref("g")),
        (filled("a", 2, 2), indices(2), filled("g", 2)), "target was not looked at by aten.nll_loss_forward.default",
    ),
    "rows of a table, by frequency": (
        "embedding_dense_backward.default", (A, B, 5, -1, True), (filled("a", 2, 2), indices(2)),
        "indices were not looked at by aten.embedding.default",
    ),
    "rows of a bag": (
        "_embedding_bag_dense_backward.default", (A, B, B, B, B, 5, False, 0, None), (filled("a", 2, 2), indices(2)),
        "offset2bag is not what aten._embedding_bag has saved",
    ),
    "an axis that is not there": (
        "_softmax_backward_data.default", (A, A, 1000, TorchConstant("dtype", "float32")), (filled("a", 2, 2),),
        "axis 1000 of [2, 2]",
    ),
    "gradients of fewer channels": (
        "_adaptive_avg_pool2d_backward.default", (A, C), (filled("a", 1, 2, 2), filled("c", 3000, 4, 4)),
        "gradients are [1, 2, 2], and what was pooled is [3000, 4, 4]",
    ),
    "statistics of fewer channels": (
        "native_batch_norm_backward.default",
        (A, A, None, None, None, C, C, True, 1e-5, (True, True, True)), (filled("a", 2, 4000), filled("c", 1)),
        "save_mean is [1], and its kernel takes [4000] on trust",
    ),
    "statistics of fewer rows": (
        "native_layer_norm_backward.default", (A, A, (8,), C, C, None, None, (True, False, False)),
        (filled("a", 4000, 8), filled("c", 1)), "mean is [1], and its kernel takes 4000 numbers on trust",
    ),
    "a norm of nothing": ("_weight_norm.default", (A, C, 0), (filled("a", 0), filled("c")), "norms of [0] along 0"),
    "norms of fewer rows": (
        "_weight_norm_interface.default", (A, C, 0), (filled("a", 400, 3), filled("c", 1, 1)),
        "g is [1, 1], and its kernel takes [400, 1] on trust",
    ),
    "whole numbers by minus one": (
        "div.Tensor_mode", (B, B), (indices(2),), "whole numbers are divided by a tensor, and rounded towards zero",
    ),
    "a loss of whole numbers": (
        "smooth_l1_loss_backward.default", (B, B, B, 2, 1e-5), (indices(2),), "grad_output is of int64",
    ),
    "keys without values": (
        "_scaled_dot_product_flash_attention_for_cpu.default", (A, C, A),
        (filled("a", 1, 2, 8, 8), filled("c", 1, 1, 800, 8)), "key is [1, 1, 800, 8], and its kernel takes",
    ),
    "a layer without weights": (
        "mkldnn_rnn_layer.default",
        (A, C, C, C, C, C, C, False, (), 2, 7, 1, True, False, False, False), (filled("a", 2, 2, 3), filled("c", 1, 1)),
        "weight0 is [1, 1], and its kernel takes [28, 3] on trust",
    ),
    "gradients on another grid": (
        "grid_sampler_2d_backward.default", (A, A, C, 0, 0, False, (True, True)),
        (filled("a", 1, 1, 2, 2), filled("c", 1, 99, 99, 2)), "grad_output is [1, 1, 2, 2], and its kernel takes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUSTING)
def test_a_kernel_that_trusts_its_operands_is_not_given_others(name: str) -> None:
    operator, args, makers, fault = TRUSTING[name]
    results: Shapes = {f"y{index}": ("float32", (2, 2)) for index in range(_results_of(operator))}
    values = dict(results)
    for _, types in makers:
        values |= types
    keywords = (("rounding_mode", "trunc"),) if operator.startswith("div") else ()
    node = Node("n", f"aten.{operator}", args, keywords, tuple(results))
    with pytest.raises(PefError, match=re.escape(fault)):
        rehearse(program([*(maker for maker, _ in makers), node], values))


def _results_of(operator: str) -> int:
    from sambasim.runtime.instructions import find_operator

    return len(find_operator(f"aten.{operator}")._schema.returns)
