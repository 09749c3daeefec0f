"""The predicted step of a mesh as tables, JSON, CSV, a plot, a trace and a page: everywhere the same figures."""

import csv
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from sambasim.cli.main import sambasim
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Placement, place
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.schedule import Action
from sambasim.pef import peek, read
from sambasim.records.metrics import read_run
from sambasim.report import steps as report_steps
from sambasim.report.inspect import contents
from sambasim.report.steps import step_record
from sambasim.report.svg import Curve, speed_chart
from sambasim.report.trace import predicted_trace, title_of
from sambasim.simulation.step import PredictedStep, predict_step
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_seconds
from tests.faults.command import sambasim as run_command
from tests.report.test_page import Page, check_it_asks_nobody
from tests.support.examples import in_stages
from tests.support.trace_format import read_trace
from tests.support.whole import whole

ON_CHIPS = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"')
SEVERAL = ("parallel.data_parallel=true", "parallel.world_size=1")


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, each on two chips."""
    return in_stages("char_gpt", tmp_path_factory.mktemp("mesh"), *ON_CHIPS, *SEVERAL)


def predicted(
    path: Path, replicas: int = 1, sync: SyncPath = SyncPath.RDU, micro_steps: int = 1, tiles: int | None = None
) -> PredictedStep:
    device, program = load_device("sn30"), read(path).program
    placement = place(replicas * program.ranks_of_replica, device, tiles, load_cluster(device.cluster))
    return predict_step(program, budget_of(device, tiles), placement, sync, micro_steps)


def simulate(path: Path, *flags: str) -> str:
    return CliRunner().invoke(sambasim, ["simulate", str(path), *flags], catch_exceptions=False).stdout


@pytest.mark.parametrize(("replicas", "sync", "micro_steps"), [(1, "rdu", 1), (2, "rdu", 3), (2, "host", 1)])
def test_a_trace_has_every_action_of_every_rank_and_is_as_long_as_the_step(
    replicas: int, sync: SyncPath, micro_steps: int, pef: Path
) -> None:
    step = predicted(pef, replicas, SyncPath(sync), micro_steps)
    trace = read_trace(predicted_trace(step))
    assert trace.facts["predicted_s"] == step.predicted_s
    assert "not validated" in trace.facts["backed_by"]
    assert list(trace.processes.values()) == [
        f"rank {rank} of {4 * replicas} ({step.mesh.place(rank)}) as node 0 RDU {rank}, predicted" for rank in range(4)
    ]
    assert max(one.stop_ns for one in trace.spans) == pytest.approx(step.predicted_s * 1e9, abs=2)
    for rank in trace.processes:
        position = step.mesh.coordinate(rank, "pp")
        times = step.times_of(position)
        spans = [one for one in trace.spans if one.process == rank]
        actions = [one for one in spans if "action" in one.args]
        row = step.schedule.rows[position]
        assert [one.args["action"] for one in actions] == [str(action) for action in row] * micro_steps
        assert [one.name for one in actions[: len(row)]] == [title_of(action) for action in row]
        assert all(before.stop_ns <= after.start_ns for before, after in pairwise(actions))
        lengths_ns: defaultdict[str, int] = defaultdict(int)
        for one in spans:
            lengths_ns[one.name] += one.stop_ns - one.start_ns
        rounding_ns = len(spans)
        assert lengths_ns["sections"] == pytest.approx(times.device_s * 1e9, abs=rounding_ns)
        assert lengths_ns["host"] == pytest.approx(times.host_s * 1e9, abs=rounding_ns)
        for axis in ("pp", "tp"):
            seconds = times.messages[axis].predicted_s
            assert lengths_ns[f"messages along {axis}"] == pytest.approx(seconds * 1e9, abs=rounding_ns)
            received = [one.args["peer_link_bytes"] for one in spans if one.name == f"messages along {axis}"]
            assert sum(received) == sum(times.messages[axis].received_bytes.values()) > 0
        of_update = sum(one.stop_ns - one.start_ns for one in spans if one.args.get("kind") in ("GRADNORM", "OPT"))
        copies_s = sum(one.predicted_s for one in step.ranks[position].copies.values())
        assert of_update == pytest.approx((times.update_s - copies_s) * 1e9, abs=rounding_ns)
        synced = sum(one.stop_ns - one.start_ns for one in spans if one.args.get("kind") in ("REDUCE", "GATHER"))
        assert synced == pytest.approx((step.ranks[position].synced.sync_s + copies_s) * 1e9, abs=rounding_ns)
        assert (synced > copies_s * 1e9 + rounding_ns) == (replicas > 1)


def test_no_action_of_a_trace_begins_before_what_it_needs_has_ended(pef: Path) -> None:
    step = predicted(pef)
    ends_ns, starts_ns = {}, {}
    for one in read_trace(predicted_trace(step)).spans:
        if "action" in one.args and step.mesh.coordinate(one.process, "tp") == 0:
            starts_ns[one.args["action"]], ends_ns[one.args["action"]] = one.start_ns, one.stop_ns
    actions: list[Action] = [action for row in step.schedule.rows for action in row]
    assert len(actions) == len(ends_ns)
    for action in actions:
        assert all(ends_ns[str(need)] <= starts_ns[str(action)] for need in step.schedule.needs(action))


def test_ranks_are_where_a_run_places_them_and_hold_what_inspect_says(pef: Path) -> None:
    record = step_record(predicted(pef, replicas=2, tiles=4))
    assert [(one.rank, one.rdu, one.first_tile, one.tiles) for one in record.each_rank] == [
        *((0, 0, 0, 4), (1, 0, 4, 4), (2, 1, 0, 4), (3, 1, 4, 4))
    ]
    assert [one.coordinates for one in record.each_rank][2] == {"dp": 0, "pp": 1, "tp": 0}
    assert [one.stages for one in record.each_rank] == [(0,), (0,), (1,), (1,)]
    for one in record.each_rank:
        shares = (one.predicted_busy_share, one.predicted_messages_share, one.predicted_idle_share)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0
    idle = [one.predicted_idle_share for one in record.each_rank]
    assert sum(idle) / len(idle) == pytest.approx(record.predicted_idle_share)
    stages = contents(pef, peek(pef), read(pef)).stages
    for stage, one in zip(stages, record.each_rank[::2], strict=True):
        assert one.parameter_bytes == stage.parameter_bytes
        assert one.gradient_bytes + one.state_bytes == stage.training_bytes


def test_bytes_go_over_the_link_between_the_ranks(pef: Path) -> None:
    """With two RDUs a node, the chips of a stage share a node, and the stages do not."""
    device, program = load_device("sn30"), read(pef).program
    cluster = load_cluster(device.cluster).model_copy(update={"rdus_per_node": 2})
    budget = budget_of(device)
    apart = predict_step(program, budget, Placement(cluster, 8, None, 1), SyncPath.RDU)
    links = {one.axis: set(one.received_bytes) for one in step_record(apart).axes}
    assert links == {"dp": {"network_link"}, "pp": {"network_link"}, "tp": {"peer_link"}}
    together = {one.axis: one for one in step_record(predicted(pef, 2)).axes}
    assert {link for one in together.values() for link in one.received_bytes} == {"peer_link"}
    for one in step_record(apart).axes:
        assert sum(one.received_bytes.values()) == sum(together[one.axis].received_bytes.values())
    by_host = {one.axis: one.received_bytes for one in step_record(predicted(pef, 2, SyncPath.HOST)).axes}
    gradients = 2 * sum(group.numel for group in program.groups)
    assert by_host["dp"] == {"host_link": 2 * 2.5 * gradients}, (
        "on two chips, in bf16: there, and slices back and forth"
    )
    # Each rank receives half of the gradients and half of the parameters.
    assert together["dp"].received_bytes == {"peer_link": 2 * gradients}


def test_simulate_writes_rows_a_plot_and_a_trace(pef: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("rows.csv", "rows.svg", "trace.json")]
    flags = [
        word for flag, file in zip(("--csv", "--plot", "--trace"), files, strict=True) for word in (flag, str(file))
    ]
    printed = simulate(pef, "--replicas", "1,2", *flags)
    assert printed.splitlines()[-3:] == [f"{files[0]} written", f"{files[2]} written", f"{files[1]} written"]
    lines = [json.loads(line) for line in simulate(pef, "--replicas", "1,2", "--json").splitlines()]
    with files[0].open(encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))
    assert [(row["ranks"], row["sync"]) for row in rows] == [("4", ""), ("8", "host"), ("8", "rdu")]
    for row, line in zip(rows, lines, strict=True):
        assert float(row["predicted_s"]) == line["predicted_s"]
        assert float(row["predicted_waited_tp_s"]) == line["predicted_waited_s"]["tp"]
    assert float(rows[0]["predicted_efficiency"]) == 1
    drawn = "".join(ElementTree.fromstring(files[1].read_text(encoding="utf-8")).itertext())
    assert all(
        words in drawn for words in ("predicted, not measured", "sync by host", "sync by rdu", "no sync", "ranks")
    )
    assert read_trace(files[2].read_text(encoding="utf-8")).facts["predicted_s"] == lines[2]["predicted_s"]
    for words in ("pp 1, tp 1", "node 0 RDU 3", "not validated", "dp 2 × pp 2 × tp 2"):
        assert words in printed
    assert "on dp 1 × pp 2 × tp 2, each rank on SN30: predicted, not measured" in printed
    assert all(f"along {axis}: rank 0 waits" in printed for axis in ("pp", "tp"))
    assert "input gradients" not in printed, "which this schedule does not have"
    assert [line["sync"] for line in lines] == [None, "host", "rdu"]
    assert (lines[0]["mesh"], lines[0]["schedule"]) == ({"dp": 1, "pp": 2, "tp": 2}, "1f1b")
    assert 0 < lines[0]["predicted_idle_share"] < 1


@whole
def test_a_config_is_captured_for_each_batch_size(tmp_path: Path) -> None:
    config, files = "configs/parallelism/batch.toml", [tmp_path / "rows.csv", tmp_path / "rows.svg"]
    command = ["simulate", config, "-b", "16,64", "--sync", "rdu"]
    shown = CliRunner().invoke(sambasim, [*command, "--csv", str(files[0]), "--plot", str(files[1])]).stdout
    assert shown.splitlines()[-2:] == [f"{file} written" for file in files]
    assert "batch 16 a replica" in shown
    assert "batch 64 a replica" in shown
    drawn = files[1].read_text(encoding="utf-8")
    assert "sync by rdu, batch 16" in drawn
    assert "sync by rdu, batch 64" in drawn
    alone = CliRunner().invoke(sambasim, ["simulate", config, "-b", "64", "--sync", "rdu", "--json"]).stdout
    with files[0].open(encoding="utf-8", newline="") as text:
        rows = list(csv.DictReader(text))
    assert [row["batch_size"] for row in rows] == ["16", "64"]
    assert float(rows[1]["predicted_s"]) == json.loads(alone)["predicted_s"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Curve]:
    """The curves of plots."""
    curves: list[Curve] = []

    def draw(title: str, x_title: str, found: list[Curve]) -> str:
        curves[:] = found
        return speed_chart(title, x_title, found)

    monkeypatch.setattr(report_steps, "speed_chart", draw)
    return curves


def test_speed_is_relative_to_one_replica_whichever_were_asked_for(pef: Path, drawn: list[Curve]) -> None:
    one = predicted(pef)
    several = [predicted(pef, replicas, sync) for replicas in (2, 4) for sync in (SyncPath.HOST, SyncPath.RDU)]
    assert one.efficiency == 1
    for row, step in zip(report_steps.csv_rows(several), several, strict=True):
        assert row["predicted_efficiency"] == step.samples_per_s / (step.replicas * one.samples_per_s)
        assert 0 < step.efficiency < 1
    for steps in (several, [one, *several]):
        report_steps.scaling_plot([steps])
        assert drawn[-1].is_bound
        line = dict(drawn[-1].points)
        assert (line[8], line[16]) == pytest.approx((2 * one.samples_per_s, 4 * one.samples_per_s))


@whole
def test_chips_that_share_a_batch_sync_in_one_replica_too(tmp_path: Path, drawn: list[Curve]) -> None:
    """So each path has its own base, and the straight line is that of the quicker one."""
    rows = tmp_path / "rows.csv"
    files = ["--csv", str(rows), "--plot", str(tmp_path / "rows.svg")]
    simulate(Path("configs/parallelism/batch.toml"), "--replicas", "2,1", *files)
    with rows.open(encoding="utf-8", newline="") as text:
        of_two, of_one = ([next(lines), next(lines)] for lines in [csv.DictReader(text)] * 2)
    assert [row["sync"] for row in of_one] == ["host", "rdu"]
    for two, one in zip(of_two, of_one, strict=True):
        speeds = [float(row["predicted_samples_per_s"]) for row in (two, one)]
        assert float(one["predicted_efficiency"]) == 1
        assert float(two["predicted_efficiency"]) == pytest.approx(speeds[0] / 2 / speeds[1])
    assert drawn[-1].points[0] == (2, max(float(row["predicted_samples_per_s"]) for row in of_one))


@pytest.fixture(scope="module")
def text(pef: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    flags = ["--replicas", "1,2,4", "--html", str(file)]
    assert CliRunner().invoke(sambasim, ["report", str(pef), *flags], catch_exceptions=False).exit_code == 0
    return file.read_text(encoding="utf-8")


def test_a_page_has_the_figures_of_simulate(pef: Path, text: str) -> None:
    """It is about two replicas: as many as fit on the eight RDUs of a node."""
    page = Page(text)
    assert page.ids("section") == ["summary", "schedule", "ranks", "axes", "scaling", "grounds"]
    cells = [word.strip() for word in page.words]
    lines = [json.loads(line) for line in simulate(pef, "--replicas", "2", "--sync", "rdu", "--json").splitlines()]
    (line,) = lines
    assert line["mesh"] == {"dp": 2, "pp": 2, "tp": 2}
    assert format_seconds(line["predicted_s"]) in cells
    assert f"{line['predicted_idle_share']:.1%}" in cells
    assert format_seconds(line["predicted_exposed_sync_s"]) in cells
    for one in line["axes"]:
        at = cells.index(one["axis"])
        bytes_text = ", ".join(
            f"{format_bytes(size)} by {name.replace('_', ' ')}" for name, size in one["received_bytes"].items()
        )
        times = [format_seconds(one[name]) for name in ("predicted_transfer_s", "predicted_waited_s")]
        assert cells[at : at + 4] == [one["axis"], bytes_text, *times]
    printed = simulate(pef, "--replicas", "2", "--sync", "rdu")
    assert "priced in bf16, whatever dtype the PEF has" in printed.splitlines()[0]
    assert any("priced in bf16, whatever dtype the PEF has" in word for word in page.words)
    for one in line["each_rank"]:
        at = cells.index(f"dp 0, pp {one['coordinates']['pp']}, tp {one['coordinates']['tp']}")
        row = cells[at - 1 : at + 10]
        sizes = [one[f"{what}_bytes"] for what in ("parameter", "gradient", "state", "needed")]
        shares = [one[f"predicted_{what}_share"] for what in ("busy", "messages", "idle")]
        assert row[4:] == [*map(format_bytes, sizes), *(f"{share:.1%}" for share in shares)]
        (terminal,) = (words for words in printed.splitlines() if row[1] in words)
        assert all(word in terminal for word in row)
    assert page.words.count("predicted") >= 6
    assert "not validated" in text


def test_the_picture_is_the_schedule(pef: Path, text: str) -> None:
    step = predicted(pef, replicas=2)
    figures = Page(text).data["figures"]
    assert isinstance(figures, dict)
    traces = {one["name"]: one for one in figures["schedule-figure"]["data"]}
    messages = {"messages along pp", "messages along tp"}
    assert traces.keys() == {"forward", "backward", *messages, "GRADNORM", "OPT", "REDUCE", "GATHER"}
    ends_s = [start + length for one in traces.values() for start, length in zip(one["base"], one["x"], strict=True)]
    assert max(ends_s) == pytest.approx(step.predicted_s, rel=1e-6)
    for position, name in enumerate(("ranks 0-1", "ranks 2-3")):
        cells = {
            (base, text)
            for kind in ("forward", "backward")
            for row, base, text in zip(*(traces[kind][key] for key in ("y", "base", "text")), strict=True)
            if row == name
        }
        in_order = [text for _, text in sorted(cells)]
        assert in_order == [f"{action.kind}{action.micro_batch}" for action in step.schedule.rows[position]]
        times = step.times_of(position)
        of_kinds: defaultdict[str, float] = defaultdict(float)
        for kind, one in traces.items():
            of_kinds[kind] += sum(x for row, x in zip(one["y"], one["x"], strict=True) if row == name)
        assert of_kinds["messages along tp"] == pytest.approx(times.messages["tp"].predicted_s, rel=1e-5)
        copies_s = sum(one.predicted_s for one in step.ranks[position].copies.values())
        assert of_kinds["GRADNORM"] + of_kinds["OPT"] == pytest.approx(times.update_s - copies_s, rel=1e-5)


def test_a_page_of_a_mesh_asks_nobody(text: str) -> None:
    check_it_asks_nobody(Page(text))


def test_what_a_run_waited_stands_beside_what_was_predicted(pef: Path, tmp_path: Path) -> None:
    metrics, file = tmp_path / "run.jsonl", tmp_path / "page.html"
    replicas = ["--emulate-replicas", "2", "--reduce-on-rdu"]
    command = ["run", "--pef", str(pef), *replicas, "--steps", "2", "--threads", "1", "--metrics", str(metrics)]
    assert run_command(command, tmp_path).exit_code == 0
    summary = read_run(metrics).summary
    assert summary is not None
    assert summary.predicted is not None
    assert summary.predicted.predicted_sync == "device"
    assert summary.predicted.predicted_step_s == predicted(pef, replicas=2).predicted_s
    for beside in (True, False):
        subject = [str(pef), "--run", str(metrics)] if beside else [str(metrics)]
        CliRunner().invoke(sambasim, ["report", *subject, "--html", str(file)], catch_exceptions=False)
        cells = [word.strip() for word in Page(file.read_text(encoding="utf-8")).words]
        for axis in ("pp", "tp"):
            at = cells.index(f"waiting along {axis}")
            row = [format_seconds(summary.waited_s[axis] / summary.steps)]
            if beside:
                row.append(format_seconds(summary.predicted.predicted_waited_s[axis]))
            assert cells[at + 1 : at + 1 + len(row)] == row
            assert ("predicted for 8 × SN30" in cells) == beside
            assert ("host: sections, inputs, outputs" in cells) == beside
        assert "dp 2 × pp 2 × tp 2" in cells


def test_a_config_of_several_ranks_has_a_page(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    command = ["report", "configs/parallelism/batch.toml", "--replicas", "2", "--html", str(file)]
    assert CliRunner().invoke(sambasim, command, catch_exceptions=False).stdout.startswith(f"{file} written")
    page = Page(file.read_text(encoding="utf-8"))
    assert page.ids("section") == ["summary", "schedule", "ranks", "axes", "scaling", "grounds"]
    cells = [word.strip() for word in page.words]
    assert "dp 4" in cells
    assert "PEF" not in cells


def test_tables_are_for_one_rank(pef: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(sambasim, ["report", str(pef), "--tables", str(tmp_path / "tables")])
    assert isinstance(result.exception, OptionError)
    assert "--tables is for replicas of one rank" in result.exception.what


def test_a_tied_parameter_is_copied_around_the_update(pef: Path) -> None:
    """Its gradient before, itself when all is done."""
    trace = read_trace(predicted_trace(predicted(pef)))
    copies = {one.name: one for one in trace.spans if " copy of " in one.name and one.process == 2}
    (name,) = (one.removeprefix("GATHER copy of ") for one in copies if one.startswith("GATHER"))
    update = [one for one in trace.spans if one.process == 2 and one.args.get("kind") in ("GRADNORM", "OPT")]
    assert copies[f"REDUCE copy of {name}__grad"].stop_ns <= min(one.start_ns for one in update)
    assert copies[f"GATHER copy of {name}"].start_ns >= max(one.stop_ns for one in update)
    assert not [one for one in trace.spans if " copy of " in one.name and one.process == 0]
