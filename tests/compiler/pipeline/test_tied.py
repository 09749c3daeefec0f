"""Which rank of a pipeline updates a tied parameter, what each rank holds then, and the messages of the update."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from sambasim.compiler.build import Built
from sambasim.compiler.passes import Pass, Place, run_pipeline
from sambasim.compiler.pipeline import PipelineParallel
from sambasim.compiler.stages import Assignment, updaters
from sambasim.compiler.update import AddDataParallel, AttachOptimizers, Update
from sambasim.errors import InvariantError
from sambasim.ir.graph import Node, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.ranks import copied, ends_of, of_ranks
from sambasim.ir.schedule import make
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import verify
from sambasim.published.models import GPT2
from tests.compiler.pipeline.test_pipeline_parallel import BUDGET, MICRO_BATCHES, crossing
from tests.compiler.sharding.test_plan import built_from
from tests.ir.test_verify import nodes
from tests.support.whole import is_whole, whole

ADAMW = Update("adamw", {"lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 1.0})
TIED = "gpt2__tokens__weight"


@cache
def small_gpt() -> Built:
    """The proportions of GPT-2 small at width 32: 12 layers, of which `make test` has 8, and 65.5 words and 1.33
    positions for each channel."""
    model = GPT2(width=32, heads=4, layers=12 if is_whole() else 8, length=42, vocabulary=2096)
    tokens = torch.randint(2096, (1, 42))
    return built_from(model, tokens=tokens, targets=tokens)[0]


def placed(update: Update = ADAMW, replicas: int = 0) -> Program:
    optimizers = AttachOptimizers((update,))
    passes: list[Pass] = [
        PipelineParallel(make("1f1b", 4, MICRO_BATCHES), BUDGET, optimizers.state_bytes, max(replicas, 1)),
        *([AddDataParallel(replicas)] if replicas else []),
        optimizers,
        Place(),
    ]
    return run_pipeline(small_gpt().program, passes, lambda title: None)


@cache
def tied() -> Program:
    return placed()


def moves(program: Program) -> list[tuple[str, tuple[int, int]]]:
    return [(name, ends_of(node)) for node in program.step.nodes if (name := copied(node))]


def held_bytes(program: Program) -> int:
    kinds = (SymbolKind.PARAMETER, SymbolKind.GRADIENT, SymbolKind.OPTIMIZER_STATE)
    return sum(one.type.size_bytes for one in program.symbols.values() if one.kind in kinds)


@whole
def test_no_rank_of_four_holds_more_than_two_fifths_of_a_tied_gpt() -> None:
    parameters = [one for one in small_gpt().program.symbols.values() if one.kind is SymbolKind.PARAMETER]
    sizes = {one.name: one.type.size_bytes for one in parameters}
    whole_bytes = 4 * sum(sizes.values())
    assert 4 * sizes[TIED] / whole_bytes == pytest.approx(0.31, rel=0.03)
    program = tied()
    assert moves(program) == [(f"{TIED}__grad", (0, 3)), (TIED, (3, 0))]
    held = [held_bytes(of_ranks(program)[rank]) for rank in range(4)]
    assert max(held) <= 0.4 * whole_bytes
    assert program.device_bytes <= 0.4 * whole_bytes
    assert sum(held) == whole_bytes + 2 * program.symbols[TIED].type.size_bytes, "all but its states are there twice"


@whole
def test_a_group_of_its_own_is_reduced_behind_the_copy_of_its_gradient() -> None:
    program = placed(replicas=2)
    forward = crossing(program, SectionKind.FWD)
    assert not any(node.name.startswith(TIED) for node in forward), "the last stage reads its own copy"
    (group,) = [one for one in program.groups if one.members[0].parameter == TIED]
    assert len(group.members) == 1
    kinds = [one.kind.value for one in program.step.sections if one.kind not in (SectionKind.FWD, SectionKind.BCKWD)]
    optimizers = ["OPT"] * len(program.groups)
    assert kinds == ["REDUCE", "REDUCE", "GRADNORM", *optimizers, "GATHER", "GATHER"]
    on_first, on_last = (of_ranks(program)[rank] for rank in (0, 3))
    assert group in on_last.groups
    assert group not in on_first.groups
    assert {TIED, f"{TIED}__grad"} <= on_first.symbols.keys() & on_last.symbols.keys()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"update": Update("sgd", {"lr": 0.1})}, "there are no states"),
        ({"replicas": 64}, "each of many replicas keeps few of them"),
    ],
)
def test_where_nothing_is_gained_the_first_stage_updates_it(how: dict[str, int | Update], why: str) -> None:
    program = placed(**how)  # type: ignore[arg-type]  # arguments by name, of two types
    assert moves(program) == [], why
    assert sum(node.name.startswith(TIED) for node in crossing(program, SectionKind.FWD)) == 1


def test_of_the_readers_the_one_with_least_updates_it() -> None:
    """Ranks hold 40 + 4, 40 and 4 beside the tied parameter, of stages 0 and 3, 1, and 2 of three ranks. Less than a
    clear gain adds no messages."""
    readers = {"tied": (0, 1, 2, 3), "a": (0,), "b": (1,), "c": (2,), "d": (3,)}
    owner = {name: of[0] for name, of in readers.items()}
    sizes = {"tied": (10, 20), "a": (10, 20), "b": (10, 20), "c": (1, 2), "d": (1, 2)}
    assert updaters(Assignment({}, owner, owner, readers, {}), sizes, 3) == owner | {"tied": 2}
    owner, readers = {"tied": 0, "a": 0, "b": 1}, {"tied": (0, 1), "a": (0,), "b": (1,)}
    for states, expected in ((10, 0), (30, 1)):
        sizes = {"tied": (5, states), "a": (100, 200 - states), "b": (10, 20)}
        assert updaters(Assignment({}, owner, owner, readers, {}), sizes, 2)["tied"] == expected


def given(**values: int) -> Callable[[Node], Node]:
    return lambda node: replace(node, kwargs=tuple((dict(node.kwargs) | values).items()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (given(source=1), "weight__grad is not copied from rank 0 to rank 3"),
        (given(target=2), "weight__grad is not copied from rank 0 to rank 3"),
        (given(tag=1 << 40), "has the tag 1099511627776"),
        (lambda node: replace(node, args=()), "copies no parameter and no gradient"),
        (lambda node: replace(node, args=node.args[:1]), "copies no parameter and no gradient"),
        (lambda node: replace(node, args=(node.args[0], "tokens")), "copies no parameter and no gradient"),
        (lambda node: replace(node, args=("group_0", node.args[1])), "too early|not copied"),
        (lambda node: replace(node, kwargs=(("axis", "pp"),)), "the source of .* is None"),
        (lambda node: replace(node, kwargs=(("axis", "dp"),)), "dp, which is no axis|copies no parameter"),
        (lambda node: None if copied(node) == TIED else node, "weight is not copied from rank 3 to rank 0"),
    ],
)
def test_a_damaged_or_missing_copy_is_refused(change: Callable[[Node], Node | None], said: str) -> None:
    with pytest.raises(InvariantError, match=said):
        verify(nodes(lambda node: change(node) if copied(node) else node)(tied()))
