"""`sambasim estimate-memory`: what it prints, and what it refuses."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sambasim.optimizers import OPTIMIZERS
from sambasim.report.memory import LEFT_OUT
from tests.cli.typed import each, invoked, printed, record, refused

CONFIG = str(Path(__file__).parents[2] / "configs" / "char_gpt.toml")
GIVEN = ("estimate-memory", CONFIG, "--replicas", "4")
NUMEL = 813_824
"""Of its parameters, with gaps that align them in groups."""
PARTS = ("parameters", "gradients", "states", "activations", "temporaries", "buffers")


@pytest.fixture(scope="module")
def told() -> Any:
    return record(*GIVEN)


def test_the_table_says_the_total_first_then_what_each_change_gives() -> None:
    text = printed(*GIVEN, *each("--set", ("training.accumulation_steps=2", "model.args.layers=1")))
    assert text.splitlines()[0].endswith("MiB a rank, estimated: fp32, adamw, ZeRO 1, no recomputation, 4 replicas")
    assert text.count("as asked") == 3, "in each table"
    words = " ".join(text.split())
    for said in (*LEFT_OUT, "bf16 + master", "states, gradients, parameters"):
        assert said in words
    assert "with 2 passes in a step, gradients stay whole until the last, with any ZeRO" in words


def test_json_has_each_choice_and_its_parts_add_up(told: Any) -> None:
    rows = [told["asked"], told["least"], *told["by_dtype"], *told["by_optimizer"], *told["by_zero"]]
    for row in rows:
        assert row["total_bytes"] == sum(row[f"{part}_bytes"] for part in PARTS)
    assert told["least"]["total_bytes"] == min(row["total_bytes"] for row in rows)
    assert told["asked"] in told["by_dtype"]
    assert told["asked"] in told["by_zero"]
    by_dtype = {(row["dtype"], row["master_weights"], row["recompute"]): row for row in told["by_dtype"]}
    whole = by_dtype["fp32", False, "none"]
    assert whole["parameters_bytes"] == whole["gradients_bytes"] == 4 * NUMEL
    assert by_dtype["bf16", False, "none"]["parameters_bytes"] == 2 * NUMEL
    # a quarter of the states: two of four bytes; two of two; and with master weights three of four
    assert whole["states_bytes"] == pytest.approx(2 * NUMEL, rel=0.01)
    assert by_dtype["bf16", False, "none"]["states_bytes"] == pytest.approx(NUMEL, rel=0.01)
    assert by_dtype["bf16", True, "none"]["states_bytes"] == pytest.approx(3 * NUMEL, rel=0.01)
    assert by_dtype["fp16", True, "none"]["total_bytes"] == by_dtype["bf16", True, "none"]["total_bytes"]
    kept = [by_dtype["fp32", False, mode]["activations_bytes"] for mode in ("none", "sections", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] < 0.5 * kept[0]
    assert {row["optimizer"] for row in told["by_optimizer"]} == set(OPTIMIZERS)
    states = {(row["optimizer"], row["states_per_parameter"]): row["states_bytes"] for row in told["by_optimizer"]}
    assert states["sgd", 0] == 0
    assert states["sgd", 1] == states["lion", 1] == states["adagrad", 1]
    assert states["adam", 2] == states["adamw", 2] == 2 * states["lion", 1]


def test_what_is_asked_for_is_estimated_first(told: Any) -> None:
    changes = ("compile.dtype=bf16", "compile.master_weights=true", "parallel.zero=3", "parallel.recompute=full")
    asked = record(*GIVEN, "-b", "32", *each("--set", changes))["asked"]
    assert (asked["dtype"], asked["master_weights"], asked["zero"], asked["recompute"]) == ("bf16", True, 3, "full")
    alike = next(row for row in told["by_dtype"] if (row["master_weights"], row["recompute"]) == (True, "full"))
    assert asked["activations_bytes"] == pytest.approx(2 * alike["activations_bytes"], rel=0.05), "of twice the batch"
    assert asked["parameters_bytes"] == pytest.approx(alike["parameters_bytes"] / 4, rel=0.01)


def test_a_model_of_transformers_needs_no_data_and_no_optimizer() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    fields = ("model.args.n_layer=1", "model.args.n_embd=24", "optimizer.lr=1e-4")
    of_gpt2 = record("estimate-memory", "transformers:GPT2LMHeadModel", *each("--set", fields))
    assert of_gpt2["inputs"] == ["input_ids int64[1, 1024]", "labels int64[1, 1024]"]
    assert (of_gpt2["asked"]["optimizer"], of_gpt2["asked"]["states_per_parameter"]) == ("adamw", 2)
    layer = 12 * 24**2 + 13 * 24  # 4 products with biases, and 2 norms
    assert of_gpt2["parameters"] == (50257 + 1024) * 24 + layer + 2 * 24


@pytest.mark.parametrize(
    ("arguments", "told", "remedy"),
    [
        (["digits"], "digits is neither a model nor a config", "for a PEF: sambasim inspect digits"),
        (["net.py"], "net.py is a Python file, and the name of a model in it is missing", "net.py:NAME"),
        (["nothing.toml"], "there is no config file nothing.toml", "check the path"),
        ([CONFIG, "--set", "parallel.pipeline_stages=2"],
         "parallel.pipeline_stages = 2: the estimate is for a replica of one rank", "--set parallel.pipeline_stages=1"),
        ([CONFIG, "--set", "parallel.n_chips=2", "--set", "parallel.tensor_parallel=weight"],
         "parallel.n_chips = 2: the estimate", "--set parallel.n_chips=1 --set parallel.tensor_parallel="),
        ([CONFIG, "--set", "compile.inference=true"], "the estimate is for training", "compile.inference=false"),
        ([CONFIG, "--set", "optimizer.name=adamx"], "must be sgd, adam", "did you mean adam"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_is_an_error(arguments: list[str], told: str, remedy: str) -> None:
    error = refused("estimate-memory", *arguments)
    assert told in error.what
    assert remedy in (error.remedy or "")


@pytest.mark.parametrize("flags", [["--replicas", "0"], ["-b", "0"], ["-b", "many"]])
def test_counts_out_of_range_are_usage_errors(flags: list[str]) -> None:
    result = invoked("estimate-memory", CONFIG, *flags)
    assert result.exit_code == 2
    assert f"Invalid value for '{flags[0]}" in result.output
