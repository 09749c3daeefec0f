"""Every algorithm carried out on integers: any number of ranks, any layout of nodes, any length."""

from collections.abc import Sequence
from dataclasses import replace
from operator import add
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.plan import plan
from sambasim.collectives.schedule import Algorithm, Phase, Round, Schedule, Scope, Transfer, nodes_of, sent_numel
from sambasim.collectives.tree import additions
from sambasim.errors import UserError
from tests.collectives.interpreter import TooEarly, carry_out

WORLD_SIZES = range(1, 18)
ALGORITHMS = pytest.mark.parametrize("algorithm", list(Algorithm))

layouts = st.one_of(
    st.integers(1, 17).map(lambda world_size: (0,) * world_size),
    st.lists(st.integers(0, 4), min_size=1, max_size=17).map(tuple),
)
lengths = st.integers(0, 40)
seeds = st.integers(0, 2**32)

BITS_PER_COUNT = 8
"""A rank's operand is 1 in a field of its own, wide enough for the number of times that it can be added."""


def _counts(schedule: Schedule) -> list[list[int]]:
    operands = [[1 << BITS_PER_COUNT * rank] * schedule.numel for rank in range(schedule.world_size)]
    return carry_out(schedule, operands, add, Random(0))[0]


def _each_once(schedule: Schedule) -> list[list[int]]:
    once = sum(1 << BITS_PER_COUNT * rank for rank in range(schedule.world_size))
    return [[once] * schedule.numel] * schedule.world_size


@ALGORITHMS
@given(node_of=layouts, numel=lengths, granule=st.integers(1, 9), seed=seeds)
def test_all_ranks_end_with_the_exact_sum(
    algorithm: Algorithm, node_of: tuple[int, ...], numel: int, granule: int, seed: int
) -> None:
    random = Random(seed)
    operands = [[random.randint(-(10**9), 10**9) for _ in range(numel)] for _ in node_of]
    schedule = plan(algorithm, numel, node_of, granule=granule)
    results, sent = carry_out(schedule, operands, add, random)
    assert results == [[sum(column) for column in zip(*operands, strict=True)]] * len(node_of)
    assert tuple(sent) == sent_numel(schedule)


@ALGORITHMS
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_contribution_is_added_exactly_once(algorithm: Algorithm, world_size: int) -> None:
    layouts = {tuple(rank // width for rank in range(world_size)) for width in (1, 2, 3, 5, 17)}
    for node_of in layouts:
        for numel in {0, 1, world_size - 1, world_size, 2 * world_size + 1}:
            schedule = plan(algorithm, numel, node_of)
            assert _counts(schedule) == _each_once(schedule)


@ALGORITHMS
@given(node_of=layouts, numel=lengths, seed=seeds)
def test_no_transfer_can_be_left_out_or_stored_for_added_or_done_twice(
    algorithm: Algorithm, node_of: tuple[int, ...], numel: int, seed: int
) -> None:
    """That a schedule has nothing to spare also shows that the judge sees faults."""
    schedule = plan(algorithm, numel, node_of)
    if not schedule.rounds:
        return
    random = Random(seed)
    index = random.randrange(len(schedule.rounds))
    round_ = schedule.rounds[index]
    spoilt = random.choice(round_.transfers)
    others = tuple(each for each in round_.transfers if each is not spoilt)
    assert not _proved(_with_rounds(schedule, index, replace(round_, transfers=others)))
    if spoilt.accumulate:
        stored = replace(round_, transfers=(*others, replace(spoilt, accumulate=False)))
        assert not _proved(_with_rounds(schedule, index, stored))
        assert not _proved(_with_rounds(schedule, index, round_, replace(round_, transfers=(spoilt,))))


def _proved(schedule: Schedule) -> bool:
    try:
        return _counts(schedule) == _each_once(schedule)
    except TooEarly:
        return False


def _with_rounds(schedule: Schedule, index: int, *rounds: Round) -> Schedule:
    """`schedule` with other rounds in the place of one."""
    return replace(schedule, rounds=(*schedule.rounds[:index], *rounds, *schedule.rounds[index + 1 :]))


def test_the_judge_sees_a_round_that_reads_what_it_writes() -> None:
    schedule = plan(Algorithm.RING, 6, (0, 0, 0))
    first, second = schedule.rounds[2:]
    merged = replace(first, transfers=first.transfers + second.transfers)
    with pytest.raises(TooEarly):
        _counts(replace(schedule, rounds=(*schedule.rounds[:2], merged)))


Term: TypeAlias = "int | frozenset[Term]"  # a rank's operand, or the sum of two terms, in either order: a + b is b + a


def _sums(schedule: Schedule) -> set[Term]:
    """How the elements of the results were added, brackets and all."""

    def together(left: Term, right: Term) -> Term:
        return frozenset((left, right))

    operands: list[list[Term]] = [[rank] * schedule.numel for rank in range(schedule.world_size)]
    results, _ = carry_out(schedule, operands, together, Random(0))
    return {term for result in results for term in result}


def _tree(world_size: int) -> Term:
    terms: list[Term] = list(range(world_size))
    for into, source in additions(world_size):
        terms[into] = frozenset((terms[into], terms[source]))
    return terms[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.BINOMIAL_TREE])
def test_direct_and_binomial_add_in_the_order_of_the_tree(algorithm: Algorithm, world_size: int) -> None:
    assert _sums(plan(algorithm, 2 * world_size + 1, (0,) * world_size)) == {_tree(world_size)}


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("algorithm", [Algorithm.HALVING_DOUBLING, Algorithm.RECURSIVE_DOUBLING])
def test_near_partners_first_keep_the_tree_at_powers_of_two(algorithm: Algorithm, world_size: int) -> None:
    assert _sums(plan(algorithm, 2 * world_size + 1, (0,) * world_size)) == {_tree(world_size)}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_hierarchical_keeps_the_tree_where_nodes_are_aligned_blocks(world_size: int, block: int) -> None:
    node_of = tuple(rank // block for rank in range(world_size))
    assert _sums(plan(Algorithm.HIERARCHICAL, 40, node_of)) == {_tree(world_size)}


@pytest.mark.parametrize(
    ("algorithm", "node_of"),
    [
        (Algorithm.RING, (0, 0, 0)),
        (Algorithm.HALVING_DOUBLING, (0,) * 5),
        (Algorithm.RECURSIVE_DOUBLING, (0,) * 5),
        (Algorithm.HIERARCHICAL, (0, 1, 0, 1)),
    ],
)
def test_the_others_add_in_an_order_of_their_own(algorithm: Algorithm, node_of: tuple[int, ...]) -> None:
    assert _sums(plan(algorithm, 40, node_of)) != {_tree(len(node_of))}


@ALGORITHMS
@pytest.mark.parametrize("numel", [0, 1, 100])
def test_one_rank_exchanges_nothing(algorithm: Algorithm, numel: int) -> None:
    assert plan(algorithm, numel, (3,)).rounds == ()


@pytest.mark.parametrize(
    ("algorithm", "phases"),
    [
        (Algorithm.DIRECT, [Phase.REDUCE_SCATTER, Phase.ALL_GATHER]),
        (Algorithm.RING, [Phase.REDUCE_SCATTER] * 4 + [Phase.ALL_GATHER] * 4),
        (
            Algorithm.HALVING_DOUBLING,
            [Phase.FOLD, *[Phase.REDUCE_SCATTER] * 2, *[Phase.ALL_GATHER] * 2, Phase.UNFOLD],
        ),
        (Algorithm.RECURSIVE_DOUBLING, [Phase.FOLD, Phase.EXCHANGE, Phase.EXCHANGE, Phase.UNFOLD]),
        (Algorithm.BINOMIAL_TREE, [Phase.REDUCE] * 3 + [Phase.BROADCAST] * 3),
        (Algorithm.HIERARCHICAL, [Phase.REDUCE_SCATTER] * 2 + [Phase.ALL_GATHER] * 2),
    ],
)
def test_the_phases_among_five_ranks(algorithm: Algorithm, phases: list[Phase]) -> None:
    assert [round_.phase for round_ in plan(algorithm, 50, (0, 0, 0, 1, 1)).rounds] == phases


@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.RING, Algorithm.HALVING_DOUBLING])
@given(node_of=layouts, numel=lengths)
def test_a_reduce_scatter_leaves_every_slice_summed_at_a_rank(
    algorithm: Algorithm, node_of: tuple[int, ...], numel: int
) -> None:
    schedule = plan(algorithm, numel, node_of)
    until = tuple(round_ for round_ in schedule.rounds if round_.phase in (Phase.FOLD, Phase.REDUCE_SCATTER))
    counts = _counts(replace(schedule, rounds=until))
    once = _each_once(schedule)
    assert all(any(counts[rank][at] == once[rank][at] for rank in range(len(node_of))) for at in range(numel))


@given(node_of=layouts, numel=lengths)
def test_hierarchical_crosses_nodes_only_between_nodes(node_of: tuple[int, ...], numel: int) -> None:
    schedule = plan(Algorithm.HIERARCHICAL, numel, node_of)
    for round_ in schedule.rounds:
        crosses = {node_of[each.source] != node_of[each.target] for each in round_.transfers}
        assert crosses == {round_.scope is Scope.NODES}
    leaving = sum(each.numel for round_ in schedule.rounds if round_.scope is Scope.NODES for each in round_.transfers)
    # Each node but the owner's sends a part of the sum once and gets it back once, however many ranks it has.
    assert leaving == 2 * (len(set(node_of)) - 1) * numel


def test_a_ring_enters_each_node_once() -> None:
    node_of = (0, 1, 0, 1, 2, 0)
    (first, *_) = plan(Algorithm.RING, 12, node_of).rounds
    assert sum(node_of[each.source] != node_of[each.target] for each in first.transfers) == 3


def test_nodes_are_in_the_order_of_their_lowest_ranks() -> None:
    assert nodes_of((7, 2, 7, 0, 2)) == ((0, 2), (1, 4), (3,))


def test_ring_of_two_is_written_out() -> None:
    schedule = plan(Algorithm.RING, 3, (0, 0))
    assert [round_.transfers for round_ in schedule.rounds] == [
        (Transfer(0, 1, 0, 1, True), Transfer(1, 0, 1, 3, True)),
        (Transfer(0, 1, 1, 3, False), Transfer(1, 0, 0, 1, False)),
    ]


@pytest.mark.parametrize(
    ("numel", "node_of", "granule", "what"),
    [
        (4, (), 1, "an all-reduce needs at least one rank"),
        (-1, (0, 0), 1, "a buffer of -1 elements"),
        (4, (0, 0), 0, "slices cut at multiples of 0 elements"),
    ],
)
def test_what_cannot_be_planned_is_refused(numel: int, node_of: Sequence[int], granule: int, what: str) -> None:
    with pytest.raises(UserError, match=what) as refusal:
        plan(Algorithm.DIRECT, numel, node_of, granule=granule)
    assert refusal.value.remedy
