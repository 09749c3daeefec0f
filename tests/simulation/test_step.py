"""Predicted steps of replicas of one rank and of several; with ZeRO 2 and 3, what a run moves, where and how often."""

import json
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.commands.variants import Variants
from sambasim.compiler.front import captured_from_options
from sambasim.costs.cut import Level
from sambasim.errors import OptionError
from sambasim.hardware.budget import Budget, budget_of
from sambasim.hardware.placement import Inventory, place, place_replicas
from sambasim.hardware.spec import ClusterSpec, LinkSpec, load_cluster, load_device
from sambasim.ir.dataflow import axis_of, groups_of, pass_and_update
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.ranks import in_slices
from sambasim.ir.schedule import ActionKind, bubble
from sambasim.pef import read
from sambasim.report.simulation import step_record
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.planning.strategy import Strategy
from sambasim.simulation.prediction import predict
from sambasim.simulation.scaling import SyncedRank, Track, with_sync
from sambasim.simulation.step import PredictedStep, step_of
from sambasim.simulation.sync import SyncPath, Wire
from tests.cli.typed import printed, refused
from tests.costs.test_costs import more_of
from tests.pef.samples import sample_program
from tests.support.examples import MICRO_BATCHES, ON_CHIPS, SEVERAL, compiled, example_options, in_stages
from tests.support.whole import whole_case

DEVICE = load_device("sn30")
CLUSTER = load_cluster(DEVICE.cluster)
PARALLEL = ("parallel.data_parallel=true", "parallel.world_size=2")


def predicted(
    program: Program,
    replicas: int = 1,
    micro_steps: int = 1,
    path: SyncPath = SyncPath.RDU,
    level: Level | None = None,
    tiles: int | None = None,
) -> PredictedStep:
    placement = place(replicas * program.ranks_of_replica, DEVICE, tiles, CLUSTER)
    return step_of(program, price_ranks(program, budget_of(DEVICE, tiles), None, micro_steps, level), placement, path)


@pytest.fixture(scope="module")
def paths(mesh_pef: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("meshes")
    return {
        "one": compiled("char_gpt", folder / "one", *SEVERAL, 'compile.opt_level="o1"'),
        "stages": in_stages("char_gpt", folder / "stages", *SEVERAL),
        "split": in_stages("char_gpt", folder / "split", *SEVERAL, schedule="zb-h1"),
        "chips": compiled("char_gpt", folder / "chips", *ON_CHIPS, *SEVERAL),
        "both": mesh_pef,
    }


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """By level of ZeRO; gradients are clipped."""
    folder, clipped = tmp_path_factory.mktemp("zero"), (*PARALLEL, "optimizer.max_grad_norm=0.5")
    levels = [(f"parallel.zero={zero}", *clipped) for zero in range(4)]
    return [read(compiled("char_gpt", folder / flags[0], *flags)).program for flags in levels]


@pytest.mark.parametrize("zero", range(4))
def test_a_mesh_of_replicas_of_one_rank_has_their_times(zero: int, programs: list[Program]) -> None:
    for path, (replicas, micro_steps) in product(SyncPath, [(1, 1), (2, 3), (9, 1)]):
        mesh = predicted(programs[zero], replicas, micro_steps, path)
        scaled, first = with_sync(mesh.alone, mesh.placement, path), mesh.first
        by_kind_s = scaled.step.device_s_by_kind
        assert first.host_s == pytest.approx(scaled.step.host_s)
        assert first.device_s == pytest.approx(by_kind_s[SectionKind.FWD] + by_kind_s[SectionKind.BCKWD])
        assert first.update_s == pytest.approx(by_kind_s[SectionKind.GRADNORM] + by_kind_s[SectionKind.OPT])
        assert first.exposed_sync_s == pytest.approx(scaled.exposed_sync_s, abs=1e-12)
        assert mesh.synced.hidden_sync_s == pytest.approx(scaled.hidden_sync_s, abs=1e-12)
        assert mesh.predicted_s == pytest.approx(scaled.predicted_s, abs=1e-12)
        assert mesh.samples_per_s == pytest.approx(replicas * scaled.step.samples / scaled.predicted_s, abs=1e-12)
        for kind in SectionKind:
            assert mesh.of_kind_s(kind) == pytest.approx(by_kind_s.get(kind) or sum(scaled.times_s(kind)))
        received_bytes = {wire.value: round(size) for wire, size in scaled.moved.received_bytes.items() if size}
        assert [axis.received_bytes for axis in step_record(mesh).axes] == [received_bytes] * (mesh.replicas > 1)


def parts_of(step: PredictedStep) -> float:
    """What the parts of a step add up to."""
    first, waited_s = step.first, sum(step.waited_s.values())
    return first.device_s + first.host_s + waited_s + first.update_s + first.exposed_sync_s


@pytest.mark.parametrize("name", ["one", "stages", "split", "chips", "both"])
def test_the_parts_of_a_step_add_up(name: str, paths: dict[str, Path]) -> None:
    program = read(paths[name]).program
    step, alone = predicted(program, replicas=2, micro_steps=3), predicted(program, replicas=2)
    assert step.predicted_s == pytest.approx(parts_of(step))
    assert step.first.exposed_sync_s > 0
    assert step.predicted_s == pytest.approx(alone.predicted_s + 2 * alone.passes.predicted_s), "micro-steps repeat"
    samples = 2 * 3 * program.micro_batches * program.batch_size
    assert step.samples_per_s == pytest.approx(samples / step.predicted_s)


@pytest.mark.parametrize("level", ["o0", "o1", "o3"])
def test_own_sections_give_what_cutting_again_gives_and_each_has_its_own_time(level: Level, tmp_path: Path) -> None:
    program = read(compiled("char_gpt", tmp_path, *SEVERAL, f'compile.opt_level="{level}"')).program
    steps = (predicted(program, 9, 4, SyncPath.HOST, sections) for sections in (None, level))
    own, cut_again = ((step.alone, step.synced.spans, step.predicted_s) for step in steps)
    assert own == cut_again
    sections, step = program.leading.sections, predicted(program, 2)
    by_section_s = step.by_section_s(sections)
    assert list(by_section_s) == [section.index for section in sections]
    assert sum(by_section_s.values()) == pytest.approx(step.graph_s)
    for section, timed in zip(sections, step.alone.model, strict=False):
        assert by_section_s[section.index] == timed.price.predicted_s
    exchanged = {s.index for s in sections if s.kind in (SectionKind.REDUCE, SectionKind.GATHER)}
    assert set(by_section_s) - set(predicted(program).by_section_s(sections)) == exchanged
    assert step.of_kind_s(SectionKind.FWD) < step.forward_s < step.predicted_s


@pytest.mark.parametrize("path", SyncPath)
def test_replicas_that_mpi_puts_on_two_nodes_send_over_the_network(path: SyncPath) -> None:
    inventory, ranks = Inventory(DEVICE, None, CLUSTER), price_ranks(sample_program(), budget_of(DEVICE))
    here, apart = (
        step_of(sample_program(), ranks, place_replicas(inventory, nodes), path) for nodes in ([0, 0], [0, 1])
    )
    assert here.synced.sync_s < apart.synced.sync_s


def test_replicas_apart_gather_while_the_next_step_computes(paths: dict[str, Path], programs: list[Program]) -> None:
    """Replicas that share nodes wait at the end of a step."""
    rates = {"rdus_per_node": 1, "host_memory_bytes_per_s": 1e3}  # the host is never quicker
    for program in (read(paths["one"]).program, programs[1]):  # of which the second clips gradients
        (rank,) = price_ranks(program, budget_of(DEVICE), level="o0")
        before_s = 0.0
        for bandwidth in (1e12, 1e8, 1e6):
            link = CLUSTER.network_link.model_copy(update={"bandwidth_bytes_per_s": bandwidth})
            cluster = CLUSTER.model_copy(update={**rates, "network_link": link})
            apart, sharing = (with_sync(rank, place(4, DEVICE, tiles, cluster), SyncPath.RDU) for tiles in (None, 4))
            for synced in (apart, sharing):
                links = [span for span in synced.spans if span.track is Track.LINKS]
                sections_s = sum(span.predicted_s for span in synced.spans if span.track is Track.SECTIONS)
                assert sections_s == pytest.approx(synced.step.device_s)
                assert sum(span.predicted_s for span in links) == pytest.approx(synced.sync_s)
                assert synced.sync_s + synced.slowest_s == pytest.approx(synced.exposed_sync_s + synced.hidden_sync_s)
                assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(links))
            assert sharing.predicted_s == pytest.approx(max(span.stop_s for span in sharing.spans))
            assert apart.predicted_s < max(span.stop_s for span in apart.spans), "the next step has begun"
            assert apart.predicted_s > max(before_s, 0.95 * apart.sync_s), "a link moves one step at a time"
            before_s = apart.predicted_s


def test_a_pipeline_is_idle_by_its_schedule_and_waits_for_tied_parameters(paths: dict[str, Path]) -> None:
    """The update of one waits for its gradient and sends it back."""
    program = read(paths["stages"]).program
    step = predicted(program)
    assert bubble(step.schedule) - 0.05 < step.idle_share < 0.5
    both = (ActionKind.FORWARD, ActionKind.BACKWARD)
    costs = [[cost.predicted_s for (kind, _), cost in rank.costs.items() if kind in both] for rank in step.ranks]
    slowest_s = max(map(sum, costs))
    assert step.passes.predicted_s >= MICRO_BATCHES * slowest_s
    assert step.waited_s["pp"] > 0
    half_bytes = program.symbols["chargpt__tokens__weight"].type.numel * 2  # bf16
    link = CLUSTER.peer_link
    message_s = link.latency_s + half_bytes / (link.bandwidth_bytes_per_s * CLUSTER.peer_links_per_rdu)
    for rank, messages in zip(step.ranks, (0, 2), strict=True):
        update_s = sum(section.price.predicted_s for section in rank.alone.update)
        assert rank.update_s == pytest.approx(update_s + messages * message_s)


def test_inputs_are_sent_once_a_pass_and_the_gradient_of_a_tied_parameter_has_its_size(tmp_path: Path) -> None:
    """By a rank with two stages too; activations grow with the samples."""
    step = predicted(read(in_stages("char_gpt", tmp_path, *SEVERAL, schedule="interleaved-1f1b")).program)
    for rank in step.ranks:
        forwards = [cost for (kind, _), cost in rank.costs.items() if kind is ActionKind.FORWARD]
        sections = sum(section.kind is SectionKind.FWD for section in rank.alone.sections)
        sent_s = sum(cost.host_s for cost in forwards) - sections * rank.alone.budget.start_s
        assert len(forwards) == 2
        assert sent_s == pytest.approx(rank.alone.sent_s, abs=1e-12)
    received, strategy = [], Strategy(1, stages=2, samples=2, passes=2)
    for batch_size in (1, 2):
        options = example_options("char_gpt", Path(), batch_size=batch_size)
        program = Variants(captured_from_options(options)[0], options).program(strategy)
        priced = price_ranks(program, budget_of(DEVICE), strategy.samples)
        step = step_of(program, priced, place(2, DEVICE, None, CLUSTER), SyncPath.RDU)
        received.append(step.ranks[0].costs[ActionKind.BACKWARD, 0].messages["pp"].received_bytes[Wire.PEER])
    assert received[0] == received[1]


def test_chips_wait_for_every_communication(paths: dict[str, Path]) -> None:
    program = read(paths["chips"]).program
    step, graph = predicted(program), program.leading
    kinds = ("comm.all_reduce", "comm.all_gather", "comm.reduce_scatter")
    in_pass = [node for section in pass_and_update(graph)[0] for node in graph.section_nodes(section)]
    count = sum(axis_of(node) == "tp" and node.operator in kinds for node in in_pass)
    latency_s = CLUSTER.peer_link.latency_s
    assert step.waited_s["tp"] > count * latency_s > 0
    assert step.idle_share == pytest.approx(0)


def test_a_pef_of_several_ranks_is_as_compiled(paths: dict[str, Path]) -> None:
    error = refused("simulate", str(paths["stages"]), "-b", "8,16")
    assert isinstance(error, OptionError)
    assert "has 2 ranks, and is predicted from a PEF at the batch size" in error.what
    assert "simulate CONFIG.toml -b 8,16" in str(error.remedy)
    assert "with its sections as compiled" in refused("simulate", str(paths["stages"]), "--o1").what


@pytest.mark.parametrize(("name", "ranks"), [("batch", 2), whole_case("pipeline", 2), whole_case("three_axes", 4)])
def test_a_config_is_predicted_as_its_pef(name: str, ranks: int, tmp_path: Path) -> None:
    config, flags = f"configs/parallelism/{name}.toml", ["--replicas", "1,2", "--json"]
    small = ["--set", "model.args.width=32", "--set", "model.args.layers=2"]
    printed("compile", "--config", config, *small, "--data-parallel", "--output-folder", str(tmp_path))
    of_pef = printed("simulate", str(tmp_path / name / f"{name}.pef"), *flags)
    assert printed("simulate", config, *small, *flags) == of_pef
    assert json.loads(of_pef.splitlines()[0])["ranks"] == ranks


def synced_of(
    program: Program, path: SyncPath = SyncPath.HOST, *, level: Level = "o3", replicas: int = 2, micro_steps: int = 1
) -> SyncedRank:
    found = predict(program, DEVICE, None, level, CLUSTER, (replicas,), micro_steps=micro_steps)
    return found.steps[path][0].synced


def test_sections_wait_for_what_a_run_moves_between_them(programs: list[Program]) -> None:
    """Before and behind each section, as the nodes of the program that a run executes."""
    micro_steps = 3
    for program in programs[2:]:
        training = in_slices(program).leading
        in_pass, _ = pass_and_update(training)
        expected: list[tuple[str, str]] = []
        for micro_step in range(micro_steps):
            for section in in_pass:
                nodes = [node for node in training.section_nodes(section) if groups_of(node)]
                gathers, reduces = (
                    [(kind, groups_of(node)[0]) for node in nodes if node.operator == operator]
                    for operator, kind in (("comm.all_gather", "GATHER"), ("comm.reduce_scatter", "REDUCE"))
                )
                last = reduces if micro_step == micro_steps - 1 else []
                expected += [*gathers, (section.kind, section.name), *last]
        step = synced_of(program, micro_steps=micro_steps)
        found = [(span.kind, span.name) for span in step.spans if span.track is not Track.HOST]
        assert found[: len(expected)] == expected
        assert ("GATHER" in {kind for kind, _ in expected}) == (program.zero == 3)
        assert step.exposed_sync_s == pytest.approx(step.sync_s + step.slowest_s), "nothing overlaps"
        assert step.predicted_s == pytest.approx(step.spans[-1].stop_s)
        starts = [span.start_s for span in step.spans]
        assert starts == sorted(starts), "nothing overlaps"


def test_levels_move_what_they_save(programs: list[Program]) -> None:
    by_rdu = [synced_of(program, SyncPath.RDU, replicas=16, micro_steps=2) for program in programs[1:]]
    assert all(step.spans == by_rdu[0].spans for step in by_rdu), "which ignores the level"
    whole, states, gradients, parameters = (synced_of(program) for program in programs)
    assert states.predicted_s == pytest.approx(gradients.predicted_s), "the same transfers, at other times"
    assert not whole.times_s(SectionKind.GATHER), "gradients are gathered, before the update"
    again = {span.name for span in parameters.spans if span.kind == SectionKind.GATHER}
    assert again == {group.name for group in programs[3].groups}
    thrice = synced_of(programs[3], micro_steps=3)
    assert sum(thrice.times_s(SectionKind.GATHER)) == pytest.approx(3 * sum(parameters.times_s(SectionKind.GATHER)))
    assert sum(thrice.times_s(SectionKind.REDUCE)) == pytest.approx(sum(parameters.times_s(SectionKind.REDUCE)))
    assert whole.step.sections[-1].load.traffic_bytes == pytest.approx(2 * states.step.sections[-1].load.traffic_bytes)
    # A group is freed behind a section, and kept where the next one reads it too.
    many = synced_of(programs[3], level="o0")
    assert len(many.times_s(SectionKind.GATHER)) > len(parameters.times_s(SectionKind.GATHER))
    assert many.moved.received_bytes[Wire.HOST] > parameters.moved.received_bytes[Wire.HOST]


def gathered_bytes(program: Program) -> int:
    """Over the host link, by one of two replicas in a pass: a half goes there, and a half comes back."""
    numel = {group.name: group.numel for group in program.groups}
    gathered = [groups_of(node) for node in in_slices(program).leading.nodes if node.operator == "comm.all_gather"]
    return sum(2 * numel[name] for (name,) in filter(None, gathered))


def test_stages_gather_in_every_micro_batch(tmp_path: Path) -> None:
    paths = [in_stages("char_gpt", tmp_path / str(level), *PARALLEL, f"parallel.zero={level}") for level in (2, 3)]
    gradients, parameters = (predicted(read(path).program, 2, path=SyncPath.HOST) for path in paths)
    for position in (0, 1):
        before, after = gradients.times_of(position), parameters.times_of(position)
        assert before.gathered.predicted_s == 0
        own = parameters.ranks[position].alone.program
        assert after.gathered.received_bytes[Wire.HOST] == gathered_bytes(own) * own.micro_batches
    assert parameters.passes_s > gradients.passes_s
    assert parameters.predicted_s == pytest.approx(parts_of(parameters))


BUDGET = budget_of(DEVICE, 4)

_REPLICAS = st.integers(1, 300)


@st.composite
def _clusters(draw: st.DrawFn) -> ClusterSpec:
    """Peers are joined by links like those to the host, whose memory is no faster than the devices' together."""
    bandwidth, latency = draw(st.floats(1e8, 1e12)), draw(st.floats(1e-9, 1e-4))
    cluster = load_cluster("sn30-8")
    link = cluster.peer_link.model_copy(update={"bandwidth_bytes_per_s": bandwidth, "latency_s": latency})
    network = {"bandwidth_bytes_per_s": draw(st.floats(1e8, 1e12)), "latency_s": draw(st.floats(1e-9, 1e-4))}
    rates = {"rdus_per_node": draw(st.integers(1, 16)), "peer_link": link, "peer_links_per_rdu": 1, "host_link": link}
    memory = {"host_memory_bytes_per_s": draw(st.floats(1e9, BUDGET.memory_bytes_per_s))}
    return cluster.model_copy(update=rates | memory | {"network_link": cluster.network_link.model_copy(update=network)})


def _scaled(replicas: int, path: SyncPath, cluster: ClusterSpec, budget: Budget = BUDGET) -> SyncedRank:
    (rank,) = price_ranks(sample_program(), budget, level="o3")
    return with_sync(rank, place(replicas, DEVICE, 4, cluster), path)


@given(_REPLICAS, st.sampled_from(SyncPath), _clusters())
def test_the_parts_are_the_total_and_spans_follow_each_other(
    replicas: int, path: SyncPath, cluster: ClusterSpec
) -> None:
    scaled, alone = _scaled(replicas, path, cluster), _scaled(1, path, cluster)
    assert (alone.sync_s, alone.exposed_sync_s, alone.path) == (0.0, 0.0, None)
    assert not {span.kind for span in alone.spans} & {SectionKind.REDUCE, SectionKind.GATHER}
    assert scaled.predicted_s == pytest.approx(max(span.stop_s for span in scaled.spans))
    assert scaled.predicted_s == pytest.approx(scaled.step.host_s + scaled.step.device_s + scaled.exposed_sync_s)
    assert scaled.sync_s + scaled.slowest_s == pytest.approx(scaled.exposed_sync_s + scaled.hidden_sync_s)
    assert scaled.hidden_sync_s >= -1e-12
    assert 0 < scaled.ideal_s <= scaled.predicted_s
    busy_s = {Track.LINKS: scaled.sync_s, Track.SECTIONS: scaled.step.device_s, Track.HOST: scaled.step.host_s}
    for track, seconds in busy_s.items():
        spans = [span for span in scaled.spans if span.track is track]
        assert sum(span.predicted_s for span in spans) == pytest.approx(seconds)
        assert all(span.start_s <= span.stop_s for span in spans)
        assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(spans))


@given(_REPLICAS, _clusters())
def test_the_host_is_never_quicker_on_the_same_links(replicas: int, cluster: ClusterSpec) -> None:
    host, device = (_scaled(replicas, path, cluster).predicted_s for path in (SyncPath.HOST, SyncPath.RDU))
    assert device <= host * (1 + 1e-9)


@given(_REPLICAS, st.sampled_from(SyncPath), _clusters(), st.floats(1, 100))
def test_more_links_units_and_bandwidth_are_never_slower(
    replicas: int, path: SyncPath, cluster: ClusterSpec, factor: float
) -> None:
    before = _scaled(replicas, path, cluster).predicted_s
    for name in (
        "peer_link", "host_link", "network_link", "host_memory_bytes_per_s", "peer_links_per_rdu", "host_links_per_rdu",
        "network_links_per_node",
    ):  # fmt: skip
        better = cluster.model_copy(update={name: _better(getattr(cluster, name), factor)})
        assert _scaled(replicas, path, better).predicted_s <= before * (1 + 1e-9)
    for budget in more_of(BUDGET, factor):
        assert _scaled(replicas, path, cluster, budget).predicted_s <= before * (1 + 1e-9)


def _better(value: LinkSpec | float, factor: float) -> LinkSpec | float:
    if not isinstance(value, LinkSpec):
        return value * int(factor) if isinstance(value, int) else value * factor
    better = {"bandwidth_bytes_per_s": value.bandwidth_bytes_per_s * factor, "latency_s": value.latency_s / factor}
    return value.model_copy(update=better)
