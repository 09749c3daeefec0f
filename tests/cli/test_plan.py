"""`sambasim plan`: what it prints and writes, what it refuses, and that its configs compile and run."""

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sambasim.cli.main import sambasim
from sambasim.errors import OptionError
from sambasim.options.compile import compile_options
from tests.mpi.training import run_of, train
from tests.support.mpi import ROOT
from tests.support.whole import whole_case

SMALL = [
    "--set", "model.args.width=32", "--set", "model.args.layers=2", "--set", "model.args.length=16",
    "--set", "data.args.length=16", "--set", "training.batch_size=4", "--set", "training.steps=3",
]  # fmt: skip
MODEL = [str(ROOT / "configs" / "char_gpt.toml"), *SMALL, "--global-batch", "16"]


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(sambasim, ["plan", *MODEL, *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("plan")
    files = ["--all", str(folder / "all.csv"), "--html", str(folder / "plan.html"), "--emit", str(folder / "plan.toml")]
    return folder, _plan("--only", "zero=1", "--only", "recompute=none,full", "--explain", *files).stdout


def test_it_gives_a_verdict_a_table_and_the_terms(written: tuple[Path, str]) -> None:
    text = written[1]
    assert "char_gpt: global batch 16 on 8 SN30 of sn30-8" in text
    assert "the model fits: " in text
    assert "so replicas alone are possible" in text
    assert "1 node, 8 RDUs, linked directly" in text
    assert "of parameters, gradients and states: fits" in text
    assert "The best 10, fastest first" in text
    assert "1 against 2" in text
    assert "memory of the fullest RDU" in text
    assert "predicted, not measured. The device model gives all times" in text


def test_the_csv_has_every_strategy_with_memory_by_part(written: tuple[Path, str]) -> None:
    rows = list(csv.DictReader((written[0] / "all.csv").open(encoding="utf-8")))
    priced = [row for row in rows if row["memory_bytes"]]
    fitting, compiled, lacking = (
        int(re.findall(pattern, written[1])[0].replace(",", ""))
        for pattern in (r"([\d,]+) strategies fit", r"([\d,]+) of them compiled", r"([\d,]+) do not")
    )
    assert len(priced) == fitting + lacking
    assert sum(row["compiled"] == "True" and not row["problem"] for row in priced) == compiled
    for row in priced:
        parts = ("parameters", "gradients", "states", "activations", "buffers")
        assert sum(int(row[f"{part}_bytes"]) for part in parts) == int(row["memory_bytes"])
        terms = ("compute", "host", "messages", "bubble", "update", "sync")
        total_s = sum(float(row[f"predicted_{term}_s"]) for term in terms)
        assert total_s == pytest.approx(float(row["predicted_step_s"]))
    refused = [row for row in rows if not row["memory_bytes"]]
    assert refused
    assert all(row["problem"] for row in refused)


def test_the_page_shows_time_and_memory_without_the_network(written: tuple[Path, str]) -> None:
    page = (written[0] / "plan.html").read_text(encoding="utf-8")
    assert "frontier-figure" in page
    assert "Predicted, not measured." in page
    assert "not beaten in both" in page
    assert "measured parts" not in page


def test_a_plan_in_json_has_the_best_and_the_frontier() -> None:
    record = json.loads(_plan("--json", "--only", "stages=1", "--only", "recompute=none").stdout)
    assert record["model"] == "char_gpt"
    assert len(record["best"]) == 10
    assert record["best"][0]["predicted_step_s"] == min(one["predicted_step_s"] for one in record["best"])
    assert record["frontier"][0]["rdu_bytes"] > record["frontier"][-1]["rdu_bytes"]


WANTED = {
    "pipeline": ["replicas=2", "stages=2", "schedule=interleaved-1f1b", "chips=1"],
    "tensor": ["replicas=2", "tensor=weight", "chips=2", "stages=1", "recompute=full"],
}


@pytest.mark.parametrize("names", [["pipeline"], whole_case(["tensor"])])
def test_emitted_configs_compile_and_train_at_np_4_as_in_one_process(names: list[str], tmp_path: Path) -> None:
    runs = []
    for name in names:
        only = WANTED[name]
        emitted = tmp_path / f"{name}.toml"
        wanted = [word for one in only for word in ("--only", one)]
        best = json.loads(_plan(*wanted, "--json", "--emit", str(emitted)).stdout)["best"][0]
        assert all(str(best[field]) == value for field, value in (one.split("=") for one in only))
        assert "mpirun -np 4 sambasim run --reduce-on-rdu --pef char_gpt" in emitted.read_text(encoding="utf-8")
        assert f"#   sambasim simulate {emitted} --replicas 2 --sync rdu" in emitted.read_text(encoding="utf-8")
        options = compile_options(emitted, None, [], {})
        assert options.training.batch_size * options.training.accumulation_steps * options.world_size == 16
        command = ["compile", "--config", str(emitted), "--output-folder", str(tmp_path / name)]
        CliRunner().invoke(sambasim, command, catch_exceptions=False)
        pef = tmp_path / name / "char_gpt" / "char_gpt.pef"
        runs += [run_of(f"{name} mpi", pef, steps=3), run_of(f"{name} alone", pef, steps=3, emulate=2)]
    found = train(4, runs)
    for name in names:
        assert found[f"{name} mpi"].outcome == found[f"{name} alone"].outcome


def test_a_deepspeed_config_says_what_it_cannot(tmp_path: Path) -> None:
    result = _plan(
        "--only", "stages=2", "--only", "replicas=2", "--only", "chips=1", "--emit", str(tmp_path / "ds.json")
    )
    config = json.loads((tmp_path / "ds.json").read_text(encoding="utf-8"))
    assert config["train_batch_size"] == 16
    assert "cannot say: a pipeline of 2 stages" in result.stderr


def test_a_pef_is_planned_without_its_code(tmp_path: Path) -> None:
    command = ["compile", "-b", "4", "--data-parallel", "--output-folder", str(tmp_path)]
    CliRunner().invoke(sambasim, command, catch_exceptions=False)
    arguments = [
        "plan",
        str(tmp_path / "digits" / "digits.pef"),
        "--global-batch",
        "16",
        "--only",
        "stages=1",
        "--json",
    ]
    record = json.loads(CliRunner().invoke(sambasim, arguments, catch_exceptions=False).stdout)
    assert record["best"][0]["samples"] * record["best"][0]["replicas"] * record["best"][0]["passes"] == 16


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
        (["--arch", "sn31"], "there is no device called 'sn31'"),
        (["--all", "x.csv", "--html", "x.csv"], "would overwrite another file"),
        (["--cluster", "sn31-8"], "there is no cluster called 'sn31-8'"),
        (["--set", "compile.inference=true"], "a plan is for training"),
        (["--emit", "x.yaml"], "--emit x.yaml: a config ends in .toml, or, for DeepSpeed, in .json"),
        (["--emit", "x"], "try:   --emit x.toml"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], said: str) -> None:
    with pytest.raises(OptionError) as error:
        _plan(*arguments)
    assert said in str(error.value)
    assert error.value.remedy


def test_a_device_that_no_config_can_name_is_not_emitted(tmp_path: Path) -> None:
    device = tmp_path / "mine.toml"
    device.write_text((ROOT / "sambasim" / "hardware" / "devices" / "sn30.toml").read_text(encoding="utf-8"))
    with pytest.raises(OptionError, match="a config compiles for sn10, sn30, sn40, sn40l, not"):
        _plan("--arch", str(device), "--emit", str(tmp_path / "x.toml"))


def test_the_device_that_is_named_cuts_the_sections_too(tmp_path: Path) -> None:
    emitted = tmp_path / "x.toml"
    only = ["stages=1", "replicas=1", "chips=1", "recompute=none", "passes=2", "tiles=4"]
    words = [word for one in only for word in ("--only", one)]
    best = json.loads(_plan(*words, "--arch", "sn10", "--json", "--emit", str(emitted)).stdout)["best"][0]
    CliRunner().invoke(sambasim, ["compile", "--config", str(emitted), "--output-folder", str(tmp_path)])
    command = ["simulate", "char_gpt", "--output-folder", str(tmp_path), "--json", "--replicas", "1"]
    record = json.loads(CliRunner().invoke(sambasim, command, catch_exceptions=False).stdout)
    assert best["predicted_step_s"] == pytest.approx(record["predicted_s"])
    assert best["memory_bytes"] == record["needed_bytes"]


def _small_device(folder: Path, capacity_bytes: int) -> str:
    text = (ROOT / "sambasim" / "hardware" / "devices" / "sn30.toml").read_text(encoding="utf-8")
    (folder / "small.toml").write_text(
        re.sub(r"ddr_capacity_bytes = [\d_]+", f"ddr_capacity_bytes = {capacity_bytes}", text)
    )
    return str(folder / "small.toml")


def test_what_fits_nowhere_says_what_is_closest(tmp_path: Path) -> None:
    found = _plan("--arch", _small_device(tmp_path, 65536), "--only", "recompute=none")
    assert found.exit_code == 1
    assert "no strategy fits; the closest: " in found.stdout
    assert " of 64.0 KiB, " in found.stdout


def test_of_what_was_compiled_only_what_fits_is_counted(tmp_path: Path) -> None:
    rows = tmp_path / "all.csv"
    found = _plan("--arch", _small_device(tmp_path, 400_000), "--only", "zero=1", "--all", str(rows))
    fitting, compiled = re.findall(r"([\d,]+) strategies fit, (\d+) of them compiled", found.stdout)[0]
    every = [row for row in csv.DictReader(rows.open(encoding="utf-8")) if row["memory_bytes"]]
    assert 0 < int(fitting.replace(",", "")) == sum(not row["problem"] for row in every) < len(every)
    assert int(compiled) == sum(row["compiled"] == "True" and not row["problem"] for row in every)
