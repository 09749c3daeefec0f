"""Promise one: device sync, host sync and one process that plays all ranks give the same bits, for every layout of a
model on ranks; and so do replicas of one rank that accumulate over its micro-batches, unless tensors are cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from torch import nn

from sambasim import pef
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.report.simulation import step_record
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.step import step_of
from sambasim.simulation.sync import SyncPath, Wire
from tests.faults.command import sambasim
from tests.mpi.bodies.train import Run
from tests.mpi.layouts import REPLICATED, UNCLIPPED, Layout
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, run_of, runs_of, train, train_here
from tests.support.compiled import compile_from_options
from tests.support.examples import MICRO_BATCH, VARIANTS, CompiledExample, example_options
from tests.support.mpi import RANKS
from tests.support.whole import is_whole, whole, whole_case

WAYS: Mapping[str, Mapping[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "emulated": {}}
THREADS = {"threads": {"reduce_on_rdu": True, "short_bytes": 0}}
"""What larger models do between nodes."""
ALL, HOST = tuple(WAYS), ("host",)


def check_equal(found: Mapping[str, Trained]) -> None:
    """Runs are called SUBJECT WAY: those of each subject have the same bits."""
    first: dict[str, Trained] = {}
    for name, trained in found.items():
        assert trained.outcome == first.setdefault(name.rpartition(" ")[0], trained).outcome, name


def check_apart(outcomes: Sequence[object]) -> None:
    """Configurations that differ cannot all have been trained if two end alike."""
    assert len(set(outcomes)) == len(outcomes)


# Replicas of one rank: every example.


def check_exact(
    np: int,
    paths: Sequence[Path],
    env: Mapping[str, str] | None = None,
    threads: int = 1,
    accumulations: Sequence[int] = (1, 2),
    ways: Mapping[str, Mapping[str, Any]] = WAYS,
) -> list[object]:
    """Each PEF gives the same bits by all `ways` and in one process. Returns what each came to."""
    named = {f"{path.stem} ×{count}": (path, count) for path in paths for count in accumulations}
    ways = {**ways, "emulated": {"emulate": np}}
    asked = {"steps": 2, "threads": threads}
    runs = [runs_of(name, path, ways, accumulation=count, **asked) for name, (path, count) in named.items()]
    found = train(np, [*chain(*runs)], env=env)
    check_equal(found)
    return [found[f"{name} device"].outcome for name in named]


@pytest.fixture(scope="module")
def paths(examples: list[CompiledExample]) -> list[Path]:
    """Every example with every optimizer, with and without clipping; by default, every example with one of the six."""
    return [one.path for one in (examples if is_whole() else examples[:: VARIANTS + 1])]


@pytest.fixture(scope="module")
def few(examples: list[CompiledExample], paths: list[Path]) -> list[Path]:
    """Every example: those with AdamW; by default, all of `paths`."""
    return [one.path for one in examples if one.optimizer == "adamw"] if is_whole() else paths


@pytest.mark.parametrize(
    ("np", "nodes"),
    [
        *((np, {}) if np == 2 else whole_case(np, {}) for np in RANKS if np > 1),
        whole_case(2, TWO_NODES),
        whole_case(2, EACH_ALONE),
        whole_case(3, EACH_ALONE),
        (4, TWO_NODES),
        whole_case(4, EACH_ALONE),
        whole_case(8, {}),
        whole_case(8, TWO_NODES),
        whole_case(8, EACH_ALONE),
    ],
)
def test_device_host_and_emulation_are_equal_for_every_example(
    np: int, nodes: dict[str, str], paths: list[Path], few: list[Path]
) -> None:
    """With and without accumulation; SGD, Adam and AdamW, with and without clipping, are all there. MPICH makes nodes
    of one machine: two, or each rank on its own."""
    chosen = few if nodes else paths
    if np == 8:
        chosen = [path for path in few if path.stem.startswith(("digits", "char_gpt"))]
    ways = {**WAYS, **(THREADS if nodes else {})}
    check_apart(check_exact(np, chosen, nodes, accumulations=(1, 2) if is_whole() or not nodes else (2,), ways=ways))


@whole
def test_they_are_equal_with_two_threads_too(few: list[Path]) -> None:
    check_apart(check_exact(2, few, threads=2))


def transposed_digits() -> nn.Module:
    """A classifier of digits, whose parameters are not contiguous."""
    convolution, head = nn.Conv2d(1, 4, 3), nn.Linear(144, 10)
    for layer in (convolution, head):
        layer.weight.data = layer.weight.data.transpose(0, -1).contiguous().transpose(0, -1)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), head)


@whole
def test_a_group_for_each_parameter_trains_to_the_same_bits(tmp_path: Path) -> None:
    """As one group for each backward section does. And parameters need not be contiguous."""
    paths = []
    for grouping in ("section", "parameter"):
        chosen = (f"parallel.gradient_groups={grouping}", f"compile.pef_name={grouping}")
        paths.append(compile_from_options(example_options("lstm_classifier", tmp_path, *chosen)).path)
    assert [len(pef.read(path).program.groups) for path in paths] == [1, 10]
    target = "model.target=tests.mpi.test_bits:transposed_digits"
    paths.append(compile_from_options(example_options("digits", tmp_path, target, "model.args={}")).path)
    outcomes = check_exact(2, paths)
    assert outcomes[:2] == outcomes[2:4]
    check_apart(outcomes[2:])


# All other layouts. With AdamW, accumulation and evaluation.


@dataclass(frozen=True, slots=True)
class Job:
    """An MPI job that trains each layout by each way. Of fewer `processes` than ranks, each runs a whole replica."""

    name: str
    processes: int
    layouts: tuple[Layout, ...]
    ways: tuple[str, ...] = ALL
    env: Mapping[str, str] | None = None
    steps: int = 2
    late_s: float = 0.0
    whole: bool = True


ONE, TWO, APART = "", ", two nodes", ", a rank a node"
NODES: Mapping[str, Mapping[str, str]] = {ONE: {}, TWO: TWO_NODES, APART: EACH_ALONE}

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
SCHEDULED = tuple(
    Layout(model, pp=2, others=(f"parallel.schedule={schedule}", f"parallel.recompute={between}", REPLICATED, *others))
    for model, schedule, between, *others in (
        *(("char_gpt", schedule, "none") for schedule in SCHEDULES),
        ("resnet", "1f1b", "none", UNCLIPPED),
        ("char_gpt", "1f1b", "sections"),
        ("char_gpt", "interleaved-1f1b", "full"),
        ("resnet", "zb-h1", "full", UNCLIPPED),
    )
)


def slices(layout: Layout, *levels: int) -> tuple[Layout, ...]:
    """`layout` at levels of ZeRO."""
    return tuple(
        Layout(layout.model, layout.dp, layout.pp, layout.tp, layout.chips, (*layout.others, f"parallel.zero={level}"))
        for level in levels
    )


ALL_LEVELS = tuple(slices(Layout("char_gpt", dp=dp), 0, 1, 2, 3) for dp in range(5))
"""By number of replicas."""

ON_CHIPS = Layout("resnet", chips=2, others=(UNCLIPPED, REPLICATED)), Layout("resnet", chips=2, others=(UNCLIPPED,))
"""A program for several replicas, and one for one. With BatchNorm."""

MODELS = ("bert_of_many_words", "bert", "gpt", "mlp", "resnet", "lstm_classifier", "char_gpt", "digits")
SIZES = ((1, 1, 2), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (3, 1, 2), (1, 2, 2), (2, 2, 2))
"""Of dp, pp and tp."""


def meshes(ranks: int, models: Sequence[str] = MODELS) -> tuple[Layout, ...]:
    """Without those whose stages would lack parameters."""
    found = (Layout(model, *sizes) for model in models for sizes in SIZES)
    most = {"lstm_classifier": 2, "digits": 1}
    return tuple(one for one in found if one.ranks == ranks and one.pp <= most.get(one.model, 4))


def of_processes(processes: int, models: Sequence[str] = MODELS) -> tuple[Layout, ...]:
    """Meshes whose replicas have several ranks, without those that fill more than the 8 RDUs of a node."""
    found = (Layout(model, processes, *sizes) for model in models for sizes in ((2, 1), (1, 2), (2, 2)))
    return tuple(one for one in found if one.ranks <= 8)


def many_words(*options: str, dp: int = 1) -> tuple[Layout, ...]:
    """Two stages, of which the last updates the tied embeddings of the first."""
    return tuple(Layout("bert_of_many_words", dp=dp, pp=2, others=(option,)) for option in options)


JOBS = (
    Job("schedules", 2, SCHEDULED, HOST, whole=False),
    Job("schedules in one process", 1, SCHEDULED, HOST),
    Job("slices", 4, ALL_LEVELS[4], env=EACH_ALONE, steps=3, whole=False),
    *(
        Job(f"slices of {dp} replicas{on}", dp, ALL_LEVELS[dp], env=NODES[on], steps=3)
        for dp, on in ((2, ONE), (3, APART), (4, TWO), (4, ONE))
    ),
    Job("slices of a ResNet", 4, slices(Layout("resnet", dp=4, others=(UNCLIPPED,)), 1, 3), steps=3),
    Job("slices of stages", 4, slices(Layout("char_gpt", dp=2, pp=2), 1, 3)),
    Job("slices of parts", 4, slices(Layout("char_gpt", dp=2, tp=2), 1, 3)),
    Job("two processes", 2, (*ON_CHIPS, Layout("bert", dp=2, tp=2)), whole=False),
    *(
        Job(f"chips of {dp} replicas{on}", 2 * dp, (Layout("char_gpt", dp=dp, chips=2),), env=NODES[on])
        for dp, on in ((2, TWO), (2, APART), (3, ONE))
    ),
    Job("stages on chips", 4, (Layout("resnet", pp=2, chips=2),)),
    Job(
        "four processes",
        4,
        (
            *(one for one in meshes(4, MODELS[:1]) if one.pp == 2),
            Layout("char_gpt", dp=2, tp=2),
            Layout("char_gpt", dp=2, chips=2, others=("compile.dtype=bf16",)),
        ),
        whole=False,
    ),
    *(
        Job(f"{model} on {ranks} ranks{on}", ranks, meshes(ranks, (model,)), env=NODES[on])
        for model in MODELS
        for ranks, nodes in ((2, (ONE, APART)), (4, NODES), (6, (ONE,)), (8, (ONE, TWO)))
        for on in nodes
    ),
    Job("a transposed value", 2, (Layout("Transposed", tp=2),)),
    Job(
        "moved updates", 2, many_words(*(f"parallel.schedule={one}" for one in ("gpipe", "interleaved-1f1b", "zb-h1")))
    ),
    Job("moved updates of slices", 4, many_words(*(f"parallel.zero={level}" for level in range(4)), dp=2)),
    # Without a norm, no rank waits for another between its update and the message.
    Job("a late reduction", 4, many_words(UNCLIPPED, dp=2), ("device", "emulated"), late_s=0.05),
    *(
        Job(
            f"whole replicas at ZeRO {' '.join(map(str, levels))}",
            2,
            tuple(slices(one, level)[0] for one, level in zip(of_processes(2, ("gpt",)), levels, strict=True)),
        )
        for levels in ((3, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 0))
    ),
    *(
        Job(f"{processes} whole replicas of {model}{on}", processes, of_processes(processes, (model,)), env=NODES[on])
        for model in MODELS
        for processes, on in ((3, ONE), (2, APART), (4, TWO))
    ),
)
BY_NAME = {job.name: job for job in JOBS}
ACCUMULATION = 2
Results: TypeAlias = Callable[[str], Mapping[str, Trained]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bits")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Results:
    """What each run of the job called so came to; the job is run once."""
    return cache(lambda name: run_job(BY_NAME[name], folder))


def run_job(job: Job, folder: Path) -> Mapping[str, Trained]:
    """Runs are called LAYOUT WAY; those called `replicas` are of replicas of one rank."""
    runs: dict[str, Run] = {}
    references: dict[str, str] = {}
    asked: dict[str, Any] = {"steps": job.steps, "evaluate": True, "late_s": job.late_s}
    for layout in job.layouts:
        several = {"one_process_per_replica": True} if 1 < job.processes < layout.ranks else {}
        ways = {**{way: {**WAYS[way], **several} for way in WAYS}, "emulated": {"emulate": layout.dp}}
        for name, how in ((f"{layout} {way}", ways[way]) for way in job.ways):
            runs[name] = run_of(name, layout.compiled(folder), accumulation=ACCUMULATION, **asked, **how)
        if layout.tp == 1:
            passes, of_one_rank = layout.passes(ACCUMULATION), layout.replicas
            name = references[f"{layout} replicas"] = f"{of_one_rank} ×{passes}"
            path = of_one_rank.compiled(folder)
            runs[name] = run_of(name, path, accumulation=passes, emulate=of_one_rank.dp, **asked)
    found = train(job.processes, list(runs.values()), env=job.env)
    ours = {name: one for name, one in found.items() if name not in references.values()}
    return ours | {name: found[reference] for name, reference in references.items()}


@pytest.mark.parametrize("name", [whole_case(job.name) if job.whole else job.name for job in JOBS])
def test_each_layout_has_the_same_bits_by_every_way(name: str, trained: Results) -> None:
    job, found = BY_NAME[name], trained(name)
    check_equal(found)
    for layout in job.layouts:
        for way in job.ways:
            summary = found[f"{layout} {way}"].summary
            assert {axis: size for axis, size in summary.mesh.items() if size > 1} == layout.mesh
            assert (summary.world_size, summary.chips) == (layout.dp, layout.chips)
            assert (summary.batch_size, summary.global_batch_size) == (layout.batch_size, layout.batch_size * layout.dp)
            axes = {"pp", "tp"} & layout.mesh.keys()
            assert {"pp"} & axes <= summary.waited_s.keys() <= axes  # what stays whole waits for nothing along tp
            if layout.dp * layout.chips > 1:
                assert summary.sync == way


def test_stages_are_placed_on_ranks(trained: Results) -> None:
    found = trained("schedules")
    places = [f"rank {rank} (local {rank}): dp 0, pp {rank}" for rank in range(2)]
    for layout in SCHEDULED:
        assert found[f"{layout} host"].summary.mesh == {"dp": 1, "pp": 2}
        assert {"mesh dp 1 × pp 2, 2 ranks", *places} <= set(found[f"{layout} host"].notices)


def test_slices_travel_otherwise_and_the_run_says_what_it_keeps(trained: Results) -> None:
    sliced, device, whole = (
        trained("slices")[f"{ALL_LEVELS[4][level]} {way}"].summary
        for level, way in ((3, "host"), (3, "device"), (0, "host"))
    )
    assert sliced.bytes.network != whole.bytes.network
    assert any(line.startswith("ZeRO 3: rank 0 keeps") for line in sliced.notices)
    assert any(line.startswith("ZeRO 3 saves nothing more with --reduce-on-rdu") for line in device.notices)


def test_a_run_says_whose_buffers_of_several_chips_it_keeps(trained: Results) -> None:
    notices = trained("two processes")[f"{ON_CHIPS[0]} device"].notices
    assert any("per chip; those of the first chip" in notice for notice in notices)


@whole
def test_where_a_tied_parameter_is_updated(folder: Path) -> None:
    """The jobs of moved updates really move them; with ZeRO 2 and 3, and without states, nothing is gained."""

    def moved(layout: Layout) -> bool:
        training = pef.read(layout.compiled(folder)).program.training
        assert training is not None
        return any(node.operator == "comm.copy" for node in training.nodes)

    of_slices = BY_NAME["moved updates of slices"].layouts
    assert [moved(one) for one in of_slices] == [True, True, False, False]
    assert all(moved(one) for one in BY_NAME["moved updates"].layouts)
    assert not moved(many_words("optimizer.name=sgd")[0])


def test_a_prediction_has_the_bytes_of_the_run(folder: Path) -> None:
    """Over host links, in bf16 instead of float32."""
    steps, paths = 2, {str(layout): layout.compiled(folder) for layout in ALL_LEVELS[2]}
    device = load_device("sn30")
    placement = place(2, device, None, load_cluster(device.cluster))
    runs = [run_of(name, path, steps=steps, accumulation=ACCUMULATION) for name, path in paths.items()]
    for name, trained in train(2, runs).items():
        program, summary = pef.read(paths[name]).program, trained.summary
        assert summary.predicted is not None
        ranks = price_ranks(program, budget_of(device), micro_steps=ACCUMULATION)
        step = step_of(program, ranks, placement, SyncPath.HOST)
        assert summary.predicted.predicted_step_s == step.predicted_s
        predicted_bytes = 2 * 2 * steps * step_record(step).axes[0].received_bytes[Wire.HOST.value]
        assert summary.bytes.device_to_host + summary.bytes.host_to_device == predicted_bytes


# A cut product adds its parts in another order: nearly the same.

PLAN = 'parallel.tensor_plan={ tokens = "colwise", "blocks.*.mlp.2" = "colwise" }'
NEAR = (
    Layout("char_gpt", tp=2),
    Layout("digits", tp=2, others=(UNCLIPPED,)),
    *((Layout("char_gpt", tp=2, others=(PLAN,)),) if is_whole() else ()),
)


@pytest.mark.parametrize("layout", NEAR, ids=["char_gpt", "digits", "a plan that gathers"][: len(NEAR)])
def test_a_cut_model_trains_as_the_whole_one(layout: Layout, folder: Path) -> None:
    runs = [run_of(str(one), one.compiled(folder), steps=20, evaluate=True) for one in (layout.replicas, layout)]
    whole, cut = (one.summary for one in train_here(runs).values())
    assert cut.mesh == {"tp": 2}
    assert cut.loss_first == pytest.approx(whole.loss_first, rel=1e-5)
    assert cut.loss_last == pytest.approx(whole.loss_last, rel=1e-4)
    assert whole.evaluation is not None
    assert cut.evaluation is not None
    assert cut.evaluation.loss == pytest.approx(whole.evaluation.loss, rel=1e-2)


def test_reports_count_replicas_and_chips(folder: Path, tmp_path: Path) -> None:
    path = str(Layout("char_gpt", chips=2, others=(REPLICATED,)).compiled(folder))
    ran = sambasim(["run", "--pef", path, "--steps", "1", "--predict"], tmp_path)
    assert f"batch {2 * MICRO_BATCH} × 1 replica of 2 chips = global batch {2 * MICRO_BATCH}; " in ran.stdout
    assert "simulated: 2 ranks on node 0, RDUs 0-1 of " in ran.stdout
    assert "predicted for SN30" in ran.stdout
    inspected = sambasim(["inspect", path], tmp_path).stdout
    assert f"2, each with {MICRO_BATCH} of {2 * MICRO_BATCH} samples" in inspected
    assert f"{2 * MICRO_BATCH} for each replica" in inspected
