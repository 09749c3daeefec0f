"""Steps on this machine: from made-up rates, in which every operator of a pass takes as long as another; and what is
derived from rates for other numbers of samples, and for ranks that share cores."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from sambasim.commands.variants import Variants
from sambasim.compiler.front import captured_from_options
from sambasim.errors import OptionError
from sambasim.hardware.spec import load_cluster
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.program import Program
from sambasim.options.compile import compile_options
from sambasim.simulation.machine import Machine, PassTimes, Rates, between
from sambasim.simulation.planning.here import Here, plan_here, spaced
from sambasim.simulation.planning.search import Goal
from sambasim.simulation.planning.strategy import Space, Strategy, Terms

ALONE = load_cluster("sn30-8")
NODE_S, ADDING_S, BATCH_S, UPDATE_S = 1e-3, 4e-3, 5e-4, 6e-3
NUMEL = 65 * 96 + 97 * 80 + 81 * 10
PRIVATE_BYTES, SHARED_BYTES, HEAP_BYTES = 1000, 1200, 1 << 24


def net() -> nn.Module:
    first, last = nn.Linear(64, 96), nn.Linear(80, 10)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), last)


class Made:
    """A model of three layers, its programs, and a machine on which each of its nodes takes NODE_S."""

    def __init__(self) -> None:
        fields = ["data.source=digits", "loss.name=cross_entropy", "optimizer.name=adamw", "training.batch_size=8"]
        options = compile_options(None, f"{__name__}:net", fields, {})
        captured, model = captured_from_options(options)
        self.program = Variants(captured, options, model).program
        graph = self.program(Strategy(2)).leading
        self.nodes = [node.name for section in pass_and_update(graph)[0] for node in graph.section_nodes(section)]

    def machine(self, cores: int, ranks: Sequence[int]) -> Machine:
        of_pass = PassTimes(8, dict.fromkeys(self.nodes, NODE_S), ADDING_S, BATCH_S, HEAP_BYTES)
        same = (PRIVATE_BYTES, SHARED_BYTES, (of_pass,), UPDATE_S, 2 * UPDATE_S, 0.0, 1e15)
        return Machine(cores, 1 << 34, 1e15, 1e15, 0.0, tuple(Rates(count, *same) for count in ranks))


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def test_a_step_is_its_passes_its_batches_and_its_update(made: Made) -> None:
    here = Here(made.program, made.machine(4, (1, 2, 3, 4)), ALONE)
    terms = here.price(Strategy(1, samples=8, passes=3)).terms
    assert terms.compute_s == pytest.approx(3 * len(made.nodes) * NODE_S + 2 * ADDING_S)
    assert terms.host_s == pytest.approx(3 * BATCH_S)
    assert terms.step_s == pytest.approx(terms.compute_s + terms.host_s + UPDATE_S)
    again = here.price(Strategy(1, samples=8, recompute="full")).terms
    assert again.compute_s > len(made.nodes) * NODE_S, "what is made again takes as long again"
    crowded = Here(made.program, made.machine(1, (1,)), ALONE).price(Strategy(3, samples=8))
    assert crowded.terms.compute_s == pytest.approx(3 * len(made.nodes) * NODE_S), "three ranks share a core"
    assert crowded.capacity_bytes == (1 << 34) // 3


def test_the_update_goes_by_what_is_read_and_written(made: Made) -> None:
    """adamw: parameter and two states both ways, and one gradient of each replica; measured with as many ranks."""
    two = Here(made.program, made.machine(2, (1, 2)), ALONE)
    terms = two.price(Strategy(2, samples=8)).terms
    assert terms.update_s + terms.sync_s == pytest.approx(UPDATE_S)
    assert terms.sync_s == pytest.approx(UPDATE_S / 8), "one word of 8 is read from the other rank"
    four = two.price(Strategy(4, samples=8)).terms
    assert four.update_s + four.sync_s == pytest.approx(2 * UPDATE_S * (10 / 4) / (8 / 2)), "and two share a core"
    by_host = two.price(Strategy(2, samples=8, zero=2)).terms
    assert by_host.step_s - terms.step_s == pytest.approx(UPDATE_S), "twice as long was measured"


def test_a_pipeline_waits_as_its_schedule_says(made: Made) -> None:
    """Two stages of a forward and b backward nodes each: the first and the last micro-batch are alone on a rank."""
    passes = 4
    priced = Here(made.program, made.machine(2, (1, 2)), ALONE).price(Strategy(1, stages=2, samples=8, passes=passes))
    terms, whole_s = priced.terms, len(made.nodes) * NODE_S
    pipelined_s = terms.compute_s + terms.messages_s + terms.bubble_s
    slowest_s = (terms.compute_s - (passes - 1) * ADDING_S) / passes
    assert whole_s / 2 <= slowest_s < whole_s
    assert pipelined_s >= whole_s + (passes - 1) * slowest_s
    assert pipelined_s <= whole_s + (passes - 1) * (slowest_s + ADDING_S) * 1.1
    at_once = Here(made.program, made.machine(2, (1, 2)), ALONE).price(replace(priced.strategy, schedule="gpipe"))
    assert at_once.memory[1].activations == passes * priced.memory[1].activations > 0, "1f1b has one at a time there"
    crowded = Here(made.program, made.machine(1, (1,)), ALONE).price(priced.strategy).terms
    assert crowded.step_s - crowded.update_s == pytest.approx(2 * (terms.step_s - terms.update_s)), "waits are busy"


def test_between_nodes_messages_overlap_and_take_time_of_the_processors(made: Made) -> None:
    def on_nodes(rate: float, processor_s: float = 0.0) -> Terms:
        link = ALONE.network_link.model_copy(
            update={"bandwidth_bytes_per_s": rate, "latency_s": 0.0, "processor_s_per_byte": processor_s}
        )
        hosts = ALONE.model_copy(update={"network_link": link, "nodes": 2})
        return Here(made.program, made.machine(2, (1, 2)), hosts).price(Strategy(2, samples=8)).terms

    free, pass_s, each_way_bytes = on_nodes(1e15), len(made.nodes) * NODE_S, 4 * NUMEL / 2
    words = (2 + 2 + 2 * 2) / 2 / (1 + 2 + 2 * 2)  # moved by a rank of two, relative to one alone, which was measured
    assert free.step_s == pytest.approx(pass_s + BATCH_S + UPDATE_S * words, rel=1e-3)
    slow, busy = on_nodes(each_way_bytes / 0.01), on_nodes(each_way_bytes / 0.01, 1e-7)
    assert 0.01 < slow.step_s - free.step_s < 0.02, "20 ms of messages overlap in part"
    assert 0 < busy.step_s - slow.step_s < 1e-7 * 2 * each_way_bytes, "and then take time of the processors"
    assert on_nodes(each_way_bytes).step_s == pytest.approx(2.0, rel=0.05)


def test_parameters_are_once_on_the_machine_and_a_process_has_memory_before_its_first_pass(made: Made) -> None:
    here = Here(made.program, made.machine(4, (1, 2, 3, 4)), ALONE)
    alone, four = here.price(Strategy(1, samples=8)).fullest, here.price(Strategy(4, samples=8)).fullest
    assert alone.parameters == pytest.approx(4 * NUMEL, rel=0.02)
    assert four.parameters == pytest.approx(alone.parameters / 4, rel=0.02)
    assert four.gradients == alone.gradients
    assert four.states == pytest.approx(alone.states / 4, rel=0.02)
    process = PRIVATE_BYTES + SHARED_BYTES + HEAP_BYTES
    in_passes = alone.activations + alone.temporaries
    assert in_passes + alone.buffers == pytest.approx(process, rel=0.01), "heap and libraries"
    assert here.price(Strategy(1, samples=16)).fullest.activations == 2 * alone.activations


def test_a_plan_has_all_numbers_of_ranks_says_what_is_measured_and_refuses_once(made: Made) -> None:
    spaces = [Space(count, 3, 24) for count in (1, 2, 3)]
    found = plan_here("net", made.program, made.machine(2, (1, 2)), ALONE, spaces, Goal.THROUGHPUT, has_mpi=True)
    strategies = {priced.strategy for priced in found.everything}
    assert {strategy.ranks for strategy in strategies} == {1, 2, 3}
    assert len(strategies) == len(found.everything)
    assert [priced.step_s for priced in found.best] == sorted(priced.step_s for priced in found.best)
    asked: list[Strategy] = []

    def program(strategy: Strategy) -> Program:
        asked.append(strategy)
        if strategy.stages > 1:
            raise OptionError("it has no stages")
        return made.program(strategy)

    spaces = [Space(2, 2, 8, only={"schedule": ["1f1b"], "recompute": ["none"], "tensor": ["none"]})]
    found = plan_here("net", program, made.machine(2, (1, 2)), ALONE, spaces, Goal.THROUGHPUT, has_mpi=True)
    assert set(found.refused.values()) == {"it has no stages"}
    assert len(found.refused) > 1
    assert sum(strategy.stages > 1 for strategy in asked) == 1


def passes(samples: int, seconds: float, heap_bytes: int = 0) -> PassTimes:
    return PassTimes(samples, {"a": seconds, "b": 2 * seconds}, seconds / 10, seconds / 100, heap_bytes)


def machine(seconds: dict[int, float]) -> Machine:
    """Of two cores, on which passes by so many ranks take so long."""
    rates = [Rates(ranks, 100, 60, (passes(4, each_s),), 0.5, 0.7, 1e-6, 1e9) for ranks, each_s in seconds.items()]
    return Machine(2, 1 << 30, 1e10, 1e11, 0.0, tuple(rates))


def test_a_pass_between_two_that_were_measured_is_on_the_line_between_them() -> None:
    known = (passes(2, 0.2, 100), passes(6, 1.0, 300))
    found = between(known, 3)
    assert found.samples == 3
    assert found.seconds == pytest.approx({"a": 0.4, "b": 0.8})
    assert (found.adding_s, found.batch_s, found.heap_bytes) == pytest.approx((0.04, 0.004, 150))
    assert between(known, 6) == known[1]
    assert between(known, 1).seconds == known[0].seconds, "no less than the fewest"
    assert between(known, 12).pass_s == pytest.approx(6.0), "in proportion beyond the most"


def test_ranks_that_share_cores_take_as_much_longer_and_what_changing_between_them_costs() -> None:
    two = machine({1: 1.0, 2: 1.1, 4: 2.42})
    assert [two.rates_at(count).ranks for count in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert [two.crowd(count) for count in (1, 2)] == [1.0, 1.0]
    assert two.crowd(4) == pytest.approx(2 * 1.1), "2.42 of 2 × 1.1"
    assert two.crowd(3) == pytest.approx(1.5 * 1.05), "half of the 10 %"
    alone = machine({1: 1.0, 2: 1.1})
    assert (alone.crowd(2), alone.crowd(3)) == (1.0, 1.5), "nothing was measured with more"
    three = machine({1: 1.0, 2: 1.0, 3: 1.5 * 1.2, 5: 2.5 * 1.4})
    assert [three.crowd(count) for count in (2, 3, 4, 5)] == pytest.approx([1.0, 1.5 * 1.2, 2 * 1.3, 2.5 * 1.4])


def test_the_most_samples_are_measured_with_a_half_a_quarter_and_the_fewest() -> None:
    given = ({1, 2, 3, 4, 6, 8, 12, 24}, {5}, {3, 9})
    assert list(map(spaced, given)) == [[1, 6, 12, 24], [5], [3, 9]]
