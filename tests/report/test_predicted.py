"""The predicted step of a mesh as tables, JSON, CSV, a plot, a trace and a page: everywhere the same figures; and of
one rank as SambaTune's files and a trace, whose parts add up."""

import csv
import io
import json
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sambasim.costs.fit import Memory
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Placement
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.program import Program
from sambasim.pef import read
from sambasim.records.metrics import read_run
from sambasim.report import simulation
from sambasim.report.formats import predicted_trace, section_report_csv, summary_json, title_of
from sambasim.report.inspect import contents
from sambasim.report.simulation import step_record
from sambasim.report.tables import Curve
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.prediction import predict
from sambasim.simulation.step import PredictedStep, step_of
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_seconds
from tests.cli.typed import printed
from tests.faults.command import sambasim as run_command
from tests.pef.samples import sample_program
from tests.report.test_page import Page, check_it_asks_nobody
from tests.simulation.test_step import CLUSTER, DEVICE, predicted
from tests.support.trace_format import read_trace
from tests.support.whole import whole

PARTS = ["summary", "schedule", "ranks", "axes", "scaling", "grounds"]
PASSES = ("forward", "backward")


@pytest.fixture(scope="module")
def program(mesh_pef: Path) -> Program:
    return read(mesh_pef).program


def in_json(subject: object, *flags: object) -> list[Any]:
    return list(map(json.loads, printed("simulate", subject, *flags, "--json").splitlines()))


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def words_of(file: Path) -> list[str]:
    return [word.strip() for word in Page(file.read_text(encoding="utf-8")).words]


@pytest.mark.parametrize(("replicas", "sync", "micro_steps"), [(1, "rdu", 1), (2, "rdu", 3), (2, "host", 1)])
def test_a_trace_has_every_action_of_every_rank_and_is_as_long_as_the_step(
    replicas: int, sync: str, micro_steps: int, program: Program
) -> None:
    step = predicted(program, replicas, micro_steps, SyncPath(sync))
    trace = read_trace(predicted_trace(step))
    assert trace.facts["predicted_s"] == step.predicted_s
    assert "not validated" in trace.facts["backed_by"]
    assert list(trace.processes.values()) == [
        f"rank {rank} of {4 * replicas} ({step.mesh.place(rank)}) as node 0 RDU {rank}, predicted" for rank in range(4)
    ]
    assert max(span.stop_ns for span in trace.spans) == pytest.approx(step.predicted_s * 1e9, abs=2)
    for rank in trace.processes:
        position = step.mesh.coordinate(rank, "pp")
        times, row, own = step.times_of(position), step.schedule.rows[position], step.ranks[position]
        spans = trace.named("", rank)
        actions = [span for span in spans if "action" in span.args]
        assert [span.args["action"] for span in actions] == [str(action) for action in row] * micro_steps
        assert [span.name for span in actions[: len(row)]] == [title_of(action) for action in row]
        assert all(before.stop_ns <= after.start_ns for before, after in pairwise(actions))
        lengths_ns: Counter[object] = Counter()
        for span in spans:
            for key in {span.name, span.args.get("kind")}:
                lengths_ns[key] += span.stop_ns - span.start_ns
        rounding_ns, copies_s = len(spans), sum(copy.predicted_s for copy in own.copies.values())
        seconds = {"sections": times.device_s, "host": times.host_s}
        for axis in ("pp", "tp"):
            seconds[f"messages along {axis}"] = times.messages[axis].predicted_s
            received = [span.args["peer_link_bytes"] for span in spans if span.name == f"messages along {axis}"]
            assert sum(received) == sum(times.messages[axis].received_bytes.values()) > 0
        for name, time_s in seconds.items():
            assert lengths_ns[name] == pytest.approx(time_s * 1e9, abs=rounding_ns)
        of_update, synced = (lengths_ns[a] + lengths_ns[b] for a, b in (("GRADNORM", "OPT"), ("REDUCE", "GATHER")))
        assert of_update == pytest.approx((times.update_s - copies_s) * 1e9, abs=rounding_ns)
        assert synced == pytest.approx((own.synced.sync_s + copies_s) * 1e9, abs=rounding_ns)
        assert (synced > copies_s * 1e9 + rounding_ns) == (replicas > 1)


def test_actions_begin_after_what_they_need_and_a_tied_parameter_is_copied_around_the_update(program: Program) -> None:
    """Its gradient before, itself when all is done."""
    step, trace = predicted(program), read_trace(predicted_trace(predicted(program)))
    first = [span for span in trace.spans if step.mesh.coordinate(span.process, "tp") == 0]
    actions_ns = {span.args["action"]: (span.start_ns, span.stop_ns) for span in first if "action" in span.args}
    actions = [action for row in step.schedule.rows for action in row]
    assert len(actions) == len(actions_ns)
    for action in actions:
        starts_ns, _ = actions_ns[str(action)]
        assert all(actions_ns[str(need)][1] <= starts_ns for need in step.schedule.needs(action))
    copies = {span.name: span for span in trace.named("", 2) if " copy of " in span.name}
    (name,) = (copy.removeprefix("GATHER copy of ") for copy in copies if copy.startswith("GATHER"))
    update = [span for span in trace.named("", 2) if span.args.get("kind") in ("GRADNORM", "OPT")]
    assert copies[f"REDUCE copy of {name}__grad"].stop_ns <= min(span.start_ns for span in update)
    assert copies[f"GATHER copy of {name}"].start_ns >= max(span.stop_ns for span in update)
    assert not [span for span in trace.named("", 0) if " copy of " in span.name]


def test_ranks_are_where_a_run_places_them_and_hold_what_inspect_says(mesh_pef: Path, program: Program) -> None:
    record = step_record(predicted(program, replicas=2, tiles=4))
    ranks = record.each_rank
    places = [(rank.rank, rank.rdu, rank.first_tile, rank.tiles) for rank in ranks]
    assert places == [(0, 0, 0, 4), (1, 0, 4, 4), (2, 1, 0, 4), (3, 1, 4, 4)]
    assert ranks[2].coordinates == {"dp": 0, "pp": 1, "tp": 0}
    assert [rank.stages for rank in ranks] == [(0,), (0,), (1,), (1,)]
    for rank in ranks:
        shares = (rank.predicted_busy_share, rank.predicted_messages_share, rank.predicted_idle_share)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0
    assert sum(rank.predicted_idle_share for rank in ranks) / 4 == pytest.approx(record.predicted_idle_share)
    for stage, rank in zip(contents(mesh_pef, read(mesh_pef)).stages, ranks[::2], strict=True):
        assert rank.parameters_bytes == stage.parameters_bytes
        assert rank.gradients_bytes == stage.gradients_bytes
        assert rank.states_bytes == pytest.approx(
            stage.states_bytes / 2, rel=0.05
        )  # two replicas, where one may run it
        assert rank.memory_bytes == sum(getattr(rank, f"{part}_bytes") for part in asdict(Memory()))


def test_bytes_go_over_the_link_between_the_ranks(program: Program) -> None:
    """With two RDUs a node, the chips of a stage share a node, and the stages do not."""

    def bytes_of(step: PredictedStep) -> dict[str, dict[str, int]]:
        return {axis.axis: axis.received_bytes for axis in step_record(step).axes}

    device = load_device("sn30")
    cluster = load_cluster(device.cluster).model_copy(update={"rdus_per_node": 2})
    in_pairs = Placement(cluster, None, 1, tuple(rank // 2 for rank in range(8)))
    apart = bytes_of(step_of(program, price_ranks(program, budget_of(device)), in_pairs, SyncPath.RDU))
    links = {axis: set(received) for axis, received in apart.items()}
    assert links == {"dp": {"network_link"}, "pp": {"network_link"}, "tp": {"peer_link"}}
    together = bytes_of(predicted(program, 2))
    assert {link for received in together.values() for link in received} == {"peer_link"}
    for axis, received in apart.items():
        assert sum(received.values()) == sum(together[axis].values())
    gradients = 2 * sum(group.numel for group in program.groups)
    # On two chips, in bf16: there, and slices back and forth.
    assert bytes_of(predicted(program, 2, path=SyncPath.HOST))["dp"] == {"host_link": 2 * 2.5 * gradients}
    # Each rank receives half of the gradients and half of the parameters.
    assert together["dp"] == {"peer_link": 2 * gradients}


def test_simulate_writes_rows_a_plot_and_a_trace(mesh_pef: Path, tmp_path: Path) -> None:
    rows_file, plot, trace = (tmp_path / name for name in ("rows.csv", "rows.svg", "trace.json"))
    flags = ["--csv", rows_file, "--plot", plot, "--trace", trace]
    shown = printed("simulate", mesh_pef, "--replicas", "1,2", *flags)
    assert shown.splitlines()[-3:] == [f"{file} written" for file in (rows_file, trace, plot)]
    lines, rows = in_json(mesh_pef, "--replicas", "1,2"), rows_of(rows_file)
    assert [(row["ranks"], row["sync"]) for row in rows] == [("4", ""), ("8", "host"), ("8", "rdu")]
    for row, line in zip(rows, lines, strict=True):
        assert float(row["predicted_s"]) == line["predicted_s"]
        assert float(row["predicted_waited_tp_s"]) == line["predicted_waited_s"]["tp"]
    assert float(rows[0]["predicted_efficiency"]) == 1
    drawn = "".join(ElementTree.fromstring(plot.read_text(encoding="utf-8")).itertext())
    in_plot = ("predicted, not measured", "sync by host", "sync by rdu", "no sync", "ranks")
    assert [words for words in in_plot if words not in drawn] == []
    assert read_trace(trace.read_text(encoding="utf-8")).facts["predicted_s"] == lines[2]["predicted_s"]
    in_tables = (
        *("pp 1, tp 1", "node 0 RDU 3", "not validated", "dp 2 × pp 2 × tp 2"),
        "on dp 1 × pp 2 × tp 2, each rank on SN30: predicted, not measured",
        *("along pp: rank 0 waits", "along tp: rank 0 waits"),
    )
    assert [words for words in in_tables if words not in shown] == []
    assert "input gradients" not in shown, "which this schedule does not have"
    assert [line["sync"] for line in lines] == [None, "host", "rdu"]
    assert (lines[0]["mesh"], lines[0]["schedule"]) == ({"dp": 1, "pp": 2, "tp": 2}, "1f1b")
    assert 0 < lines[0]["predicted_idle_share"] < 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Curve]:
    """The curves of plots."""
    curves: list[Curve] = []

    def draw(*arguments: Any) -> str:
        curves[:] = arguments[-1]
        return ""

    monkeypatch.setattr(simulation, "log_chart", draw)
    return curves


def test_speed_is_relative_to_one_replica_whichever_were_asked_for(program: Program, drawn: list[Curve]) -> None:
    one = predicted(program)
    several = [predicted(program, replicas, path=sync) for replicas in (2, 4) for sync in (SyncPath.HOST, SyncPath.RDU)]
    assert one.efficiency == 1
    for row, step in zip(simulation.csv_rows(several), several, strict=True):
        assert row["predicted_efficiency"] == step.samples_per_s / (step.replicas * one.samples_per_s)
        assert 0 < step.efficiency < 1
    for replicas in ((4, 2), (1, 2, 4)):
        prediction = predict(program, DEVICE, None, "o3", CLUSTER, replicas)
        simulation.scaling_plot([prediction], (SyncPath.HOST, SyncPath.RDU))
        assert drawn[-1].is_bound
        line = dict(drawn[-1].points)
        assert (line[8], line[16]) == pytest.approx((2 * one.samples_per_s, 4 * one.samples_per_s))


@whole
def test_chips_that_share_a_batch_sync_in_one_replica_too(tmp_path: Path, drawn: list[Curve]) -> None:
    """So each path has its own base, and the straight line is that of the quicker one."""
    config, rows_file = "configs/parallelism/batch.toml", tmp_path / "rows.csv"
    files = ["--csv", rows_file, "--plot", tmp_path / "rows.svg"]
    shown = printed("simulate", config, "-b", "16,64", "--sync", "rdu", *files)
    assert [row["batch_size"] for row in rows_of(rows_file)] == ["16", "64"]
    assert ["batch 16 a replica" in shown, "batch 64 a replica" in shown] == [True, True]
    (alone,) = in_json(config, "-b", "64", "--sync", "rdu")
    assert float(rows_of(rows_file)[1]["predicted_s"]) == alone["predicted_s"]
    assert "sync by rdu, batch 64" in [curve.name for curve in drawn]
    printed("simulate", config, "--replicas", "2,1", *files)
    rows = rows_of(rows_file)
    assert [row["sync"] for row in rows] == ["host", "rdu"] * 2
    for two, one in zip(rows[:2], rows[2:], strict=True):
        speeds = [float(row["predicted_samples_per_s"]) for row in (two, one)]
        assert float(one["predicted_efficiency"]) == 1
        assert float(two["predicted_efficiency"]) == pytest.approx(speeds[0] / 2 / speeds[1])
    assert drawn[-1].points[0] == (2, max(float(row["predicted_samples_per_s"]) for row in rows[2:]))


@pytest.fixture(scope="module")
def page(mesh_pef: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    file = tmp_path_factory.mktemp("page") / "page.html"
    printed("report", mesh_pef, "--replicas", "1,2,4", "--html", file)
    return Page(file.read_text(encoding="utf-8"))


def test_a_page_has_the_figures_of_simulate(mesh_pef: Path, page: Page) -> None:
    """It is about two replicas: as many as fit on the eight RDUs of a node."""
    assert page.ids("section") == PARTS
    check_it_asks_nobody(page)
    cells = [word.strip() for word in page.words]
    (line,) = in_json(mesh_pef, "--replicas", "2", "--sync", "rdu")
    assert line["mesh"] == {"dp": 2, "pp": 2, "tp": 2}
    seconds = map(format_seconds, (line["predicted_s"], line["predicted_exposed_sync_s"]))
    assert {*seconds, f"{line['predicted_idle_share']:.1%}"} <= set(cells)
    for axis in line["axes"]:
        at, received = cells.index(axis["axis"]), axis["received_bytes"].items()
        links = ", ".join(f"{format_bytes(size)} by {name.replace('_', ' ')}" for name, size in received)
        times = map(format_seconds, (axis["predicted_transfer_s"], axis["predicted_waited_s"]))
        assert cells[at : at + 4] == [axis["axis"], links, *times]
    shown = printed("simulate", mesh_pef, "--replicas", "2", "--sync", "rdu").splitlines()
    priced_in = "priced in bf16, whatever dtype the PEF has"
    assert priced_in in shown[0]
    assert any(priced_in in word for word in page.words)
    for rank in line["each_rank"]:
        at = cells.index(f"dp 0, pp {rank['coordinates']['pp']}, tp {rank['coordinates']['tp']}")
        row = cells[at - 1 : at + 12]
        sizes = [
            rank[f"{what}_bytes"] for what in ("parameters", "gradients", "states", "buffers", "activations", "memory")
        ]
        shares = [rank[f"predicted_{what}_share"] for what in ("busy", "messages", "idle")]
        assert row[4:] == [*map(format_bytes, sizes), *(f"{share:.1%}" for share in shares)]
        (terminal,) = (words for words in shown if row[1] in words)
        assert all(word in terminal for word in row)
    assert page.words.count("predicted") >= 6
    assert "not validated" in "".join(page.words)
    with pytest.raises(OptionError, match="--tables is for replicas of one rank"):
        printed("report", mesh_pef, "--tables", "tables")


def test_a_config_of_several_ranks_has_a_page_too(tmp_path: Path) -> None:
    text = Path("configs/parallelism/batch.toml").read_text(encoding="utf-8").replace("../..", str(Path.cwd()))
    config, file = tmp_path / "batch.toml", tmp_path / "page.html"
    config.write_text(text.replace("layers = 4", "layers = 1"), encoding="utf-8")
    assert printed("report", config, "--replicas", "2", "--html", file).startswith(f"{file} written")
    assert Page(file.read_text(encoding="utf-8")).ids("section") == PARTS
    assert ["dp 4" in words_of(file), "PEF" in words_of(file)] == [True, False]


def test_the_picture_is_the_schedule(program: Program, page: Page) -> None:
    step = predicted(program, replicas=2)
    traces = {trace["name"]: trace for trace in page.figures["schedule-figure"]["data"]}
    messages = {"messages along pp", "messages along tp"}
    assert traces.keys() == {*PASSES, *messages, "GRADNORM", "OPT", "REDUCE", "GATHER"}
    ends_s = [start + length for t in traces.values() for start, length in zip(t["base"], t["x"], strict=True)]
    assert max(ends_s) == pytest.approx(step.predicted_s, rel=1e-6)
    for position, name in enumerate(("ranks 0-1", "ranks 2-3")):
        bars = [zip(*(traces[kind][key] for key in ("base", "text", "y")), strict=True) for kind in PASSES]
        texts = [text for _, text, row in sorted(bar for of_kind in bars for bar in of_kind) if row == name]
        assert texts == [f"{action.kind}{action.micro_batch}" for action in step.schedule.rows[position]]
        lengths_s = {kind: zip(trace["y"], trace["x"], strict=True) for kind, trace in traces.items()}
        seconds = {kind: sum(x for row, x in of_kind if row == name) for kind, of_kind in lengths_s.items()}
        times = step.times_of(position)
        assert seconds["messages along tp"] == pytest.approx(times.messages["tp"].predicted_s, rel=1e-5)
        copies_s = sum(copy.predicted_s for copy in step.ranks[position].copies.values())
        assert seconds["GRADNORM"] + seconds["OPT"] == pytest.approx(times.update_s - copies_s, rel=1e-5)


def test_what_a_run_waited_stands_beside_what_was_predicted(mesh_pef: Path, program: Program, tmp_path: Path) -> None:
    metrics, file = tmp_path / "run.jsonl", tmp_path / "page.html"
    replicas = ["--emulate-replicas", "2", "--reduce-on-rdu"]
    command = ["run", "--pef", str(mesh_pef), *replicas, "--steps", "2", "--threads", "1", "--metrics", str(metrics)]
    run_command(command, tmp_path).check()
    summary = read_run(metrics).summary
    assert summary is not None
    assert summary.predicted is not None
    assert summary.predicted.predicted_sync == "device"
    assert summary.predicted.predicted_step_s == predicted(program, replicas=2).predicted_s
    for beside, subject in ((True, [mesh_pef, "--run", metrics]), (False, [metrics])):
        printed("report", *subject, "--html", file)
        cells = words_of(file)
        assert "dp 2 × pp 2 × tp 2" in cells
        for axis in ("pp", "tp"):
            at = cells.index(f"waiting along {axis}")
            times_s = [summary.waited_s[axis] / summary.steps, summary.predicted.predicted_waited_s[axis]]
            row = [format_seconds(time_s) for time_s in times_s[: 1 + beside]]
            assert cells[at + 1 : at + 1 + len(row)] == row
        for words in ("predicted for 8 × SN30", "host: sections, inputs, outputs"):
            assert (words in cells) == beside


def step_at(replicas: int = 1, path: SyncPath = SyncPath.RDU, micro_steps: int = 1) -> PredictedStep:
    return predicted(sample_program(), replicas, micro_steps, path, "o3", 4)


def test_a_row_for_each_section_is_within_the_device_and_their_sum_is_the_step() -> None:
    step = step_at(micro_steps=3).alone
    rows = list(csv.DictReader(io.StringIO(section_report_csv(step))))
    heads = [(str(number), section.kind) for number, section in enumerate(step.sections)]
    assert [(row["section_id"], row["section_type"]) for row in rows] == heads
    total_s = sum(float(row["predicted_latency_s"]) * int(row["runs_per_step"]) for row in rows)
    assert total_s == pytest.approx(step.device_s)
    for row, section in zip(rows, step.sections, strict=True):
        parts = [float(row[f"predicted_{part}_s"]) for part in ("compute", "memory", "fill", "launch")]
        assert float(row["predicted_latency_s"]) == pytest.approx(max(parts[:2]) + sum(parts[2:]))
        rates = [float(row[f"predicted_ddr_{way}_bytes_per_s"]) for way in ("read", "write")]
        assert sum(rates) <= step.budget.memory_bytes_per_s
        assert sum(rates) * section.price.predicted_s == pytest.approx(section.load.traffic_bytes)
        assert all(0 <= float(row[f"predicted_{what}_utilization"]) <= 1 for what in ("pcu", "pmu"))
        assert int(row["predicted_pcu_count"]) == round(section.price.units) <= 640
    products = {row["section_type"] for row in rows if float(row["predicted_pcu_utilization"]) > 0}
    assert products == {"FWD", "BCKWD"}


def test_the_parts_of_the_summary_add_up() -> None:
    step = step_at(replicas=4)
    record = json.loads(summary_json(step))
    predicted, share = record["predicted"], f"{record['predicted']['predicted_host_share']:.1%}"
    assert record["remarks"][0] == f"Host takes {share} of the total latency (predicted)."
    parts_s = [predicted[f"predicted_{part}_s"] for part in ("host", "device", "exposed_sync")]
    assert predicted["predicted_latency_s"] == pytest.approx(sum(parts_s))
    for kind in ("type", "bound"):
        assert sum(predicted[f"predicted_latency_s_by_{kind}"].values()) == pytest.approx(parts_s[1])
    assert predicted["predicted_throughput_samples_per_s"] == pytest.approx(step.samples_per_s)


@pytest.mark.parametrize("path", SyncPath)
@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 6, 40])
def test_a_trace_says_that_it_is_predicted_and_of_what_and_ends_when_it_says(
    replicas: int, micro_steps: int, path: SyncPath
) -> None:
    step = step_at(replicas, path, micro_steps)
    trace, shown = read_trace(predicted_trace(step)), min(replicas, 4)
    assert (trace.facts["kind"], trace.facts["pef"], trace.facts["pef_digest"]) == ("predicted", "logreg", None)
    assert trace.facts["device"] == "4 of 8 tiles of SN30: predicted, never measured here"
    assert (trace.facts["replicas"], trace.facts["replicas_shown"]) == (replicas, shown)
    places = ("RDU 0 tiles 0-3", "RDU 0 tiles 4-7", "RDU 1 tiles 0-3", "RDU 1 tiles 4-7")[:shown]
    titles = [f"replica {replica} of {replicas}, node 0 {place}, predicted" for replica, place in enumerate(places)]
    assert list(trace.processes.values()) == titles
    for replica in trace.processes:
        spans = trace.named("", replica)
        assert len(spans) == len(step.synced.spans)
        assert max(span.stop_ns for span in spans) == pytest.approx(step.predicted_s * 1e9, abs=1)
        model = [span for span in spans if span.name.startswith(("FWD", "BCKWD"))]
        assert max(span.args.get("micro_step", 0) for span in model) == micro_steps - 1
