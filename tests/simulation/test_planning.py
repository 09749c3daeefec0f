"""The planner: its space, its estimates beside compiled programs, and laws that hold for every plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from sambasim.commands.variants import OfDtypes, Variants, changes_of
from sambasim.compiler.front import captured_from_options, shapes_from_options
from sambasim.compiler.passes import Fits, Place
from sambasim.costs.work import at_batch_size, work_of
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, load_cluster, load_device
from sambasim.ir.program import Program
from sambasim.ir.verify import verify
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.report.plan import TERMS, explanation, verdict
from sambasim.simulation.planning.one_rank import OneRank, Ranks
from sambasim.simulation.planning.search import Goal, Plan, Planner
from sambasim.simulation.planning.strategy import Priced, Space, Strategy, Terms
from sambasim.simulation.prediction import predict
from sambasim.simulation.step import predict_step
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.support.mpi import ROOT

BATCH = 64


@cache
def _options() -> CompileOptions:
    sizes = ["model.args.width=64", "model.args.layers=2", "training.batch_size=8", "optimizer.max_grad_norm="]
    return compile_options(ROOT / "configs" / "char_gpt.toml", None, sizes, {})


@cache
def _variants() -> Variants:
    captured, model = captured_from_options(_options())
    return Variants(captured, _options(), model)


@cache
def _program(strategy: Strategy) -> Program:
    return _variants().program(strategy)


def _planner(device: DeviceSpec | None = None, cluster: ClusterSpec | None = None) -> Planner:
    programs = OfDtypes(lambda dtype: _variants())
    return Planner(programs, device or load_device("sn30"), cluster or load_cluster("sn30-8"), "o3")


def _space(rdus: int = 4, only: Mapping[str, Sequence[object]] | None = None) -> Space:
    return Space(rdus, 8, BATCH, tiles=(4,), tiles_of_rdu=8, only=only or {})


@cache
def _plan(goal: Goal = Goal.THROUGHPUT) -> Plan:
    return _planner().plan("gpt", _space(), goal)


def _with_memory(size_bytes: int) -> DeviceSpec:
    return load_device("sn30").model_copy(update={"ddr_capacity_bytes": size_bytes})


def test_strategies_fill_the_batch_exactly_and_the_cluster_at_most() -> None:
    found = list(_space().strategies())
    assert len(found) == len(set(found))
    for one in found:
        assert one.global_batch == BATCH
        assert one.ranks <= (4 if one.tiles is None else 8)
        assert one.micro_batches == 1 or one.micro_batches >= one.stages
        assert one.ranks_of_replica == 1 or one.tiles is None
    seen = {(one.replicas, one.stages, one.tensor, one.chips) for one in found}
    assert {(4, 1, "none", 1), (1, 4, "none", 1), (1, 2, "weight", 2), (2, 1, "batch", 2)} <= seen
    assert {one.zero for one in found if one.copies > 1} == {0, 1, 2, 3}
    assert {one.schedule for one in found if one.stages == 2} == {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1"}
    only = list(_space(only={"stages": [2], "schedule": ["zb-h1"]}).strategies())
    assert only == [one for one in found if one.stages == 2 and one.schedule == "zb-h1"] != []


@pytest.mark.parametrize("tiles", [None, 4])
def test_one_replica_costs_what_simulate_predicts(tiles: int | None) -> None:
    exact = _planner().exact(Strategy(1, samples=8, passes=3, tiles=tiles))
    program = shapes_from_options(_options())
    device, cluster = load_device("sn30"), load_cluster("sn30-8")
    alone = predict(program, device, tiles, "o3", cluster, (1,), batch_size=8, micro_steps=3).alone
    assert exact.step_s == pytest.approx(alone.predicted_s, rel=1e-12)
    assert exact.fullest.total_bytes == alone.need.size_bytes


@pytest.mark.parametrize(
    "strategy", [Strategy(2, 2, samples=8, passes=4), Strategy(1, 1, "weight", 2, samples=8, passes=2)]
)
def test_a_mesh_costs_what_simulate_predicts(strategy: Strategy) -> None:
    device = load_device("sn30")
    placement = place(strategy.ranks, device, None, load_cluster("sn30-8"))
    budget = budget_of(device)
    step = predict_step(_program(strategy), budget, placement, SyncPath.RDU, strategy.accumulation_steps)
    exact = _planner().exact(strategy)
    assert exact.step_s == pytest.approx(step.predicted_s, rel=1e-12)
    assert exact.samples_per_s == pytest.approx(step.samples_per_s, rel=1e-12)


def test_estimates_are_near_what_is_compiled() -> None:
    estimator, errors = _planner().estimator, []
    for one in _plan().best:
        estimated = estimator.estimate(one.strategy)
        assert isinstance(estimated, Priced)
        errors.append(abs(estimated.step_s / one.step_s - 1))
        assert estimated.fullest.total_bytes == pytest.approx(one.fullest.total_bytes, rel=0.2)
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.2


def test_the_best_of_each_shape_are_compiled_and_in_order() -> None:
    best = _plan().best
    assert len({one.strategy.shape for one in best}) == len(best) == 10
    assert all(one.is_exact and one.problem is None for one in best)
    seconds = [one.step_s for one in best]
    assert all(after >= 0.99 * before for before, after in pairwise(seconds))
    everything = _plan().fitting
    assert best[0].step_s <= 1.1 * min(one.step_s for one in everything)


def test_goals_choose_by_memory_and_by_cost() -> None:
    fastest, leanest, cheapest = (_plan(goal).best[0] for goal in Goal)
    assert leanest.rdu_bytes < 0.8 * fastest.rdu_bytes
    assert cheapest.rdus * cheapest.step_s <= 1.01 * fastest.rdus * fastest.step_s


def test_no_point_of_the_frontier_is_beaten_by_what_was_priced() -> None:
    frontier = _plan().frontier
    assert len(frontier) > 1
    for before, after in pairwise(frontier):
        assert before.step_s <= after.step_s
        assert before.rdu_bytes > after.rdu_bytes
    for one in _plan().fitting:
        beaten = [best.step_s <= one.step_s and best.rdu_bytes <= one.rdu_bytes for best in frontier]
        assert any(beaten) or not one.is_exact
    # Strategies that estimates do not beat can be priced, too.
    priced = _planner().with_priced_frontier(_plan())
    assert len(priced.frontier) > len(frontier)
    assert all(one.is_exact for one in priced.frontier)
    assert {one.strategy for one in priced.everything} == {one.strategy for one in _plan().everything}


_NONE = Terms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _verdict(*best: Priced) -> dict[str, str]:
    return dict(verdict(replace(_plan(), best=best)))


def test_the_verdict_names_what_is_as_good_and_the_share_of_the_host() -> None:
    terms = [replace(_NONE, compute_s=0.6, host_s=0.4), replace(_NONE, compute_s=1.06), replace(_NONE, compute_s=1.08)]
    best = tuple(replace(one, terms=of) for one, of in zip(_plan().best, terms, strict=False))
    lines = _verdict(*best)
    assert lines["as good"].startswith("2: within 7% of it")
    assert lines["host"].startswith("40% of the best step is the host")
    assert {"as good", "host", "tiles"}.isdisjoint(_verdict(best[1]))


def test_the_verdict_says_why_rdus_are_idle_and_which_equal_has_the_fewest() -> None:
    found = _plan().best
    one = next(one for one in found if one.rdus == 1)
    every = [other for other in _plan().fitting if other.rdus == 4 and other.is_exact]
    other = min(every, key=lambda one: one.step_s)
    lines = _verdict(one, *found)
    assert lines["fewer RDUs"].startswith(f"1 of 4: on all, {other.strategy} takes ")
    lines = _verdict(replace(other, terms=one.terms), one)
    assert lines["as good"].endswith("; 2 has the fewest RDUs")
    assert "fewer RDUs" not in lines


def test_memory_is_that_of_an_rdu_which_replicas_may_share() -> None:
    shared = _planner().exact(Strategy(4, samples=16, tiles=4))
    assert (shared.sharing, shared.rdus) == (2, 2)
    assert shared.rdu_bytes == 2 * shared.fullest.total_bytes
    slow = replace(shared, terms=replace(shared.terms, host_s=shared.step_s))
    whole = next(one for one in _plan().best if one.sharing == 1)
    lines = _verdict(slow, whole)
    assert lines["tiles"].startswith("2 replicas share an RDU and its link to the host")
    assert f" {format_seconds(slow.step_s + shared.step_s)} at worst; then 2 is the best" in lines["tiles"]


def test_the_verdict_says_what_half_the_rdus_would_do() -> None:
    one = _plan().best[0]
    whole = replace(one, strategy=Strategy(4), rdus=4, terms=replace(_NONE, compute_s=1.0))
    half = replace(one, strategy=Strategy(2), rdus=2, terms=replace(_NONE, compute_s=1.5))
    shared = replace(one, strategy=Strategy(8, tiles=4), rdus=4, terms=replace(_NONE, host_s=1.0))
    assert _verdict(whole, half)["half the RDUs"] == "2 is 50% slower, with 2 of 4"
    found = _verdict(shared, half)["half the RDUs"]
    assert found == "2 is 25% faster, with 2 of 4, if replicas of one take turns at the host"


def test_few_layers_show_what_the_whole_model_costs() -> None:
    options = compile_options(ROOT / "configs" / "gpt_13b.toml", None, ["model.args.layers=16"], {"batch_size": 1})
    captured, model = captured_from_options(options)
    few = OfDtypes(lambda dtype: Variants(captured, options, model))
    whole = OfDtypes(lambda dtype: Variants(captured, options, model))
    assert few.repeated_layers("fp32") == 16
    whole.repeated_layers = lambda dtype: 0  # type: ignore[method-assign]  # so the whole model is compiled
    for strategy in (Strategy(2, samples=8), Strategy(2, tensor="weight", chips=2, samples=2, recompute="sections")):
        one, other = (
            Ranks(programs, load_device("sn30"), load_cluster("sn30-8")).of(strategy) for programs in (few, whole)
        )
        assert isinstance(one, OneRank)
        assert isinstance(other, OneRank)
        assert one.chain.priced_bytes < 0.5 * other.chain.priced_bytes
        assert (one.numel, one.chain.most_stages) == (other.numel, other.chain.most_stages)
        for name in ("sections", "groups", "start_s", "sent_s", "update_s", "spread_s", "operand_bytes"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=0.05), name
        assert one.gathered == pytest.approx(other.gathered, rel=0.05)
        assert one.memory.total_bytes == pytest.approx(other.memory.total_bytes, rel=0.01)
        assert one.messages.predicted_s == pytest.approx(other.messages.predicted_s, rel=0.05)
        for name in ("forward_s", "backward_s", "weights_s", "kept_bytes", "numel"):
            sums = [sum(getattr(layer, name) for layer in each.chain.layers) for each in (one, other)]
            assert sums[0] == pytest.approx(sums[1], rel=0.1), name


def test_rows_that_are_picked_follow_the_samples() -> None:
    of_eight, of_one = (
        shapes_from_options(_options().model_copy(update={"training": training}))
        for training in (_options().training, _options().training.model_copy(update={"batch_size": 1}))
    )
    works = [work_of(one.leading, one.symbols) for one in (of_eight, of_one)]
    scaled = at_batch_size(works[1], 1, 8)
    picks = [[read for stage in work.stages for read in stage.reads if read.picks] for work in (works[0], scaled)]
    assert picks[0]
    assert [read.part for read in picks[0]] == [read.part for read in picks[1]]


def test_what_fits_compiles_and_verifies() -> None:
    for goal in Goal:
        for one in _plan(goal).best[:4]:
            program = _program(one.strategy)
            options = _options().model_copy(update=changes_of(one.strategy, _options()))
            Fits(budget_of(load_device("sn30"), options.num_tiles))(program)
            verify(Place()(program))


def test_more_memory_never_makes_a_strategy_impossible() -> None:
    fitting: set[Strategy] = set()
    for size_bytes in (2 << 20, 4 << 20, 8 << 20, 1 << 30):
        planner = _planner(_with_memory(size_bytes))
        estimates = [planner.estimator.estimate(one) for one in _space(only={"schedule": ["1f1b"]}).strategies()]
        now = {one.strategy for one in estimates if isinstance(one, Priced) and one.problem is None}
        assert fitting <= now
        assert len(now) > len(fitting)
        fitting = now


@pytest.mark.parametrize("link", ["peer_link", "network_link", "host_link"])
def test_more_bandwidth_is_never_slower(link: str) -> None:
    cluster = load_cluster("sn30-8").model_copy(update={"rdus_per_node": 2})
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
    for one in strategies:
        slow, fast = before.exact(one).step_s, after.exact(one).step_s
        assert fast <= slow
        quicker += fast < slow
        assert _estimated_s(after, one) <= _estimated_s(before, one)
    assert quicker


def _estimated_s(planner: Planner, strategy: Strategy) -> float:
    found = planner.estimator.estimate(strategy)
    assert isinstance(found, Priced)
    return found.step_s


def test_a_strategy_that_does_not_fit_names_the_largest_part() -> None:
    planner = _planner(_with_memory(3 << 20))
    found = planner.exact(Strategy(1, 2, samples=16, passes=4))
    assert found.problem is not None
    assert found.problem.startswith("memory of stage 0: ")
    assert " of 3.0 MiB, " in found.problem
    assert found.problem.endswith("of it activations")
    plan = planner.plan("gpt", _space(), Goal.THROUGHPUT)
    assert plan.best
    assert all(one.fullest.total_bytes <= 3 << 20 for one in plan.best)


def test_too_many_stages_are_impossible() -> None:
    space = _space(64, only={"stages": [64], "replicas": [1], "recompute": ["none"]})
    plan = _planner().plan("gpt", space, Goal.THROUGHPUT)
    assert not plan.best
    assert plan.refused
    assert all(" stages at most" in one.why for one in plan.refused)


def test_terms_add_up_and_explain_the_difference() -> None:
    first, second = _plan().best[:2]
    for one in (first, second):
        assert sum(getattr(one.terms, name) for name in TERMS) == pytest.approx(one.step_s)
    lines = dict(explanation(first, second))
    assert next(iter(lines)) == "1 against 2"
    assert list(lines)[-1] == "memory of the fullest RDU"
    assert set(lines) - {"1 against 2", "memory of the fullest RDU"} <= set(TERMS.values())


def test_a_compiled_program_is_planned_as_its_model() -> None:
    compiled = Variants(shapes_from_options(_options()), _options())
    for strategy in (Strategy(2, samples=8), Strategy(1, 2, samples=8, passes=4), Strategy(1, 1, "weight", 2)):
        one, other = _program(strategy), compiled.program(strategy)
        assert one.training == other.training
        assert one.groups == other.groups
        assert one.device_bytes == other.device_bytes
