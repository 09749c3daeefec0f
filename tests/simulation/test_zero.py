"""ZeRO 2 and 3 in predicted steps: what a run moves, where and how often it moves it."""

from pathlib import Path

import pytest

from sambasim.costs.cut import Level
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.dataflow import groups_of, pass_and_update
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.ranks import in_slices
from sambasim.pef import read
from sambasim.simulation.prediction import predict
from sambasim.simulation.scaling import SyncedRank, Track
from sambasim.simulation.sync import SyncPath, Wire
from tests.simulation.test_step import predicted
from tests.support.examples import compiled, in_stages

DEVICE = load_device("sn30")
CLUSTER = load_cluster(DEVICE.cluster)
PARALLEL = ("parallel.data_parallel=true", "parallel.world_size=2")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """By level of ZeRO."""
    folder, flag = tmp_path_factory.mktemp("zero"), "parallel.zero={}"
    paths = [compiled("char_gpt", folder / str(level), *PARALLEL, flag.format(level)) for level in range(4)]
    return [read(path).program for path in paths]


def step_of(
    program: Program, path: SyncPath = SyncPath.HOST, *, level: Level = "o3", replicas: int = 2, micro_steps: int = 1
) -> SyncedRank:
    found = predict(program, DEVICE, None, level, CLUSTER, (replicas,), micro_steps=micro_steps)
    return found.steps[path][0].synced


def test_sync_by_rdu_is_the_same_at_every_level(programs: list[Program]) -> None:
    steps = [step_of(program, SyncPath.RDU, replicas=16, micro_steps=2) for program in programs]
    assert all(step.spans == steps[1].spans for step in steps[2:])


def test_sections_wait_for_what_a_run_moves_between_them(programs: list[Program]) -> None:
    """Before and behind each section, as the nodes of the program that a run executes."""
    micro_steps = 3
    for program in programs[2:]:
        training = in_slices(program).training
        assert training is not None
        in_pass, _ = pass_and_update(training)
        kinds = {"comm.all_gather": SectionKind.GATHER, "comm.reduce_scatter": SectionKind.REDUCE}
        expected: list[tuple[str, str]] = []
        for micro_step in range(micro_steps):
            for section in in_pass:
                nodes = training.section_nodes(section)
                moves = [(kinds[one.operator], groups_of(one)[0]) for one in nodes if one.operator in kinds]
                expected += [one for one in moves if one[0] is SectionKind.GATHER]
                expected.append((section.kind, section.name))
                if micro_step == micro_steps - 1:
                    expected += [one for one in moves if one[0] is SectionKind.REDUCE]
        step = step_of(program, micro_steps=micro_steps)
        found = [(span.kind, span.name) for span in step.spans if span.track is not Track.HOST]
        assert found[: len(expected)] == expected
        assert (SectionKind.GATHER in {kind for kind, _ in expected}) == (program.zero == 3)
        assert step.exposed_sync_s == pytest.approx(step.sync_s + step.slowest_s), "nothing overlaps"
        assert step.predicted_s == pytest.approx(step.spans[-1].stop_s)
        starts = [span.start_s for span in step.spans]
        assert starts == sorted(starts), "nothing overlaps"


def test_levels_move_what_they_save(programs: list[Program]) -> None:
    whole, states, gradients, parameters = (step_of(program) for program in programs)
    assert states.predicted_s == pytest.approx(gradients.predicted_s), "the same transfers, at other times"
    assert not whole.times_s(SectionKind.GATHER), "gradients are gathered, before the update"
    again = {span.name for span in parameters.spans if span.kind == SectionKind.GATHER}
    assert again == {group.name for group in programs[3].groups}
    thrice = step_of(programs[3], micro_steps=3)
    assert sum(thrice.times_s(SectionKind.GATHER)) == pytest.approx(3 * sum(parameters.times_s(SectionKind.GATHER)))
    assert sum(thrice.times_s(SectionKind.REDUCE)) == pytest.approx(sum(parameters.times_s(SectionKind.REDUCE)))
    assert whole.step.sections[-1].load.traffic_bytes == pytest.approx(2 * states.step.sections[-1].load.traffic_bytes)


def test_other_sections_gather_more_often(programs: list[Program]) -> None:
    """A group is freed behind a section, and kept where the next one reads it too."""
    few, many = (step_of(programs[3], level=level) for level in ("o3", "o0"))
    assert len(many.times_s(SectionKind.GATHER)) > len(few.times_s(SectionKind.GATHER))
    assert many.moved.received_bytes[Wire.HOST] > few.moved.received_bytes[Wire.HOST]


def gathered_bytes(program: Program) -> int:
    """Over the host link, by one of two replicas in a pass: a half goes there, and a half comes back."""
    numel = {group.name: group.numel for group in program.groups}
    training = in_slices(program).training
    assert training is not None
    gathered = [groups_of(node) for node in training.nodes if node.operator == "comm.all_gather"]
    return sum(2 * numel[name] for (name,) in filter(None, gathered))


def test_stages_gather_in_every_micro_batch(tmp_path: Path) -> None:
    paths = [in_stages("char_gpt", tmp_path / str(level), *PARALLEL, f"parallel.zero={level}") for level in (2, 3)]
    gradients, parameters = (predicted(read(path).program, 2, path=SyncPath.HOST) for path in paths)
    for position in (0, 1):
        before, after = gradients.times_of(position), parameters.times_of(position)
        assert before.gathered.predicted_s == 0
        own = parameters.ranks[position].program
        assert after.gathered.received_bytes[Wire.HOST] == gathered_bytes(own) * own.micro_batches
    assert parameters.passes_s > gradients.passes_s
    parts = parameters.model_s + parameters.host_s + parameters.update_s + parameters.exposed_sync_s
    assert parameters.predicted_s == pytest.approx(parts + sum(parameters.waited_s.values()))
