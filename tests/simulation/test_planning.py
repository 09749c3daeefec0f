"""The planner: its space, its estimates beside compiled programs, and laws that hold for every plan; memory by part:
against the addresses that a compiled program has, and slices counted by hand."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from sambasim.commands.variants import Variants, changes_of
from sambasim.compiler.front import captured_from_options, shapes_from_options
from sambasim.compiler.passes import Fits, Place
from sambasim.costs.work import at_batch_size, work_of
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, load_cluster, load_device
from sambasim.ir.program import Program
from sambasim.ir.verify import verify
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.report.plan import TERMS, best_rows, verdict
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.memory import memory_of
from sambasim.simulation.planning.one_rank import OneRank, Ranks
from sambasim.simulation.planning.search import Goal, Plan, Planner, order
from sambasim.simulation.planning.strategy import Priced, Space, Strategy, Terms
from sambasim.simulation.prediction import predict
from sambasim.simulation.step import step_of
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.support.mpi import ROOT
from tests.support.whole import whole

BATCH = 64
DEVICE, CLUSTER = load_device("sn30"), load_cluster("sn30-8")
CONFIG = ROOT / "configs" / "char_gpt.toml"


def _options(batch_size: int = 8) -> CompileOptions:
    sizes = ["model.args.width=64", "model.args.layers=2", "optimizer.max_grad_norm="]
    return compile_options(CONFIG, None, sizes, {"batch_size": batch_size})


@cache
def _compiled(batch_size: int = 8) -> Program:
    return shapes_from_options(_options(batch_size))


@cache
def _variants() -> Variants:
    captured, model = captured_from_options(_options())
    return Variants(captured, _options(), model)


@cache
def _program(strategy: Strategy) -> Program:
    return _variants().program(strategy)


def _planner(device: DeviceSpec | None = None, cluster: ClusterSpec | None = None) -> Planner:
    return Planner(lambda dtype: _variants(), device or DEVICE, cluster or CLUSTER, "o3")


def _space(rdus: int = 4, only: Mapping[str, Sequence[object]] | None = None) -> Space:
    return Space(rdus, 8, BATCH, tiles=(4,), tiles_of_rdu=8, only=only or {})


@cache
def _plan(goal: Goal = Goal.THROUGHPUT) -> Plan:
    return _planner().plan("gpt", _space(), goal)


def _with_memory(size_bytes: int) -> DeviceSpec:
    return DEVICE.model_copy(update={"ddr_capacity_bytes": size_bytes})


def test_strategies_fill_the_batch_exactly_and_the_cluster_at_most() -> None:
    found = list(_space().strategies())
    assert len(found) == len(set(found))
    for strategy in found:
        assert strategy.global_batch == BATCH
        assert strategy.ranks <= (4 if strategy.tiles is None else 8)
        assert strategy.micro_batches == 1 or strategy.micro_batches >= strategy.stages
        assert strategy.ranks_of_replica == 1 or strategy.tiles is None
    seen = {(strategy.replicas, strategy.stages, strategy.tensor, strategy.chips) for strategy in found}
    assert {(4, 1, "none", 1), (1, 4, "none", 1), (1, 2, "weight", 2), (2, 1, "batch", 2)} <= seen
    assert {strategy.zero for strategy in found if strategy.copies > 1} == {1, 2, 3}
    in_two = [strategy for strategy in found if strategy.stages == 2]
    assert {strategy.schedule for strategy in in_two} == {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1"}
    only = list(_space(only={"stages": [2], "schedule": ["zb-h1"]}).strategies())
    assert only == [strategy for strategy in in_two if strategy.schedule == "zb-h1"] != []


def test_a_strategy_costs_what_simulate_predicts() -> None:
    for tiles in (None, 4):
        exact = _planner().exact(Strategy(1, samples=8, passes=3, tiles=tiles))
        alone = predict(_compiled(), DEVICE, tiles, "o3", CLUSTER, (1,), batch_size=8, micro_steps=3).alone
        assert exact.step_s == pytest.approx(alone.predicted_s, rel=1e-12)
        assert exact.fullest.total_bytes == alone.need.size_bytes
    for strategy in (Strategy(2, 2, samples=8, passes=4), Strategy(1, 1, "weight", 2, samples=8, passes=2)):
        placement, steps = place(strategy.ranks, DEVICE, None, CLUSTER), strategy.accumulation_steps
        ranks = price_ranks(_program(strategy), budget_of(DEVICE), micro_steps=steps)
        step = step_of(_program(strategy), ranks, placement, SyncPath.RDU)
        exact = _planner().exact(strategy)
        assert exact.step_s == pytest.approx(step.predicted_s, rel=1e-12)
        assert exact.samples_per_s == pytest.approx(step.samples_per_s, rel=1e-12)


def test_the_best_of_each_shape_are_compiled_in_order_and_near_their_estimates() -> None:
    best, estimator, errors = _plan().best, _planner().estimator, []
    assert len({priced.strategy.shape for priced in best}) == len(best) == 10
    assert all(priced.is_exact and priced.problem is None for priced in best)
    assert all(after.step_s >= 0.99 * before.step_s for before, after in pairwise(best))
    assert best[0].step_s <= 1.1 * min(priced.step_s for priced in _plan().fitting)
    for priced in best:
        estimated = estimator.estimate(priced.strategy)
        assert isinstance(estimated, Priced)
        errors.append(abs(estimated.step_s / priced.step_s - 1))
        assert estimated.fullest.total_bytes == pytest.approx(priced.fullest.total_bytes, rel=0.2)
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.2


def test_goals_choose_by_memory_and_by_cost_and_what_they_choose_compiles_and_verifies() -> None:
    fastest, leanest, cheapest = (_plan(goal).best[0] for goal in Goal)
    assert leanest.rdu_bytes < 0.8 * fastest.rdu_bytes
    assert cheapest.rdus * cheapest.step_s <= 1.01 * fastest.rdus * fastest.step_s
    for strategy in (priced.strategy for goal in Goal for priced in _plan(goal).best[:4]):
        options = _options().model_copy(update=changes_of(strategy, _options()))
        Fits(budget_of(DEVICE, options.num_tiles))(_program(strategy))
        verify(Place()(_program(strategy)))


def test_no_point_of_the_frontier_is_beaten_by_what_was_priced() -> None:
    frontier = _plan().frontier
    assert len(frontier) > 1
    for before, after in pairwise(frontier):
        assert before.step_s <= after.step_s
        assert before.rdu_bytes > after.rdu_bytes
    for priced in _plan().fitting:
        beaten = [best.step_s <= priced.step_s and best.rdu_bytes <= priced.rdu_bytes for best in frontier]
        assert any(beaten) or not priced.is_exact
    # Strategies that estimates do not beat can be priced, too.
    more = _planner().with_priced_frontier(_plan())
    assert len(more.frontier) > len(frontier)
    assert all(priced.is_exact for priced in more.frontier)
    assert {priced.strategy for priced in more.everything} == {priced.strategy for priced in _plan().everything}


def _terms(**seconds: float) -> Terms:
    return Terms(**{**dict.fromkeys(TERMS, 0.0), **seconds})


def _verdict(*best: Priced) -> dict[str, str]:
    return dict(verdict(replace(_plan(), best=best)))


def test_the_verdict_names_what_is_as_good_the_share_of_the_host_and_why_rdus_are_idle() -> None:
    found = _plan().best
    terms = [_terms(compute_s=0.6, host_s=0.4), _terms(compute_s=1.06), _terms(compute_s=1.08)]
    best = [replace(priced, terms=of) for priced, of in zip(found, terms, strict=False)]
    lines = _verdict(*best)
    assert lines["as good"].startswith("2: within 7% of it")
    assert lines["host"].startswith("40% of the best step is the host")
    assert {"as good", "host", "tiles"}.isdisjoint(_verdict(best[1]))
    alone = next(priced for priced in found if priced.rdus == 1)
    on_all = [priced for priced in _plan().fitting if priced.rdus == 4 and priced.is_exact]
    other = min(on_all, key=lambda priced: priced.step_s)
    assert _verdict(alone, *found)["fewer RDUs"].startswith(f"1 of 4: on all, {other.strategy} takes ")
    lines = _verdict(replace(other, terms=alone.terms), alone)
    assert lines["as good"].endswith("; 2 has the fewest RDUs")
    assert "fewer RDUs" not in lines


def test_host_waiting_for_stages_and_sync_are_shares_of_one_step() -> None:
    rows = best_rows(replace(_plan(), best=(_planner().exact(Strategy(2, stages=2, samples=4, passes=4)),)))
    shares = [float(str(rows[0][f"{part}_share"])) for part in ("host", "bubble", "sync")]
    assert min(shares) > 0
    assert sum(shares) < 1


def test_memory_is_that_of_an_rdu_which_replicas_may_share() -> None:
    shared = _planner().exact(Strategy(4, samples=16, tiles=4))
    assert (shared.sharing, shared.rdus) == (2, 2)
    assert shared.rdu_bytes == 2 * shared.fullest.total_bytes
    slow = replace(shared, terms=replace(shared.terms, host_s=shared.step_s))
    whole = replace(shared, strategy=Strategy(4, samples=16), rdus=4, terms=_terms(compute_s=1.5 * slow.step_s))
    assert sorted([slow, whole], key=lambda priced: order(priced, Goal.THROUGHPUT)) == [whole, slow]
    lines = _verdict(slow, whole)
    assert lines["tiles"].startswith("2 replicas share an RDU and its link to the host")
    assert f" {format_seconds(slow.step_s + shared.step_s)} at worst, by which it is ranked" in lines["tiles"]
    whole = replace(shared, strategy=Strategy(4), rdus=4, terms=_terms(compute_s=1.0))
    half = replace(shared, strategy=Strategy(2), rdus=2, terms=_terms(compute_s=1.5))
    shared = replace(shared, strategy=Strategy(8, tiles=4), rdus=4, terms=_terms(host_s=1.0))
    of_half = [_verdict(best, half)["half the RDUs"] for best in (whole, shared)]
    turns = ", if replicas of one take turns at the host"
    assert of_half == ["2 is 50% slower, with 2 of 4", f"2 is 25% faster, with 2 of 4{turns}"]


@whole
def test_few_layers_show_what_the_whole_model_costs() -> None:
    options = compile_options(ROOT / "configs" / "gpt_13b.toml", None, ["model.args.layers=16"], {"batch_size": 1})
    captured, model = captured_from_options(options)
    few, whole = (Variants(captured, options, model) for _ in range(2))
    shorter = few.shorter(Strategy(2, samples=8), 2)
    assert shorter is not None
    assert shorter.layers == 16
    whole.shorter = lambda *asked: None  # type: ignore[method-assign]  # so the whole model is compiled
    for strategy in (Strategy(2, samples=8), Strategy(2, tensor="weight", chips=2, samples=2, recompute="sections")):
        of_few = Ranks(lambda dtype: few, DEVICE, CLUSTER).of(strategy)
        of_whole = Ranks(lambda dtype: whole, DEVICE, CLUSTER).of(strategy)
        assert isinstance(of_few, OneRank)
        assert isinstance(of_whole, OneRank)
        assert of_few.chain.priced_bytes < 0.5 * of_whole.chain.priced_bytes
        assert (of_few.numel, of_few.chain.most_stages) == (of_whole.numel, of_whole.chain.most_stages)
        for name in ("sections", "groups", "sent_s", "update_s", "spread_s", "operand_bytes", "gathered"):
            assert getattr(of_few, name) == pytest.approx(getattr(of_whole, name), rel=0.05), name
        assert of_few.memory.total_bytes == pytest.approx(of_whole.memory.total_bytes, rel=0.01)
        assert of_few.messages.predicted_s == pytest.approx(of_whole.messages.predicted_s, rel=0.05)
        for name in ("forward_s", "backward_s", "weights_s", "kept_bytes", "numel"):
            sums = [sum(getattr(layer, name) for layer in rank.chain.layers) for rank in (of_few, of_whole)]
            assert sums[0] == pytest.approx(sums[1], rel=0.1), name


def test_rows_that_are_picked_follow_the_samples() -> None:
    of_eight, of_one = (work_of(program.leading, program.symbols) for program in (_compiled(), _compiled(1)))
    works = of_eight, at_batch_size(of_one, 1, 8)
    parts = [[read.part for stage in work.stages for read in stage.reads if read.picks] for work in works]
    assert parts[0] == parts[1] != []


def test_more_memory_never_makes_a_strategy_impossible() -> None:
    fitting: set[Strategy] = set()
    for size_bytes in (2 << 20, 4 << 20, 8 << 20, 1 << 30):
        planner = _planner(_with_memory(size_bytes))
        estimates = map(planner.estimator.estimate, _space(only={"schedule": ["1f1b"]}).strategies())
        now = {priced.strategy for priced in estimates if isinstance(priced, Priced) and priced.problem is None}
        assert fitting <= now
        assert len(now) > len(fitting)
        fitting = now


@pytest.mark.parametrize("link", ["peer_link", "network_link", "host_link"])
def test_more_bandwidth_is_never_slower(link: str) -> None:
    cluster = CLUSTER.model_copy(update={"rdus_per_node": 2})
    bandwidth = 4 * getattr(cluster, link).bandwidth_bytes_per_s
    faster = getattr(cluster, link).model_copy(update={"bandwidth_bytes_per_s": bandwidth})
    before, after = _planner(cluster=cluster), _planner(cluster=cluster.model_copy(update={link: faster}))
    strategies = [
        Strategy(4, samples=16),
        Strategy(4, samples=16, zero=3),
        Strategy(1, 2, "weight", 2, samples=16, passes=4),
        Strategy(2, 2, samples=8, passes=4, zero=2),
    ]
    quicker = 0
    for strategy in strategies:
        slow, fast = before.exact(strategy), after.exact(strategy)
        estimates = [planner.estimator.estimate(strategy) for planner in (after, before)]
        in_order = [estimate.step_s for estimate in estimates if isinstance(estimate, Priced)]
        assert fast.step_s <= slow.step_s
        assert len(in_order) == 2
        assert in_order == sorted(in_order)
        quicker += fast.step_s < slow.step_s
    assert quicker


def test_a_strategy_that_does_not_fit_names_the_largest_part_and_too_many_stages_are_impossible() -> None:
    planner = _planner(_with_memory(3 << 20))
    problem = planner.exact(Strategy(1, 2, samples=16, passes=4)).problem
    assert problem is not None
    assert re.fullmatch(r"memory of stage 0: .* of 3\.0 MiB, .* of it activations", problem)
    best = planner.plan("gpt", _space(), Goal.THROUGHPUT).best
    assert best
    assert all(priced.fullest.total_bytes <= 3 << 20 for priced in best)
    space = _space(64, only={"stages": [64], "replicas": [1], "recompute": ["none"]})
    plan = _planner().plan("gpt", space, Goal.THROUGHPUT)
    assert not plan.best
    assert plan.refused
    assert all(" stages at most" in why for why in plan.refused.values())


def test_a_compiled_program_is_planned_as_its_model() -> None:
    variants = Variants(_compiled(), _options())
    for strategy in (Strategy(2, samples=8), Strategy(1, 2, samples=8, passes=4), Strategy(1, 1, "weight", 2)):
        of_model, of_compiled = _program(strategy), variants.program(strategy)
        assert of_model.training == of_compiled.training
        assert of_model.groups == of_compiled.groups
        assert of_model.device_bytes == of_compiled.device_bytes


@pytest.fixture(scope="module")
def program() -> Program:
    return shapes_from_options(compile_options(CONFIG, None, ["model.args.layers=2"], {"data_parallel": True}))


def test_what_a_program_keeps_is_what_it_has_addresses_for(program: Program) -> None:
    memory = memory_of(program)
    assert {memory_of(replace(program, zero=zero)) for zero in range(4)} == {memory}, "of one replica"
    alignment = 512 * len(program.symbols)
    assert program.device_bytes - alignment <= memory.total_bytes <= program.device_bytes
    assert memory.gradients == memory.parameters
    assert memory.states == 2 * memory.parameters  # AdamW


def test_each_level_of_zero_cuts_one_part_more_but_gradients_of_several_passes(program: Program) -> None:
    numel = sum(group.numel for group in program.groups)
    levels = [memory_of(replace(program, zero=zero), replicas=8) for zero in range(4)]
    whole = [4 * numel, 4 * numel, 8 * numel]
    for zero, memory in enumerate(levels):
        wanted = [size / 8 if level <= zero else size for size, level in zip(whole, (3, 2, 1), strict=True)]
        assert [memory.parameters, memory.gradients, memory.states] == pytest.approx(wanted, rel=0.01)
    largest = max(4 * (group.numel - 64 * math.ceil(group.numel / 8 / 64)) for group in program.groups)
    assert levels[1].buffers == levels[0].buffers
    assert levels[2].buffers - levels[1].buffers >= largest  # whole gradients of a section
    assert levels[3].buffers - levels[2].buffers >= largest  # and parameters
    totals = [memory.total_bytes for memory in levels]
    assert totals == sorted(totals, reverse=True)
    several = memory_of(replace(program, zero=2), replicas=8, passes=4)
    assert several.gradients == several.parameters > 7 * levels[2].gradients
    assert several.buffers < levels[2].buffers


def test_inputs_grow_with_samples(program: Program) -> None:
    one = memory_of(program)
    more = memory_of(program, samples=2 * program.batch_size)
    inputs = sum(symbol.type.size_bytes for symbol in program.symbols.values() if symbol.kind == "input")
    assert more == replace(one, buffers=one.buffers + inputs)
