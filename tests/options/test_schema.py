"""The schema: what it knows of PyTorch, the grammar of its values, the reference of its fields, and its imports."""

import inspect
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from torch.nn import functional

from sambasim.ir.types import DTYPE_BYTES
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import BuildOptions, ParallelOptions, compile_options
from sambasim.options.grammar import (
    DTYPES,
    INTEGER_LARGEST,
    LAST_STEP,
    LOSS_ARGUMENTS,
    InputSpec,
    parse_input,
    step_range,
)
from sambasim.options.problem import Refused
from sambasim.options.training import EmaOptions, OptimizerOptions
from tests.support.mpi import ROOT

_QUICK_START = compile_options(None, None, [], {})
TORCH_LOSSES = {
    name: getattr(functional, {"bce_with_logits": "binary_cross_entropy_with_logits"}.get(name, name), None)
    or getattr(functional, f"{name}_loss")
    for name in LOSS_ARGUMENTS
}


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.torch_name])
def test_defaults_are_those_of_torch(name: str) -> None:
    entry = OPTIMIZERS[name]
    theirs = inspect.signature(getattr(torch.optim, entry.torch_name or "")).parameters
    for field, default in entry.defaults.items():
        assert theirs[field].default == default, field
        assert getattr(OptimizerOptions.model_validate({"name": name}), field) == default


def test_loss_arguments_and_dtypes_are_those_of_torch_and_of_the_graph() -> None:
    for name, arguments in LOSS_ARGUMENTS.items():
        assert set(arguments) <= set(inspect.signature(TORCH_LOSSES[name]).parameters)
    assert set(DTYPES) == set(DTYPE_BYTES)
    for dtype, largest in INTEGER_LARGEST.items():
        assert torch.iinfo(getattr(torch, dtype)).max == largest


def test_hyperparameters_are_the_kernels_numbers() -> None:
    numbers = {"lr": 0.5, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
    sgd = OptimizerOptions(name="sgd", lr=0.5, momentum=0.9, max_grad_norm=2.0)
    assert list(sgd.hyperparameters().items()) == [*numbers.items(), ("max_grad_norm", 2.0)]
    adagrad = OptimizerOptions(name="adagrad", lr_decay=0.5).hyperparameters()
    assert adagrad == {"lr": 1e-2, "lr_decay": 0.5, "eps": 1e-10, "weight_decay": 0.0, "maximize": False}
    adamax = OptimizerOptions(name="adamax", betas=(0.8, 0.95)).hyperparameters()
    assert (adamax["beta1"], adamax["beta2"]) == (0.8, 0.95)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 10**6), max_size=5),
    bound=st.none() | st.integers(1, 127),
)
def test_an_input_reads_back_as_it_is_written(dtype: str, shape: list[int], bound: int | None) -> None:
    spec = InputSpec("x", dtype, tuple(shape), bound if dtype in INTEGER_LARGEST else None)
    assert parse_input("x", str(spec)) == spec


def test_inputs_and_steps_are_read_as_they_are_written() -> None:
    assert parse_input("y", "int64[]<10") == InputSpec("y", "int64", (), 10)
    assert parse_input("x", "float32[1,8, 8]") == InputSpec("x", "float32", (1, 8, 8))
    meant = {None: (1, LAST_STEP), "17": (17, 17), " 100-120 ": (100, 120), "100-": (100, LAST_STEP), "-20": (1, 20)}
    assert {text: (step_range(text)[0], step_range(text)[-1]) for text in meant} == meant
    for text in ("", "-", "0", "4-3", "1-2-3", "1.5", "٣", "9" * 19):
        with pytest.raises(Refused):
            step_range(text)


TABLES: dict[str, type[BaseModel]] = {
    **{
        name: type(getattr(_QUICK_START, name))
        for name in ("model", "data", "loss", "optimizer", "evaluation", "training")
    },
    **{f"training.{name}": type(getattr(_QUICK_START.training, name)) for name in ("schedule", "loss_scale")},
    "ema": EmaOptions,
    "compile": BuildOptions,
    "parallel": ParallelOptions,
}


def test_the_reference_names_every_field_and_no_other() -> None:
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    known = {f"{table}.{field}" for table, schema in TABLES.items() for field in schema.model_fields}
    assert documented == known - {"training.schedule", "training.loss_scale"} | {"arguments"}
