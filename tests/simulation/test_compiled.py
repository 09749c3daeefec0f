"""A PEF by the sections that it has: the same as if it were cut again for its own device."""

import pytest

from sambasim.compiler.compile import compile_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.costs.cut import Level
from sambasim.hardware.budget import Budget, budget_of, load_calibration
from sambasim.hardware.placement import Inventory, Placement, place, place_replicas
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.pef import read
from sambasim.simulation.mesh import MeshStep, predict_mesh
from sambasim.simulation.scaling import scale
from sambasim.simulation.step import predict_step
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program
from tests.support.examples import example_options

CALIBRATION, DEVICE = load_calibration(), load_device("sn30")


@pytest.fixture(scope="module", params=[("digits", "o3", 4), ("digits", "o0", None), ("char_gpt", "o1", None)])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Level, Budget]:
    name, level, tiles = request.param
    options = example_options(name, tmp_path_factory.mktemp(name))
    options = options.model_copy(update={"opt_level": level, "num_tiles": tiles, "data_parallel": True})
    model = build_model(options)
    inputs, by_keyword, _ = example_batch(model, options)
    path = compile_model(model, inputs, options, by_keyword=by_keyword).path
    return read(path).program, level, budget_of(DEVICE, CALIBRATION, tiles)


def _placement(replicas: int) -> Placement:
    return place(replicas, DEVICE, None, load_cluster("sn30-8"))


@pytest.mark.parametrize("path", SyncPath)
@pytest.mark.parametrize(("replicas", "micro_steps"), [(1, 1), (3, 4), (9, 1)])
def test_own_sections_give_what_cutting_again_gives(
    compiled: tuple[Program, Level, Budget], replicas: int, micro_steps: int, path: SyncPath
) -> None:
    program, level, budget = compiled
    placement = _placement(replicas)
    cut_again = scale(program, predict_step(program, budget, level, CALIBRATION, None, micro_steps), placement, path)
    step = predict_mesh(program, budget, CALIBRATION, placement, path, micro_steps)
    assert step.ranks[0].scaled.step.sections == cut_again.step.sections
    assert step.ranks[0].scaled.step.need == cut_again.step.need
    assert step.host_s == pytest.approx(cut_again.step.host_s)
    assert step.predicted_s == pytest.approx(cut_again.predicted_s)
    assert step.samples_per_s == pytest.approx(cut_again.samples_per_s)


def _step(program: Program, budget: Budget, micro_steps: int = 1, replicas: int = 2) -> MeshStep:
    return predict_mesh(program, budget, CALIBRATION, _placement(replicas), SyncPath.RDU, micro_steps)


def test_the_parts_are_the_total_and_micro_steps_repeat_the_model(compiled: tuple[Program, Level, Budget]) -> None:
    program, _, budget = compiled
    once, thrice = _step(program, budget), _step(program, budget, 3)
    for step in (once, thrice):
        parts = step.host_s + step.model_s + step.update_s + step.exposed_sync_s
        assert step.predicted_s == pytest.approx(parts)
    model_sections = [one for one in once.ranks[0].alone.sections if one.kind in (SectionKind.FWD, SectionKind.BCKWD)]
    again_s = once.model_s + len(model_sections) * CALIBRATION.host_s_per_section.value + once.ranks[0].alone.sent_s
    assert thrice.predicted_s == pytest.approx(once.predicted_s + 2 * again_s)
    assert thrice.update_s == pytest.approx(once.update_s)
    assert once.of_kind_s(SectionKind.FWD) < once.forward_s < once.predicted_s


def test_each_section_has_its_own_time(compiled: tuple[Program, Level, Budget]) -> None:
    program, _, budget = compiled
    assert program.training is not None
    sections = program.training.sections
    step = _step(program, budget)
    by_section_s = step.by_section_s(sections)
    assert list(by_section_s) == [section.index for section in sections]
    assert sum(by_section_s.values()) == pytest.approx(step.graph_s)
    for section, timed in zip(sections, step.ranks[0].scaled.step.sections, strict=False):
        if section.kind in (SectionKind.FWD, SectionKind.BCKWD):
            assert by_section_s[section.index] == timed.price.predicted_s
    alone = _step(program, budget, replicas=1).by_section_s(sections)
    exchanged = {s.index for s in sections if s.kind in (SectionKind.REDUCE, SectionKind.GATHER)}
    assert set(by_section_s) - set(alone) == exchanged


@pytest.mark.parametrize("path", SyncPath)
def test_replicas_that_mpi_puts_on_two_nodes_wait_for_the_network(path: SyncPath) -> None:
    budget, cluster = budget_of(DEVICE, CALIBRATION), load_cluster("sn30-8")
    here_s, apart_s = (
        predict_mesh(
            sample_program(), budget, CALIBRATION, place_replicas(Inventory(DEVICE, None, cluster), nodes), path
        ).predicted_s
        for nodes in ([0, 0], [0, 1])
    )
    assert here_s < apart_s
