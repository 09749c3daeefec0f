"""`sambasim plan`: what it prints, writes and refuses, that its configs compile and run, and what `--here` measures."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sambasim.errors import MachineError, OptionError
from sambasim.options.compile import compile_options
from sambasim.runtime.machine import launcher
from sambasim.runtime.measure import machine
from sambasim.runtime.measure.machine import Work
from sambasim.simulation.machine import Machine, PassTimes, Rates
from tests.cli.typed import each, invoked, printed, record, refused
from tests.mpi.training import run_of, train
from tests.support.mpi import ROOT
from tests.support.whole import whole, whole_case

SMALL = [
    "--set", "model.args.width=32", "--set", "model.args.layers=2", "--set", "model.args.length=16",
    "--set", "data.args.length=16", "--set", "training.batch_size=4", "--set", "training.steps=3",
]  # fmt: skip
PLAN = ["plan", str(ROOT / "configs" / "char_gpt.toml"), *SMALL, "--global-batch", "16"]
HERE = ["plan", str(ROOT / "configs" / "logistic_regression.toml"), "--here"]
ONLY = ["--only", "recompute=none", "--only", "samples=8,16", "--only", "tensor=none"]
PARTS = ("parameters", "gradients", "states", "activations", "temporaries", "buffers")
TERMS = ("compute", "host", "messages", "bubble", "update", "sync")


def test_it_gives_a_verdict_a_table_the_terms_and_a_page(tmp_path: Path) -> None:
    files = ["--html", str(tmp_path / "plan.html"), "--emit", str(tmp_path / "plan.toml")]
    text = printed(*PLAN, "--only", "zero=1", "--only", "recompute=none,full", "--explain", *files)
    for said in (
        "char_gpt: global batch 16 on 8 SN30 of sn30-8", "the model fits: ", "so replicas alone are possible",
        "1 node, 8 RDUs, linked directly", "of parameters, gradients and states: fits", "The best 10, fastest first",
        "1 against 2", "memory of the fullest RDU", "predicted, not measured. The device model gives all times",
    ):  # fmt: skip
        assert said in text
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert all(said in page for said in ("frontier-figure", "Predicted, not measured.", "not beaten in both"))
    assert "measured parts" not in page


def test_the_csv_has_every_strategy_with_memory_by_part_and_those_that_fit_are_counted(tmp_path: Path) -> None:
    device, file = _device(tmp_path, "400_000"), tmp_path / "all.csv"
    only = each("--only", ["zero=1", "recompute=none,full"])
    text = printed(*PLAN, "--arch", device, *only, "--all", str(file))
    fitting, compiled, lacking = (
        int(re.findall(pattern, text)[0].replace(",", ""))
        for pattern in (r"([\d,]+) strategies fit", r"([\d,]+) of them compiled", r"([\d,]+) do not")
    )
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    priced = [row for row in rows if row["memory_bytes"]]
    assert 0 < fitting == sum(not row["problem"] for row in priced) < len(priced) == fitting + lacking
    assert compiled == sum(row["compiled"] == "True" and not row["problem"] for row in priced)
    for row in priced:
        assert sum(int(row[f"{part}_bytes"]) for part in PARTS) == int(row["memory_bytes"])
        total_s = sum(float(row[f"predicted_{term}_s"]) for term in TERMS)
        assert total_s == pytest.approx(float(row["predicted_step_s"]))
    impossible = [row for row in rows if not row["memory_bytes"]]
    assert impossible
    assert all(row["problem"] for row in impossible)


def test_a_training_is_priced_on_each_number_of_rdus() -> None:
    only = each("--only", ["zero=1", "recompute=none", "tensor=none", "stages=1", "tiles=8"])
    asked = ["--tokens", "1e6", "--days", "1", "--price", "24/node-hour"]
    found = json.loads(printed(*PLAN, *only, *asked, "--json"))
    assert found["training"] == {"samples": 62_500, "tokens": 16, "days": 1.0, "price": 3.0}
    assert [row["rdus"] for row in found["trainings"]] == [1, 2, 4, 8]
    for row in found["trainings"]:
        assert row["compiled"]
        assert row["steps"] == 3907  # 62,500 samples in batches of 16
        assert row["predicted_s"] == 3907 * row["predicted_step_s"] == pytest.approx(86_400 * row["days"])
        assert row["cost"] == 3.0 * row["rdu_hours"] == pytest.approx(row["rdus"] * row["predicted_s"] / 1200)
        assert row["in_time"]
    assert found["verdict"]["within 1 days"].startswith("1 RDU on 1 node: ")
    text = printed(*PLAN, *only, "--samples", "1e9", "--days", "0.5")
    assert "Training by the number of RDUs" in text
    assert "none of up to 8 RDUs: the fastest takes" in text


@pytest.mark.parametrize(
    ("flags", "what", "remedy"),
    [
        (["--days", "3"], "--days is of a training whose length is not given", "--tokens, --samples or --epochs"),
        (["--tokens", "1e9", "--samples", "5"], "--tokens and --samples both say", "leave out --samples"),
        (["--samples", "5", "--price", "cheap"], "--price cheap: it is a number of an RDU-hour", "3.2/rdu-hour"),
        (["--samples", "5", "--price", "3/day"], "--price 3/day: it is a number of an RDU-hour", "3.2/rdu-hour"),
        (["--epochs", "2", "--here"], "--epochs is for devices, and --here", "leave out --here"),
    ],
)
def test_a_training_that_cannot_be_priced_is_refused(flags: list[str], what: str, remedy: str) -> None:
    error = refused(*PLAN, *flags, kind=OptionError)
    assert what in error.what
    assert remedy in str(error.remedy)


def test_epochs_are_counted_by_the_data_and_tokens_only_in_sequences() -> None:
    digits = ["plan", str(ROOT / "configs" / "digits.toml"), "--only", "tiles=8", "--only", "recompute=none"]
    found = json.loads(printed(*digits, "--epochs", "2", "--json"))
    assert found["training"]["samples"] == 2 * 1437
    assert "takes no sequences of integers" in refused(*digits, "--tokens", "1e6", kind=OptionError).what


def test_json_has_the_best_and_the_frontier_and_a_deepspeed_config_says_what_it_cannot(tmp_path: Path) -> None:
    only = each("--only", ["stages=2", "recompute=none"])
    result = invoked(*PLAN, *only, "--json", "--emit", str(tmp_path / "ds.json"))
    plan = json.loads(result.stdout)
    assert (plan["model"], 1 < len(plan["best"]) <= 10) == ("char_gpt", True)
    assert plan["best"][0]["predicted_step_s"] == min(row["predicted_step_s"] for row in plan["best"])
    assert plan["frontier"][0]["rdu_bytes"] > plan["frontier"][-1]["rdu_bytes"]
    assert json.loads((tmp_path / "ds.json").read_text(encoding="utf-8"))["train_batch_size"] == 16
    assert "cannot say: a pipeline of 2 stages" in result.stderr


@pytest.mark.parametrize(
    "wanted",
    [
        ["replicas=2", "stages=2", "schedule=interleaved-1f1b", "chips=1"],
        whole_case(["replicas=2", "tensor=weight", "chips=2", "stages=1", "recompute=full"]),
    ],
)
def test_an_emitted_config_compiles_and_trains_at_np_4_as_in_one_process(wanted: list[str], tmp_path: Path) -> None:
    emitted = tmp_path / "best.toml"
    best = record(*PLAN, *each("--only", wanted), "--emit", emitted)["best"][0]
    assert all(str(best[field]) == value for field, value in (one.split("=") for one in wanted))
    text = emitted.read_text(encoding="utf-8")
    assert "mpirun -np 4 sambasim run --reduce-on-rdu --pef char_gpt" in text
    assert f"#   sambasim simulate {emitted} --replicas 2 --sync rdu" in text
    options = compile_options(emitted, None, [], {})
    assert options.training.batch_size * options.training.accumulation_steps * options.world_size == 16
    printed("compile", "--config", emitted, "--check", "0", "--output-folder", tmp_path)
    pef = tmp_path / "char_gpt" / "char_gpt.pef"
    found = train(4, [run_of("mpi", pef, steps=3), run_of("alone", pef, steps=3, emulate=2)])
    assert found["mpi"].outcome == found["alone"].outcome


def test_a_pef_is_planned_without_its_code(tmp_path: Path) -> None:
    printed("compile", "-b", "4", "--data-parallel", "--check", "0", "--output-folder", str(tmp_path))
    pef = str(tmp_path / "digits" / "digits.pef")
    best = record("plan", pef, "--global-batch", "16", "--only", "stages=1")["best"][0]
    assert best["samples"] * best["replicas"] * best["passes"] == 16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "stage=2"], "a strategy has no 'stage'"),
        (["--only", "schedule=1f2b"], "'1f2b' is none of gpipe, 1f1b"),
        (["--only", "dtype=bfloat16"], "try:   --only dtype=bf16"),
        (["--only", "replicas=2,stages=2"], "try:   --only replicas=2 --only stages=2"),
        (["--only", "zero=two"], "zero takes whole numbers"),
        (["--only", "replicas=3"], "--only leaves no strategy"),
        (["--only", "zero=" + "1" * 5000], "zero takes whole numbers"),
        (["--all", "x.csv", "--html", "x.csv"], "would overwrite another file"),
        (["--set", "compile.inference=true"], "a plan is for training"),
        (["--emit", "x"], "--emit x: a config ends in .toml, or, for DeepSpeed, in .json\n  try:   --emit x.toml"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], said: str) -> None:
    error = refused(*PLAN, *arguments, kind=OptionError)
    assert said in str(error)
    assert error.remedy


def test_a_device_that_no_config_can_name_is_not_emitted(tmp_path: Path) -> None:
    error = refused(*PLAN, "--arch", _device(tmp_path), "--emit", str(tmp_path / "x.toml"))
    assert "a config compiles for sn10, sn20, sn30, sn40, sn40l, not" in error.what


@whole
def test_the_device_that_is_named_cuts_the_sections_too(tmp_path: Path) -> None:
    emitted, folder = tmp_path / "x.toml", ["--output-folder", str(tmp_path)]
    only = each("--only", ["stages=1", "replicas=1", "chips=1", "recompute=none", "passes=2", "tiles=4"])
    best = record(*PLAN, *only, "--arch", "SN10", "--emit", str(emitted))["best"][0]
    printed("compile", "--config", str(emitted), "--check", "0", *folder)
    simulated = record("simulate", "char_gpt", *folder, "--replicas", "1")
    assert best["predicted_step_s"] == pytest.approx(simulated["predicted_s"])
    assert best["memory_bytes"] == simulated["memory_bytes"]


def _device(folder: Path, capacity_bytes: str = "1_099_511_627_776") -> str:
    text = (ROOT / "sambasim" / "hardware" / "devices" / "sn30.toml").read_text(encoding="utf-8")
    capacity = f"ddr_capacity_bytes = {capacity_bytes}"
    (folder / "mine.toml").write_text(re.sub(r"ddr_capacity_bytes = [\d_]+", capacity, text), encoding="utf-8")
    return str(folder / "mine.toml")


def test_what_fits_nowhere_says_what_is_closest(tmp_path: Path) -> None:
    only = each("--only", ["recompute=none", "stages=1", "zero=1"])
    result = invoked(*PLAN, "--arch", _device(tmp_path, "65536"), *only)
    assert result.exit_code == 1
    assert "no strategy fits; the closest: " in result.stdout
    assert " of 64.0 KiB, " in result.stdout


@pytest.mark.parametrize(
    ("typed", "what", "remedy"),
    [
        ([*HERE, "--arch", "sn40l"], "--arch is for devices, and --here plans for this machine", "leave out --arch"),
        *(([*HERE, *flags],
           "--here plans for several machines like this one by --nodes and --cluster, which names their link",
           "mpirun -hosts a,b -ppn 1 -np 2 sambasim bench sync --hosts hosts.toml, then --nodes 2 --cluster hosts.toml;"
           " or leave out both") for flags in (("--nodes", "2"), ("--cluster", "sn30-8"))),
        ([*HERE, "--cluster", "sn30-8", "--nodes", "2", "--ranks", "2", "--only", "stages=2"],
         "no strategy of up to 4 ranks gives a global batch of 128 with these values",
         "another --global-batch, or fewer --only"),
        ([*HERE, "--only", "dtype=fp32,bf16"], "--here measures passes of one dtype", "--only dtype=fp32"),
        ([*HERE, "--only", "samples=5", "--ranks", "1"],
         "no strategy of up to 1 rank gives a global batch of 32 with these values",
         "another --global-batch, or fewer --only"),
        ([*HERE[:-1], "--ranks", "2"], "--ranks is for this machine", "add --here, or give --nodes instead"),
        (["plan", "net", "--here"], "--here measures passes of several batch sizes, and a PEF as net has one",
         "plan the config or the model that it was compiled from"),
    ],
)  # fmt: skip
def test_flags_that_do_not_go_together(typed: list[str], what: str, remedy: str) -> None:
    error = refused(*typed, kind=OptionError)
    assert (error.what, error.remedy) == (what, remedy)


def test_ranks_are_at_least_one() -> None:
    result = invoked(*HERE, "--ranks", "0")
    assert result.exit_code == 2
    assert "0 is not in the range x>=1" in f"{result.output}{result.exception}"


def test_a_model_that_does_not_run_here_is_named_with_what_a_rank_said() -> None:
    error = refused(*HERE, "--ranks", "1", "--global-batch", "4096", "--only", "samples=4096", kind=MachineError)
    fewer = "digits has 1,437 samples to train on, fewer than 1 replica × 4,096 samples"
    assert error.what == f"the model cannot be measured on this machine, with 1 rank: {fewer}"
    assert error.remedy == "a smaller --global-batch, or fewer --ranks; sambasim compile and sambasim run say more"


def made_up(work_for: Callable[[int], Work], ranks: int, on_phase: Callable[[str], None]) -> Machine:
    """A machine on which every operator takes a millisecond."""
    (program, *_) = work_for(1).programs
    assert program.training is not None
    seconds = {node.name: 1e-3 for node in program.training.nodes}
    of_pass = PassTimes(program.batch_size, seconds, 0.0, 0.0, 0)
    return Machine(2, 1 << 34, 1e10, 1e11, 0.5, (Rates(1, 1, 1, (of_pass,), 0.0, 0.0, 0.0, 1e9),))


def test_without_mpirun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "mpirun_here", lambda: None)
    monkeypatch.setattr(machine, "measure_machine", made_up)
    words = " ".join(printed(*HERE, "--ranks", "4", "--global-batch", "16", *ONLY).split())
    for said in (
        "global batch 16 on up to 1 rank on this machine, 2 cores", "dp 1, 16 samples × 1 pass",
        "there is no mpirun, so one rank only: python -m pip install mpich",
        "other programs used 0.5 cores meanwhile, so times are too long: measure again",
    ):  # fmt: skip
        assert said in words
    assert "RDU" not in words


def test_two_ranks_are_measured_and_each_strategy_predicted(tmp_path: Path) -> None:
    """One run, with all that it writes."""
    rows_file, config = tmp_path / "all.csv", tmp_path / "plan.toml"
    files = ("--all", str(rows_file), "--emit", str(config), "--output-folder", str(tmp_path))
    plan = record(*HERE, "--ranks", "2", "--global-batch", "16", *ONLY, *files)
    assert plan["hardware"].startswith("up to 2 ranks on this machine, ")
    assert plan["note"].startswith("the rates of this machine were measured")
    assert "all steps and their memory are predicted" in plan["note"]
    rows = list(csv.DictReader(rows_file.read_text().splitlines()))
    priced = [row for row in rows if row["predicted_step_s"]]
    assert {row["rdus"] for row in priced} == {"1", "2"}
    for row in priced:
        step_s = float(row["predicted_step_s"])
        assert step_s == pytest.approx(sum(float(row[f"predicted_{term}_s"]) for term in TERMS))
        assert 1e-5 < step_s < 10
        assert float(row["memory_bytes"]) > 50 << 20, "no process with torch is smaller"
    assert "sambasim run" in config.read_text()
