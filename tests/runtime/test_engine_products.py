"""Products by our kernel: right at every shape that it takes, and used where it gives the bits of torch's."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.engine import products as module
from sambasim.runtime.engine.products import (
    COLUMNS,
    Layout,
    Multiply,
    Operands,
    Products,
    Trial,
    block_of,
    faster_product,
    product_kernel,
)
from sambasim.runtime.executor import Executor, tangent_of
from sambasim.runtime.replica import place_inputs, place_weights

BATCH, WIDTH = 64, 512


pytestmark = pytest.mark.usefixtures("one_thread")


def multiply_of(a: Tensor, b: Tensor) -> Multiply:
    multiply = product_kernel(a, b)
    if multiply is None:
        pytest.skip("the kernel cannot be built here")
    return multiply


needs_narrow_mkl = pytest.mark.skipif(not module.mkl_is_narrow(), reason="MKL is at its best here")


def operands(rows: int, inner: int, columns: int, layout: str) -> tuple[Tensor, Tensor]:
    """`a [rows, inner]` and `b [inner, columns]`; those named in `layout` are turned views."""
    a = torch.randn(inner, rows).t() if "a" in layout else torch.randn(rows, inner)
    b = torch.randn(columns, inner).t() if "b" in layout else torch.randn(inner, columns)
    return a, b


@pytest.mark.parametrize("layout", ["", "a", "b", "ab"])
@pytest.mark.parametrize("rows", [1, 13, 14, 15, 700])
@pytest.mark.parametrize("inner", [1, 16, 193, 385])
def test_every_element_is_the_sum_of_its_products(rows: int, inner: int, layout: str) -> None:
    a, b = operands(rows, inner, 3 * COLUMNS, layout)
    bias, out = torch.randn(3 * COLUMNS), torch.full((rows, 3 * COLUMNS), torch.nan)
    multiply = multiply_of(a, b)
    for before in (None, bias):
        multiply(before, a, b, out)
        right = a.double() @ b.double() + (0 if before is None else before.double())
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-4)  # `inner` roundings of float32


@needs_narrow_mkl
@pytest.mark.parametrize("layout", ["", "a", "b"])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(256, 384, 1152), (64, 256, 512), (96, 1536, 384), (70, 193, 640)]
)
def test_it_gives_the_bits_of_torch(rows: int, inner: int, columns: int, layout: str) -> None:
    a, b = operands(rows, inner, columns, layout)
    bias, out = torch.randn(columns), torch.empty(rows, columns)
    multiply = multiply_of(a, b)
    multiply(None, a, b, out)
    assert torch.equal(out.view(torch.int32), torch.mm(a, b).view(torch.int32))
    multiply(bias, a, b, out)
    assert torch.equal(out.view(torch.int32), torch.addmm(bias, a, b).view(torch.int32))


def test_one_that_adds_up_in_another_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mkl_is_narrow", lambda: True)
    a, b = operands(BATCH, WIDTH, WIDTH, "")
    multiply_of(a, b)
    asked = Operands(Layout.of(a), Layout.of(b))
    # In halves is another order than any library's that adds up from the first product to the last.
    monkeypatch.setattr("sambasim.runtime.engine.products.block_of", lambda inner: block_of(inner) // 2 + 1)
    assert faster_product(asked) is None


@pytest.fixture
def always_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two is quicker on this machine, at this moment, is nothing that a test can know."""
    monkeypatch.setattr(Trial, "is_faster", lambda trial: True)


@needs_narrow_mkl
def test_one_that_is_slower_than_torchs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(BATCH, WIDTH, WIDTH, "")
    multiply = multiply_of(a, b)

    def dawdle(bias: Tensor | None, a: Tensor, b: Tensor, out: Tensor) -> None:
        multiply(bias, a, b, out)
        time.sleep(0.1)

    trial = Trial.of(dawdle, Operands(Layout.of(a), Layout.of(b)))
    assert trial.same_bits()
    assert not trial.is_faster()
    monkeypatch.setattr(module, "product_kernel", lambda a, b: dawdle)
    assert faster_product(Operands(Layout.of(a), Layout.of(b))) is None


@needs_narrow_mkl
@pytest.mark.usefixtures("always_quicker")
def test_torchs_is_taken_for_little_work_other_types_and_several_threads() -> None:
    a, b = operands(BATCH, WIDTH, WIDTH, "")
    multiply_of(a, b)

    def is_ours(a: Tensor, b: Tensor) -> bool:
        return faster_product(Operands(Layout.of(a), Layout.of(b))) is not None

    assert is_ours(a, b)
    assert not is_ours(a[:8], b)
    assert not is_ours(a.double(), b.double())
    assert not is_ours(a, b[:, : WIDTH - 1])
    assert not is_ours(a[:, ::2], b[::2])
    torch.set_num_threads(2)
    assert not is_ours(a, b)


@needs_narrow_mkl
@pytest.mark.usefixtures("always_quicker")
def test_operands_that_lie_otherwise_than_they_did_are_torchs() -> None:
    a, b = operands(BATCH, WIDTH, WIDTH, "")
    multiply_of(a, b)
    products = Products()
    products.watched(0, torch.mm)(a, b)
    quicker = products.faster(0)
    assert quicker is not None
    for other_a, other_b in ((a, b.t().contiguous().t()), (torch.randn(2 * BATCH, WIDTH), b), (a[:1], b)):
        result = quicker(other_a, other_b)
        assert isinstance(result, Tensor)
        assert torch.equal(result, torch.mm(other_a, other_b))


@pytest.mark.usefixtures("always_quicker")
def test_a_pass_same_bits_of_eager_before_and_after(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), Mean())
    x = torch.randn(BATCH, WIDTH)
    options = CompileOptions(
        model=ModelOptions(target="net:Net"),
        optimizer=OptimizerOptions(name="sgd"),
        training=TrainingOptions(batch_size=BATCH),
        pef_name="wide",
        output_folder=tmp_path,
        data_parallel=True,
    )
    path = compile_model(model, {"x": x}, options, by_keyword=False).path
    program = read(path).program
    assert program.training is not None
    memory = DeviceMemory(program, private_storage(program.device_bytes))
    place_weights(program, memory, map_weights(path))
    place_inputs(memory, {"x": x})
    executable = Executor(program.training, program, memory.tensor)
    tangent = tangent_of(program, 1.0)
    for accumulate in (False, False, True, False):
        executable.run(tangent, accumulate=accumulate)
        if not accumulate:
            model.zero_grad()
        model(x).backward()
        for member in (member for group in program.groups for member in group.members):
            right = model.get_parameter(member.parameter.partition("__")[2].replace("__", ".")).grad
            assert right is not None
            assert torch.equal(memory.tensor(member.gradient), right), (member.parameter, accumulate)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
