"""Predicted steps of replicas of one rank and of several."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sambasim.cli.main import sambasim
from sambasim.commands.variants import Variants
from sambasim.compiler.front import captured_from_options
from sambasim.costs.cut import Level
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Inventory, place, place_replicas
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.dataflow import axis_of, pass_and_update
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.schedule import ActionKind, bubble
from sambasim.options.compile import compile_options
from sambasim.pef import read
from sambasim.report.simulation import step_record
from sambasim.simulation.alone import MODEL_KINDS, price_ranks
from sambasim.simulation.planning.strategy import Strategy
from sambasim.simulation.scaling import with_sync
from sambasim.simulation.step import PredictedStep, predict_step, step_of
from sambasim.simulation.sync import SyncPath, Wire
from tests.pef.samples import sample_program
from tests.support.examples import MICRO_BATCHES, compiled, in_stages
from tests.support.mpi import ROOT
from tests.support.whole import whole_case

DEVICE = load_device("sn30")
CLUSTER = load_cluster(DEVICE.cluster)
ON_CHIPS = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"')
SEVERAL = ("parallel.data_parallel=true", "parallel.world_size=1")


def predicted(
    program: Program, replicas: int = 1, micro_steps: int = 1, path: SyncPath = SyncPath.RDU, level: Level | None = None
) -> PredictedStep:
    placement = place(replicas * program.ranks_of_replica, DEVICE, None, CLUSTER)
    return predict_step(program, budget_of(DEVICE), placement, path, micro_steps, level)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("meshes")
    return {
        "one": compiled("char_gpt", folder / "one", *SEVERAL, 'compile.opt_level="o1"'),
        "stages": in_stages("char_gpt", folder / "stages", *SEVERAL),
        "split": in_stages("char_gpt", folder / "split", *SEVERAL, schedule="zb-h1"),
        "chips": compiled("char_gpt", folder / "chips", *ON_CHIPS, *SEVERAL),
        "both": in_stages("char_gpt", folder / "both", *ON_CHIPS, *SEVERAL),
    }


@pytest.fixture(scope="module", params=range(4))
def replicas_of_one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """With ZeRO 0 to 3, and gradients that are clipped."""
    level = (f"parallel.zero={request.param}", "optimizer.max_grad_norm=0.5")
    return read(compiled("char_gpt", tmp_path_factory.mktemp("one"), *SEVERAL, *level)).program


@pytest.mark.parametrize("path", SyncPath)
@pytest.mark.parametrize(("replicas", "micro_steps"), [(1, 1), (2, 3), (9, 1)])
def test_a_mesh_of_replicas_of_one_rank_has_their_times(
    replicas_of_one_rank: Program, replicas: int, micro_steps: int, path: SyncPath
) -> None:
    program = replicas_of_one_rank
    mesh = predicted(program, replicas, micro_steps, path)
    scaled = with_sync(program, mesh.alone, mesh.placement, path)
    by_kind_s = scaled.step.device_s_by_kind
    assert mesh.host_s == pytest.approx(scaled.step.host_s)
    assert mesh.model_s == pytest.approx(by_kind_s[SectionKind.FWD] + by_kind_s[SectionKind.BCKWD])
    assert mesh.update_s == pytest.approx(by_kind_s[SectionKind.GRADNORM] + by_kind_s[SectionKind.OPT])
    assert mesh.exposed_sync_s == pytest.approx(scaled.exposed_sync_s)
    assert mesh.hidden_sync_s == pytest.approx(scaled.hidden_sync_s, abs=1e-12)
    assert mesh.predicted_s == pytest.approx(scaled.predicted_s)
    assert mesh.samples_per_s == pytest.approx(scaled.samples_per_s)
    for kind in SectionKind:
        assert mesh.of_kind_s(kind) == pytest.approx(by_kind_s.get(kind) or sum(scaled.times_s(kind)))
    (axis,) = step_record(mesh).axes if replicas > 1 else [None]
    if axis is not None:
        received_bytes = {wire.value: round(size) for wire, size in scaled.moved.received_bytes.items() if size}
        assert axis.received_bytes == received_bytes


@pytest.mark.parametrize("name", ["one", "stages", "split", "chips", "both"])
def test_the_parts_of_a_step_add_up(name: str, paths: dict[str, Path]) -> None:
    program = read(paths[name]).program
    step, alone = predicted(program, replicas=2, micro_steps=3), predicted(program, replicas=2)
    parts = step.model_s + step.host_s + sum(step.waited_s.values()) + step.update_s + step.exposed_sync_s
    assert step.predicted_s == pytest.approx(parts)
    assert step.exposed_sync_s > 0
    assert step.predicted_s == pytest.approx(alone.predicted_s + 2 * alone.passes.predicted_s), "micro-steps repeat"
    samples = 2 * 3 * program.micro_batches * program.batch_size
    assert step.samples_per_s == pytest.approx(samples / step.predicted_s)


@pytest.mark.parametrize("level", ["o0", "o1", "o3"])
def test_own_sections_give_what_cutting_again_gives(level: Level, tmp_path: Path) -> None:
    program = read(compiled("char_gpt", tmp_path, *SEVERAL, f'compile.opt_level="{level}"')).program
    own, cut_again = (predicted(program, 9, 4, SyncPath.HOST, sections) for sections in (None, level))
    assert own.alone == cut_again.alone
    assert own.synced.spans == cut_again.synced.spans
    assert own.predicted_s == cut_again.predicted_s


def test_each_section_has_its_own_time(paths: dict[str, Path]) -> None:
    program = read(paths["one"]).program
    assert program.training is not None
    sections, step = program.training.sections, predicted(program, 2)
    by_section_s = step.by_section_s(sections)
    assert list(by_section_s) == [section.index for section in sections]
    assert sum(by_section_s.values()) == pytest.approx(step.graph_s)
    for section, timed in zip(sections, step.synced.step.sections, strict=False):
        if section.kind in MODEL_KINDS:
            assert by_section_s[section.index] == timed.price.predicted_s
    exchanged = {s.index for s in sections if s.kind in (SectionKind.REDUCE, SectionKind.GATHER)}
    assert set(by_section_s) - set(predicted(program).by_section_s(sections)) == exchanged
    assert step.of_kind_s(SectionKind.FWD) < step.forward_s < step.predicted_s


@pytest.mark.parametrize("path", SyncPath)
def test_replicas_that_mpi_puts_on_two_nodes_wait_for_the_network(path: SyncPath) -> None:
    inventory = Inventory(DEVICE, None, CLUSTER)
    here, apart = (
        predict_step(sample_program(), budget_of(DEVICE), place_replicas(inventory, nodes), path)
        for nodes in ([0, 0], [0, 1])
    )
    assert here.predicted_s < apart.predicted_s


def test_a_pipeline_is_idle_by_its_schedule_and_its_unequal_stages(paths: dict[str, Path]) -> None:
    step = predicted(read(paths["stages"]).program)
    assert bubble(step.schedule) - 0.05 < step.idle_share < 0.5
    both = (ActionKind.FORWARD, ActionKind.BACKWARD)
    slowest = max(sum(one.predicted_s for (kind, _), one in rank.costs.items() if kind in both) for rank in step.ranks)
    assert step.passes.predicted_s >= MICRO_BATCHES * slowest
    assert step.waited_s["pp"] > 0


def test_inputs_and_outputs_are_sent_once_a_pass(tmp_path: Path) -> None:
    """By a rank with two stages too."""
    step = predicted(read(in_stages("char_gpt", tmp_path, *SEVERAL, schedule="interleaved-1f1b")).program)
    for rank in step.ranks:
        forwards = [cost for (kind, _), cost in rank.costs.items() if kind is ActionKind.FORWARD]
        sections = sum(section.kind is SectionKind.FWD for section in rank.alone.sections)
        sent_s = sum(cost.host_s for cost in forwards) - sections * rank.alone.start_s
        assert len(forwards) == 2
        assert sent_s == pytest.approx(rank.alone.sent_s, abs=1e-12)


def test_a_gradient_that_is_sent_has_its_size_for_any_samples() -> None:
    """That of the tied embeddings, which both stages read; activations grow with the samples."""
    received: dict[int, float] = {}
    strategy = Strategy(1, stages=2, samples=2, passes=2)
    for batch_size in (1, 2):
        options = compile_options(ROOT / "configs" / "char_gpt.toml", None, [f"training.batch_size={batch_size}"], {})
        captured, _ = captured_from_options(options)
        program = Variants(captured, options).program(strategy)
        priced = price_ranks(program, budget_of(DEVICE), strategy.samples)
        step = step_of(program, priced, place(2, DEVICE, None, CLUSTER), SyncPath.RDU)
        first = step.ranks[0].costs[ActionKind.BACKWARD, 0].messages["pp"]
        received[batch_size] = first.received_bytes[Wire.PEER]
    assert received[1] == received[2]


def test_chips_wait_for_every_communication(paths: dict[str, Path]) -> None:
    program = read(paths["chips"]).program
    step, training = predicted(program), program.training
    assert training is not None
    kinds = ("comm.all_reduce", "comm.all_gather", "comm.reduce_scatter")
    in_pass = [node for section in pass_and_update(training)[0] for node in training.section_nodes(section)]
    count = sum(axis_of(node) == "tp" and node.operator in kinds for node in in_pass)
    latency_s = CLUSTER.peer_link.latency_s
    assert step.waited_s["tp"] > count * latency_s > 0
    assert step.idle_share == pytest.approx(0)


def test_the_update_of_a_tied_parameter_waits_for_its_gradient_and_sends_it_back(paths: dict[str, Path]) -> None:
    program = read(paths["stages"]).program
    first, last = predicted(program).ranks
    half_bytes = program.symbols["chargpt__tokens__weight"].type.numel * 2  # bf16
    link = CLUSTER.peer_link
    message_s = link.latency_s + half_bytes / (link.bandwidth_bytes_per_s * CLUSTER.peer_links_per_rdu)
    for rank, messages in ((first, 0), (last, 2)):
        update_s = sum(one.price.predicted_s for one in rank.alone.sections if one.kind not in MODEL_KINDS)
        assert rank.update_s == pytest.approx(update_s + messages * message_s)


def test_another_batch_size_of_a_pef_is_refused(paths: dict[str, Path]) -> None:
    result = CliRunner().invoke(sambasim, ["simulate", str(paths["stages"]), "-b", "8,16"])
    assert isinstance(result.exception, OptionError)
    assert "a replica of char_gpt has 2 ranks, and is predicted from a PEF at the batch size" in result.exception.what
    assert "sambasim simulate CONFIG.toml -b 8,16" in str(result.exception.remedy)
    result = CliRunner().invoke(sambasim, ["simulate", str(paths["stages"]), "--o1"])
    assert isinstance(result.exception, OptionError)
    assert "with its sections as compiled" in result.exception.what


@pytest.mark.parametrize(("name", "ranks"), [("batch", 2), whole_case("pipeline", 2), whole_case("three_axes", 4)])
def test_a_config_is_predicted_as_its_pef(name: str, ranks: int, tmp_path: Path) -> None:
    config, runner = f"configs/parallelism/{name}.toml", CliRunner()
    several = ["--data-parallel", "--output-folder", str(tmp_path)]
    assert runner.invoke(sambasim, ["compile", "--config", config, *several]).exit_code == 0
    flags = ["--replicas", "1,2", "--json"]
    of_pef = runner.invoke(sambasim, ["simulate", str(tmp_path / name / f"{name}.pef"), *flags]).stdout
    of_config = runner.invoke(sambasim, ["simulate", config, *flags]).stdout
    assert of_config == of_pef
    assert json.loads(of_pef.splitlines()[0])["ranks"] == ranks
