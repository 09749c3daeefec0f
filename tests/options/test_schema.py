"""What the schema knows of PyTorch is true, and nothing heavy is imported to know it."""

import inspect
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn import functional

from sambasim.ir.types import DTYPE_BYTES
from sambasim.options import LOSS_ARGUMENTS, OPTIMIZER_DEFAULTS, InputSpec, OptimizerOptions, parse_input
from sambasim.options.inputs import DTYPES, INTEGER_LARGEST

TORCH_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
TORCH_LOSSES = {
    name: getattr(functional, {"bce_with_logits": "binary_cross_entropy_with_logits"}.get(name, name), None)
    or getattr(functional, f"{name}_loss")
    for name in LOSS_ARGUMENTS
}


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
def test_defaults_are_those_of_torch(name: str) -> None:
    theirs = inspect.signature(TORCH_OPTIMIZERS[name]).parameters
    for field, default in OPTIMIZER_DEFAULTS[name].items():
        assert theirs[field].default == default, field
        assert getattr(OptimizerOptions.model_validate({"name": name}), field) == default


@pytest.mark.parametrize("name", LOSS_ARGUMENTS)
def test_loss_arguments_are_those_of_torch(name: str) -> None:
    assert set(LOSS_ARGUMENTS[name]) <= set(inspect.signature(TORCH_LOSSES[name]).parameters)


def test_hyperparameters_are_the_kernels_numbers() -> None:
    sgd = OptimizerOptions(name="sgd", lr=0.5, momentum=0.9, max_grad_norm=2.0)
    assert sgd.hyperparameters() == {
        "lr": 0.5, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "max_grad_norm": 2.0,
    }  # fmt: skip
    adamw = OptimizerOptions(name="adamw", betas=(0.8, 0.95))
    assert adamw.hyperparameters() == {"lr": 1e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 1e-2}


def test_options_are_frozen_and_closed() -> None:
    options = OptimizerOptions(name="adam")
    with pytest.raises(ValidationError, match=r"frozen"):
        options.lr = 3.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match=r"Extra inputs"):
        OptimizerOptions.model_validate({"name": "adam", "amsgrad": True})


def test_dtypes_are_those_of_the_graph() -> None:
    assert set(DTYPES) == set(DTYPE_BYTES)
    for dtype, largest in INTEGER_LARGEST.items():
        assert torch.iinfo(getattr(torch, dtype)).max == largest


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 10**6), max_size=5),
    bound=st.none() | st.integers(1, 127),
)
def test_an_input_reads_back_as_it_is_written(dtype: str, shape: list[int], bound: int | None) -> None:
    spec = InputSpec("x", dtype, tuple(shape), bound if dtype in INTEGER_LARGEST else None)
    assert parse_input("x", str(spec)) == spec


def test_an_input_may_be_written_without_spaces() -> None:
    assert parse_input("y", "int64[]<10") == InputSpec("y", "int64", (), 10)
    assert parse_input("x", "float32[1,8, 8]") == InputSpec("x", "float32", (1, 8, 8))


def test_options_import_neither_torch_nor_numpy_nor_mpi() -> None:
    code = "import sys, sambasim.options; print([m for m in ('torch', 'numpy', 'mpi4py', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
