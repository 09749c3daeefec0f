"""Times: `session.profiler`, `measure_performance` and `measure_sections`; more over replicas in census/replicas.py."""

import json
import time
from argparse import Namespace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from sambasim import samba as ours
from sambasim.errors import OptionError
from sambasim.hardware.spec import load_device
from sambasim.samba.profiler import Event, Profiler
from sambasim.simulation.prediction import backing_of
from sambasim.units import format_seconds
from tests.samba.harness import BATCH, Load, LogReg, Made, Net, PefOf, batch_of, imported, parsed, refused, with_sgd
from tests.support.mpi import SAMBASIM, run_mpi

samba: Any = ours
pytestmark = pytest.mark.usefixtures("app")

SHORT = {"n_iterations": 4, "min_duration": 0.0}


def test_a_step_is_measured(
    inputs: tuple[Any, Any], net: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = samba.utils.measure_performance
    capsys.readouterr()
    without_effect: dict[str, Any] = {"world_size": 1, "use_sambaloader": True, "set_output_grads": False}
    without_effect |= {"json_counters": None, "data_parallel": False, "reduce_on_rdu": False, "run_graph_only": False}
    files = {"json": str(tmp_path / "a.json"), "bench_report_json": str(tmp_path / "b.json")}
    throughput, latency = measure(net[0], inputs, BATCH, 1, False, **files, **without_effect, **SHORT)
    figures = json.loads((tmp_path / "a.json").read_text())
    assert json.loads((tmp_path / "b.json").read_text()) == figures
    assert (throughput, latency) == (figures["samples_per_s"], figures["step_s"])
    assert capsys.readouterr().out.startswith("measured on this machine, 1 replica, 4 steps: ")
    assert figures["step_p90_s"] >= figures["step_s"]
    assert figures["threads"] == torch.get_num_threads()
    assert figures["samples_per_s"] == pytest.approx(BATCH / figures["step_s"])
    assert figures["predicted_step_s"] > 0
    assert (figures["predicted_for"], figures["predicted_backed_by"]) == ("SN30", backing_of(load_device("sn30")))

    def measured(**options: Any) -> dict[str, Any]:
        measure(net[0], inputs, BATCH, json=str(tmp_path / "c.json"), **options)
        found: dict[str, Any] = json.loads((tmp_path / "c.json").read_text())
        return found

    graph_alone = measured(run_graph_only=True, **SHORT)
    assert graph_alone["step_s"] > 0
    assert 0 < measured(inference=True, **SHORT)["predicted_step_s"] < figures["predicted_step_s"]
    assert 0 < graph_alone["predicted_step_s"] < figures["predicted_step_s"], "without the host"
    assert measured(inference=True, n_iterations=2, min_duration=0.5)["steps"] > 2
    with pytest.raises(OptionError, match="the batch size is 8, and the PEF was compiled for 4"):
        measure(net[0], inputs, 8)


def test_flags_bound_what_is_measured(inputs: tuple[Any, Any], net: Made, net_pef: str) -> None:
    """A batch size that was not typed need not be that of the PEF; and the throughput may have a least one."""

    def measured(*flags: str, batch_size: int = 1) -> Any:
        args = parsed("measure-performance", "--pef", net_pef, *flags)
        args.batch_size = batch_size
        return samba.utils.measure_performance(net[0], inputs, batch_size, **SHORT)

    throughput, latency = measured("--min-throughput", "0.5")
    assert throughput == pytest.approx(BATCH / latency)
    with pytest.raises(OptionError, match="the batch size is 1, and the PEF was compiled for 4"):
        measured("-b", "1")
    with pytest.raises(AssertionError, match=r"[\d.]+ samples/s were measured, and --min-throughput is 1e\+12"):
        measured("--min-throughput", "1e12", batch_size=BATCH)


def test_every_section_is_measured(
    inputs: tuple[Any, Any], net: Made, net_pef: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = net
    information = imported("samba.utils.pef_utils").get_pef_info(net_pef)
    sections = next(graph["sections"] for graph in information["graphs"] if graph["name"] == "training")
    capsys.readouterr()
    figures = samba.utils.measure_sections(model, inputs, num_sections=2, batch_size=BATCH, json="-", **SHORT)
    assert json.loads(capsys.readouterr().out) == figures
    rows = figures["sections"]
    assert [(row["sections"], row["kind"], row["name"]) for row in rows] == [
        ([section["index"]], section["kind"], section["name"]) for section in sections
    ]
    assert all(row["measured_s"] > 0 for row in rows)
    assert figures["predicted_sections_s"] == pytest.approx(sum(row["predicted_s"] for row in rows))
    assert figures["sections_s"] == pytest.approx(sum(row["measured_s"] for row in rows))
    (row,) = samba.utils.measure_sections(model, inputs, inference=True, **SHORT)["sections"]
    assert row["kind"] == "FWD"
    title, head, _, line, *_, source = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert title == "measured on this machine, 1 replica, 4 steps"
    assert head.split() == ["section", "kind", "name", "measured", "predicted"]
    times = f"{format_seconds(row['measured_s'])} {format_seconds(row['predicted_s'])}"
    assert " ".join(line.split()[-4:]) == times
    assert source == f"predicted: for SN30; {backing_of(load_device('sn30'))}"
    samba.session.run(inputs)


def test_a_replica_of_several_ranks_is_measured_and_predicted(load: Load, app: None) -> None:
    batch = batch_of()
    model, _ = load(partial(with_sgd, LogReg), batch, tensor_parallel="weight", n_chips=2)
    figures = samba.utils.measure_sections(model, batch, **SHORT)
    assert figures["predicted_for"] == "2 × SN30"
    assert [row["kind"] for row in figures["sections"] if row["predicted_s"]] == ["FWD", "BCKWD", "OPT"]


def test_the_driver_compiles_and_measures_and_leaves_run_and_test_to_the_app(
    inputs: tuple[Any, Any], net: Made, net_pef: str, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, (model, optimizer) = imported("samba.utils.common").common_app_driver, net
    for command in ("run", "test"):
        assert driver(Namespace(command=command), None, None, None, name="net", app_dir=None) is None
    args = parsed("compile", "--inference", "--pef-name", "net")
    options = {"init_output_grads": False, "squeeze_bs_dim": True, "get_output_grads": False}
    driver(args=args, model=model, inputs=inputs, optim=optimizer, name="net", **options)
    assert imported("samba.utils.pef_utils").get_pefmeta_dict("net")["inference"] == "True"

    def measured(command: str, *flags: str) -> dict[str, Any]:
        args = parsed(command, "--pef", net_pef, "--num-iterations", "2", "--json", *flags)
        capsys.readouterr()
        driver(args, model, inputs, optimizer)
        figures: dict[str, Any] = json.loads(capsys.readouterr().out)
        return figures

    files = ("--bench-report-json", "bench.json", "--compiled-stats-json", "stats.json", "--run-graph-only")
    assert measured("measure-performance", *files) == json.loads(Path("bench.json").read_text())
    assert json.loads(Path("stats.json").read_text())["name"] == "net"
    assert {row["kind"] for row in measured("measure-sections")["sections"]} == {"FWD", "BCKWD", "OPT"}
    assert {row["kind"] for row in measured("measure-sections", "--inference")["sections"]} == {"FWD"}


APP = """
import atexit, gc, sys
atexit.register(gc.freeze)  # else Python goes through all of torch and of the compiler as it ends
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from tests.samba.harness import Net, net_batch, with_sgd

args = parse_app_args(argv=sys.argv[1:])
model, optimizer = with_sgd(Net, max_grad_norm=1.0)
common_app_driver(args, model, net_batch(), optimizer, name="net")
"""


def test_sections_of_two_replicas(inputs: tuple[Any, Any], pef_of: PefOf, tmp_path: Path) -> None:
    pef = pef_of(partial(with_sgd, Net, max_grad_norm=1.0), inputs, data_parallel=True, world_size=2)
    (tmp_path / "app.py").write_text(APP)
    flags = ("--pef", pef, "--data-parallel", "--reduce-on-rdu", "--num-iterations", "3", "--json")
    result = run_mpi(2, [*SAMBASIM, "app.py", "measure-sections", *flags], cwd=tmp_path).check()
    figures = json.loads(result.stdout)
    assert (result.stderr, figures["replicas"], figures["steps"]) == ("", 2, 3)
    kinds = [kind for row in figures["sections"] for kind in row["kind"].split("+") if kind not in ("FWD", "BCKWD")]
    assert kinds == ["REDUCE", "GRADNORM", "OPT", "GATHER"], "in rows of their own, or in one"
    assert all(row["predicted_s"] is not None for row in figures["sections"])


def written(path: Path) -> list[tuple[str, float]]:
    """The events in a file of the profiler."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(event["name"], event["elapsed_s"]) for event in lines]


def test_an_event_ends_by_its_handle_or_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(time, "perf_counter", count().__next__)
    profiler = Profiler()
    outer, inner = profiler.start_event("step"), profiler.start_event("step")
    profiler.start_event("data")
    profiler.end_event(outer)
    profiler.end_event("data")
    profiler.end_event(inner, tmp_path / "profile.json")
    assert profiler.events == [Event("step", 3), Event("data", 2), Event("step", 4)]
    assert written(tmp_path / "profile.json") == [("step", 3), ("data", 2), ("step", 4)]
    for ended in (outer, "step"):
        with refused(OptionError, "the event step was not started"):
            profiler.end_event(ended)


def test_an_event_is_a_block_and_a_decorator_and_is_written(tmp_path: Path) -> None:
    class App:
        @ours.session.profiler.event("decorated")
        def step(self, value: int) -> int:
            return value + 1

    assert (App().step(1), App().step(2)) == (2, 3)
    with pytest.raises(ZeroDivisionError), samba.session.profiler.event("block"):
        _ = 1 / 0
    samba.session.start_samba_profile()
    samba.session.start_runtime_profile()
    samba.session.end_samba_profile()
    samba.session.end_runtime_profile(tmp_path / "file.log")
    all_events = written(tmp_path / "file.log")
    events = all_events[-5:]
    names = ["decorated", "decorated", "block", "samba_profile", "runtime_profile"]
    assert [name for name, _ in events] == names
    assert all(elapsed_s > 0 for _, elapsed_s in events)
    samba.session.start_samba_profile()
    samba.session.end_samba_profile(filename=tmp_path / "file.log")
    assert [name for name, _ in written(tmp_path / "file.log")[len(all_events) :]] == ["samba_profile"]


def test_a_profile_of_each_step_costs_what_the_step_adds(tmp_path: Path) -> None:
    profiler, file = Profiler(), tmp_path / "p.log"
    file.write_text("of a process before")
    profiler.start_event("open")  # and never ended
    for step in range(300):
        profiler.start_event(f"step {step}")
        profiler.end_event(f"step {step}", file)
        if step == 0:
            file.write_text(file.read_text().replace("step 0", "kept"))
    assert [name for name, _ in written(file)] == ["kept", *(f"step {step}" for step in range(1, 300))]
    whole = profiler.start_event("whole")
    for name in ("q.log", "r.log"):
        profiler.end_event(profiler.start_event(name))
        profiler.end_event(profiler.start_event("step"), tmp_path / name)
        assert [name for name, _ in written(tmp_path / name)] == [name, "step"], "a file of each step has the step"
    profiler.end_event(whole, tmp_path / "s.log")
    assert [name for name, _ in written(tmp_path / "s.log")] == ["q.log", "step", "r.log", "step", "whole"]
    handle = profiler.start_event("step")
    with refused(OptionError, "the profile /no/such/p.log cannot be written: No such file"):
        profiler.end_event(handle, "/no/such/p.log")


def test_statistics_leave_the_warmup_out() -> None:
    timed = Profiler()
    timed.events += [Event("step", seconds) for seconds in (9.0, 0.25, 0.5)] + [Event("data", 0.125)]
    steps = "step: 2 times, mean 375.000 ms, 250.000 to 500.000 ms, 8.0 samples/s"
    assert timed.print_statistics(["step"], 1, num_samples_per_iter=3) == steps
    data = "data: 1 times, mean 125.000 ms, 125.000 to 125.000 ms"
    assert timed.print_statistics(["data"], measurements=["latency"]) == data
    assert timed.print_statistics().count("\n") == 1
    assert timed.print_statistics(["nothing"]) == "nothing: 0 times"
    assert timed.get_throughputs(["data", "nothing"], 4) == {"data": 32.0, "nothing": 0.0}
    with pytest.raises(OptionError, match="the profiler has no measurement power"):
        timed.print_statistics(["step"], measurements=["power"])
    with pytest.raises(OptionError, match="throughput needs a number of samples"):
        timed.print_statistics(["step"], measurements=["throughput"])
