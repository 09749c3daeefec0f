"""Memory by part against PyTorch's own accounting, and models that are made from a config; what `sambasim
estimate-memory` prints and refuses."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sambasim.commands.compile import named_in
from sambasim.commands.plan import config_text
from sambasim.commands.variants import changes_of, training_shapes
from sambasim.compiler.front import build_model, example_of_one, model_of_shapes, shapes_from_options
from sambasim.errors import DataError, ModelError, UserError
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.report.memory import LEFT_OUT
from sambasim.simulation.memory import Choices
from sambasim.simulation.planning.strategy import Strategy
from tests.cli.typed import each, invoked, printed, record, refused
from tests.support.compiled import compile_from_options
from tests.support.torch_memory import FAMILIES, check_parts
from tests.support.whole import whole, whole_case

CONFIGS = Path(__file__).parents[2] / "configs"
CHAR_GPT = str(CONFIGS / "char_gpt.toml")
TINY = ("vocab_size=64", "hidden_size=32", "intermediate_size=48", "num_hidden_layers=2", "num_attention_heads=4")

NARROW = ("vocab_size=64", "dim=32", "hidden_dim=48", "n_layers=2", "n_heads=4", "max_position_embeddings=64")

SMALL = [
    ("char_gpt.toml", (), torch.float32),
    ("resnet.toml", (), torch.bfloat16),
    ("transformers:LlamaForCausalLM", (*TINY, "max_position_embeddings=64"), torch.bfloat16),
    ("transformers:DistilBertForMaskedLM", (*NARROW, "dropout=0.0", "attention_dropout=0.0"), torch.float32),
]
"""The subject, its arguments, and the dtype in which it is compared by default."""


def options_of(subject: str, args: tuple[str, ...] = (), *more: str) -> CompileOptions:
    if subject.startswith("transformers:") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    is_config = subject.endswith(".toml")
    config, target = (CONFIGS / subject, None) if is_config else (None, subject)
    flags = {"data_parallel": True} if is_config else {"data_parallel": True, "optimizer": "adamw"}
    return compile_options(config, target, [*(f"model.args.{one}" for one in args), *more], flags)


@pytest.mark.parametrize(
    ("subject", "args", "dtype"),
    [
        (subject, args, dtype) if dtype is usual else whole_case(subject, args, dtype)
        for subject, args, usual in SMALL
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_each_part_is_what_torch_counts(subject: str, args: tuple[str, ...], dtype: torch.dtype) -> None:
    check_parts(options_of(subject, args), dtype)


@whole
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_part_of_a_family_at_its_real_size_is_what_torch_counts(family: str, dtype: torch.dtype) -> None:
    check_parts(options_of(f"transformers:{family}", FAMILIES[family]), dtype)


def test_a_sample_follows_from_the_config_where_no_data_is_named() -> None:
    def inputs_of(subject: str, *args: str) -> dict[str, tuple[int, ...]]:
        options = options_of(subject, args)
        _, example = model_of_shapes(lambda: build_model(options), lambda model: example_of_one(model, options), 3)
        return {name: tuple(one.shape) for name, one in example.inputs.items()}

    llama = "transformers:LlamaForCausalLM"
    assert inputs_of(llama, *TINY, "max_position_embeddings=100") == {"input_ids": (3, 64), "labels": (3, 64)}
    assert inputs_of(llama, *TINY, "max_position_embeddings=8192") == {"input_ids": (3, 2048), "labels": (3, 2048)}
    vision = ("image_size=32", "patch_size=16", *TINY[1:])
    found = inputs_of("transformers:ViTForImageClassification", *vision)
    assert found == {"pixel_values": (3, 3, 32, 32), "labels": (3,)}
    found = inputs_of("transformers:GPT2ForSequenceClassification", "n_layer=1", "n_embd=32", "n_head=2")
    assert found == {"input_ids": (3, 1024), "labels": (3,)}
    of_every_config = ("decoder_start_token_id=1", "attn_implementation=eager", "hidden_size=64", "num_layers=1")
    found = inputs_of("transformers:T5ForConditionalGeneration", *of_every_config)
    assert found == {"input_ids": (3, 512), "labels": (3, 512)}
    named = 'data.inputs={input_ids = "int64[16] < 64", labels = "int64[16] < 64"}'
    options = options_of(llama, TINY, "data.source=synthetic", named)
    assert example_of_one(build_model(options), options).inputs["input_ids"].shape == (1, 16)


def test_an_emitted_config_has_the_inferred_data_and_compiles_and_runs(tmp_path: Path) -> None:
    special = ("vocab_size=64", "bos_token_id=1", "eos_token_id=1")
    args = ("n_layer=1", "n_embd=16", "n_head=2", "n_positions=8", *special)
    options = options_of("transformers:GPT2ForSequenceClassification", args)
    emitted = tmp_path / "plan.toml"
    chosen = options.model_copy(update=changes_of(Strategy(1, samples=2), options))
    emitted.write_text(config_text(chosen, "as plan --emit writes it"), encoding="utf-8")
    found = compile_options(emitted, None, [], {"output_folder": tmp_path})
    assert found.data.source == "synthetic"
    assert found.data.inputs == {"input_ids": "int64[8] < 64", "labels": "int64[] < 2"}
    assert found.data.samples is None
    many = options.model_copy(update=changes_of(Strategy(4, samples=128, passes=4), options))
    assert many.data.samples == 2048, "enough for one step"
    assert found.model.args["pad_token_id"] == 0, "the model reads it, and its config has none"
    compile_from_options(found)
    assert "samples/s" in printed("run", "--pef", str(found.pef_path), "--set", "training.steps=1")


def test_compile_names_the_inputs_that_follow_from_the_config(tmp_path: Path) -> None:
    for data in ((), ("data.source=synthetic",)):
        options = options_of("transformers:GPT2ForSequenceClassification", ("n_positions=8",), *data).model_copy(
            update={"output_folder": tmp_path}
        )
        with pytest.raises(DataError, match="no data source with inputs is named") as raised:
            named_in(options)
        typed = (
            """'data.inputs={input_ids = "int64[8] < 50257", labels = "int64[] < 2"}' --set model.args.pad_token_id=0"""
        )
        assert f"--set data.source=synthetic --set {typed}" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("kind", "typed", "told", "remedy"),
    [
        (ModelError, "GPT2LMHeadModel n_layr=3",
         "GPT2Config, the config of transformers:GPT2LMHeadModel, has no field n_layr", "n_layer?"),
        (ModelError, "GPT2LMHeadModel qqqqqqqq=3", "has no field qqqqqqqq", "it has "),
        (ModelError, "GPT2LMHeadModel n_layer=many", "Field 'n_layer' expected int, got str",
         "correct it: --set model.args.NAME=VALUE"),
        (ModelError, "GPT2LMHeadModel n_embd=30 n_head=4", "cannot be built from this GPT2Config: ValueError",
         "fields that fit together"),
        (DataError, "BertModel num_hidden_layers=1", "BertModel takes no labels",
         "with a loss, such as BertForSequenceClassific"),
        (DataError, "CLIPModel", "CLIPModel takes no labels",
         "a class with a loss, such as CLIPForImageClassification"),
        (DataError, "Wav2Vec2ForCTC num_hidden_layers=1",
         "the inputs of Wav2Vec2ForCTC do not follow from its config",
         """'data.inputs={input_values = "float32[16000]", labels = "int64[16] < 32"}'"""),
        (DataError, "ResNetForImageClassification num_channels=1 num_labels=10",
         "the inputs of ResNetForImageClassification do not follow from its config: it takes pixel_values",
         """synthetic --set 'data.inputs={pixel_values = "float32[1, 224, 224]", labels = "int64[] < 10"}'"""),
    ],
)  # fmt: skip
def test_a_model_that_does_not_follow_from_its_config_is_an_error(
    kind: type[UserError], typed: str, told: str, remedy: str
) -> None:
    name, *args = typed.split()
    options = options_of(f"transformers:{name}", tuple(args))
    with pytest.raises(kind) as raised:
        training_shapes(options)
    assert told in raised.value.what
    assert remedy in (raised.value.remedy or "")


class Normalized(torch.nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("capture", [training_shapes, shapes_from_options])
def test_one_value_a_channel_needs_a_larger_batch(capture: Callable[[CompileOptions], object]) -> None:
    data = ("data.source=synthetic", 'data.inputs={x = "float32[4]"}')
    with pytest.raises(ModelError, match="Expected more than 1 value per channel") as caught:
        capture(options_of(f"{__name__}:Normalized", (), *data))
    assert caught.value.remedy == "--set training.batch_size=2, as batch normalization cannot train on one value"
    capture(options_of(f"{__name__}:Normalized", (), *data, "training.batch_size=2"))


def test_experts_as_transformers_computes_them_are_captured() -> None:
    experts = ("num_hidden_layers=1", "num_key_value_heads=2", "num_local_experts=2")
    program = shapes_from_options(options_of("transformers:MixtralForCausalLM", (*TINY, *experts)))
    assert any("grouped_mm" in (node.source.code if node.source else "") for node in program.step.nodes)


def test_without_transformers_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of("transformers:GPT2LMHeadModel")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError) as raised:
        training_shapes(options)
    assert "there is no module transformers" in raised.value.what
    assert raised.value.remedy == "pip install transformers"


UNUSUAL = """
import torch
from torch import nn

class Unusual(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).square().mean()

class Branching(Unusual):
    def forward(self, x):
        y = x @ self.weight
        return y.mean() if float(y.sum()) > 0 else y.square().mean()

OnlyFloat32 = lambda: Unusual(torch.ones(8, 4, dtype=torch.float32))
Truncated = lambda: Unusual(nn.init.trunc_normal_(torch.empty(8, 4)))
Branches = lambda: Branching(torch.ones(8, 4))
"""


def test_unusual_models(tmp_path: Path) -> None:
    file = tmp_path / "unusual.py"
    file.write_text(UNUSUAL, encoding="utf-8")

    def shapes(name: str) -> Choices:
        inputs = 'data.inputs={x = "float32[8]"}'
        return training_shapes(options_of(f"{file}:{name}", (), "data.source=synthetic", inputs, "data.samples=4"))

    assert shapes("Truncated").dtype == "bfloat16"
    assert shapes("OnlyFloat32").program.groups[0].dtype == "float32"
    with pytest.raises(ModelError, match="float") as raised:
        shapes("Branches")
    assert "return y.mean() if float(y.sum()) > 0" in (raised.value.where or "")


@pytest.mark.parametrize("dtype", ["bf16", whole_case("fp16")])
def test_a_program_of_16_bits_is_captured_on_tensors_without_memory(dtype: str) -> None:
    options = options_of("char_gpt.toml", ("layers=1",), f"compile.dtype={dtype}")
    program = shapes_from_options(options)
    assert {group.dtype for group in program.groups} == {"bfloat16" if dtype == "bf16" else "float16"}
    tied = [one for one in program.symbols.values() if one.kind == "parameter" and len(one.torch_names) > 1]
    assert len(tied) == 1, "the embedding is the last layer too"


GIVEN = ("estimate-memory", CHAR_GPT, "--replicas", "4")
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
        assert row["memory_bytes"] == sum(row[f"{part}_bytes"] for part in PARTS)
    assert told["least"]["memory_bytes"] == min(row["memory_bytes"] for row in rows)
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
    assert by_dtype["fp16", True, "none"]["memory_bytes"] == by_dtype["bf16", True, "none"]["memory_bytes"]
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
        ([CHAR_GPT, "--set", "parallel.pipeline_stages=2"],
         "parallel.pipeline_stages = 2: the estimate is for a replica of one rank", "--set parallel.pipeline_stages=1"),
        ([CHAR_GPT, "--set", "parallel.n_chips=2", "--set", "parallel.tensor_parallel=weight"],
         "parallel.n_chips = 2: the estimate", "--set parallel.n_chips=1 --set parallel.tensor_parallel="),
        ([CHAR_GPT, "--set", "compile.inference=true"], "the estimate is for training", "compile.inference=false"),
        ([CHAR_GPT, "--set", "optimizer.name=adamx"], "must be sgd, adam", "did you mean adam"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_is_an_error(arguments: list[str], told: str, remedy: str) -> None:
    error = refused("estimate-memory", *arguments)
    assert told in error.what
    assert remedy in (error.remedy or "")


@pytest.mark.parametrize("flags", [["--replicas", "0"], ["-b", "0"], ["-b", "many"]])
def test_counts_out_of_range_are_usage_errors(flags: list[str]) -> None:
    result = invoked("estimate-memory", CHAR_GPT, *flags)
    assert result.exit_code == 2
    assert f"Invalid value for '{flags[0]}" in result.output
