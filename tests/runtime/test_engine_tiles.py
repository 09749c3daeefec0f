"""Products by the processor's tiles: near the exact ones, and used where they are faster."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.compile import compile_model
from sambasim.errors import InternalError, MachineError
from sambasim.ir.graph import Node, Ref
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.engine import tiles as module
from sambasim.runtime.engine.choice import Tiles, agree_on_tiles
from sambasim.runtime.engine.compiler import CACHE_VARIABLE, find_compiler
from sambasim.runtime.engine.inductor import Inductor
from sambasim.runtime.engine.rebuild import fake_values, rebuild
from sambasim.runtime.engine.tiles import by_tiles, product
from sambasim.runtime.executor import Executor, tangent_of
from sambasim.runtime.kernels.build import build
from sambasim.runtime.kernels.tile_product import NO_TILES, has_tiles, tile_product, why_no_tiles
from sambasim.runtime.replica import place_inputs, place_weights
from sambasim.runtime.single_rank import single_rank

pytestmark = pytest.mark.usefixtures("one_thread")

needs_tiles = pytest.mark.skipif(not has_tiles(Path("/proc/cpuinfo")), reason="this processor has no tiles")
"""Where it has, a kernel that cannot be built fails these tests."""

SIDE = 256
LAYOUTS = ["", "a", "b", "ab"]
ALL_ONES = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
"""NaNs that rounding up would make zeros of."""


def operands(rows: int, inner: int, columns: int, layout: str) -> tuple[Tensor, Tensor]:
    """`a [rows, inner]` and `b [inner, columns]`; those named in `layout` are turned views."""
    a = torch.randn(inner, rows).t() if "a" in layout else torch.randn(rows, inner)
    b = torch.randn(columns, inner).t() if "b" in layout else torch.randn(inner, columns)
    return a, b


@needs_tiles
def test_where_there_are_tiles_they_are_used() -> None:
    assert why_no_tiles() is None


def error_of(result: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """How far each element is from the exact one, in parts of the sum of its products' sizes."""
    sizes = a.double().abs() @ b.double().abs()
    return (result.double() - a.double() @ b.double()).abs() / sizes


@needs_tiles
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [1, 16, 31, 32, 49, 1537, 1600])
@pytest.mark.parametrize("inner", [1, 31, 32, 33, 128, 161])
@pytest.mark.parametrize("rows", [1, 17, 32, 70])
def test_every_element_is_the_sum_of_its_products(rows: int, inner: int, columns: int, layout: str) -> None:
    torch.manual_seed(0)
    a, b = operands(rows, inner, columns, layout)
    bias, out = torch.randn(columns), torch.full((rows, columns), torch.nan)
    assert product(a, b, out=out) is out
    assert error_of(out, a, b).max() < 1e-6
    torch.testing.assert_close(product(a, b, bias), out + bias, rtol=1e-5, atol=1e-5)


@needs_tiles
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spread", [0, 12], ids=["of one size", "of sizes from e^-36 to e^36"])
@pytest.mark.parametrize("signs", ["of one sign", "of both signs"])
@pytest.mark.parametrize("inner", [64, 384, 1536])
def test_it_is_no_further_from_the_exact_product_than_torch_is(
    inner: int, signs: str, spread: int, layout: str
) -> None:
    torch.manual_seed(0)
    a, b = operands(SIDE, inner, SIDE, layout)
    if signs == "of one sign":
        a, b = a.abs(), b.abs()
    a, b = a * torch.exp(spread * torch.randn_like(a).clamp(-3, 3)), b * torch.exp(torch.randn_like(b))
    ours, torchs = error_of(product(a, b), a, b), error_of(torch.mm(a, b), a, b)
    assert ours.square().mean() <= torchs.square().mean()
    assert ours.max() <= 1.5 * torchs.max()


@needs_tiles
def test_all_24_bits_of_a_number_count() -> None:
    """By the unit matrix, every number comes out as it went in: its three parts add up to it."""
    bits = torch.arange(SIDE * SIDE, dtype=torch.int32) * 127 + (1 << 23) * 120  # exponents 120 and 121, all mantissas
    a = bits.view(torch.float32).view(SIDE, SIDE)
    assert torch.equal(product(a, torch.eye(SIDE)), a)
    assert torch.equal(product(torch.eye(SIDE), -a), -a)


@needs_tiles
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_comes_out_where_torch_has_it(layout: str, value: float) -> None:
    torch.manual_seed(0)
    a, b = operands(SIDE, SIDE, SIDE, layout)
    a[3, 5] = value
    b[7, 11] = value
    assert torch.equal(product(a, b).isfinite(), torch.mm(a, b).isfinite())


@needs_tiles
@pytest.mark.parametrize("nan", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_nan_is_lost(layout: str, nan: int) -> None:
    torch.manual_seed(0)
    a, b = operands(SIDE, SIDE, SIDE, layout)
    a[3, 5], b[7, 11] = ALL_ONES[nan], ALL_ONES[nan]
    assert torch.equal(product(a, b).isnan(), torch.mm(a, b).isnan())


@needs_tiles
def test_at_the_ends_of_the_range_it_is_as_its_kernel_says() -> None:
    def of(a: float, b: float) -> float:
        return float(product(torch.full((SIDE, 1), a), torch.full((1, SIDE), b))[0, 0])

    assert of(2.0**-70, 2.0**-70) == 0.0  # float32 has numbers down to 2^-149
    assert of(1.2345678 * 2.0**-51, 2.0**-50) == pytest.approx(1.2345678 * 2.0**-101, rel=2.0**-23)
    largest = torch.finfo(torch.float32).max
    assert of(2.0**128 - 2.0**120, 1.0) == 2.0**128 - 2.0**120
    assert torch.tensor(of(largest, 1.0)).isnan()
    assert of(2.0**64 * (2 - 2.0**-9), 2.0**63) == torch.inf


@needs_tiles
@pytest.mark.parametrize(
    ("a", "b", "bias", "out"),
    [
        (torch.empty(SIDE, 2, dtype=torch.bfloat16), torch.empty(2, SIDE), None, None),
        (torch.empty(SIDE, 2), torch.empty(3, SIDE), None, None),
        (torch.empty(SIDE, 0), torch.empty(0, SIDE), None, None),
        (torch.empty(SIDE, 2), torch.empty(2, SIDE), torch.empty(2), None),
        (torch.empty(SIDE, 2), torch.empty(2, SIDE), None, torch.empty(2, SIDE)),
        (torch.empty(SIDE, 2), torch.empty(2, SIDE), None, torch.empty(SIDE, SIDE).t()),
    ],
    ids=["type", "inner", "nothing to add up", "bias", "out", "out in columns"],
)
def test_what_the_kernel_was_not_written_for_is_refused(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None
) -> None:
    with pytest.raises(InternalError, match="by tiles of"):
        product(a, b, bias, out=out)


@needs_tiles
def test_operands_may_overlap_themselves_or_have_gaps() -> None:
    torch.manual_seed(0)
    row, columns = torch.randn(SIDE), torch.randn(SIDE, 2 * SIDE)[:, ::2]
    for a, b in [(row.expand(SIDE, SIDE), columns), (columns, row.expand(SIDE, SIDE).t()), (columns, columns.t())]:
        assert error_of(product(a, b), a, b).max() < 1e-6


@pytest.mark.parametrize(
    ("flags", "found"), [("fpu amx_bf16 amx_tile", True), ("fpu avx512_bf16", False), ("amx_bf16x", False)]
)
def test_a_processor_with_tiles_is_known_by_its_flags(tmp_path: Path, flags: str, found: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: amx_bf16\nflags\t\t: {flags}\n")
    assert has_tiles(tmp_path / "cpuinfo") is found
    assert not has_tiles(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "dtype", "chosen"),
    [
        (SIDE, SIDE, SIDE, torch.float32, True),
        (128, 2048, SIDE, torch.float32, False),
        (SIDE, 32, 2048, torch.float32, False),
        (2048, SIDE, 64, torch.float32, False),
        (2048, 100, SIDE, torch.float32, False),
        (SIDE, 64, SIDE, torch.float32, False),
        (SIDE, SIDE, SIDE, torch.bfloat16, False),
        (SIDE, SIDE, SIDE, torch.float64, False),
    ],
)
def test_it_is_used_where_shapes_gain_by_it(
    rows: int, inner: int, columns: int, dtype: torch.dtype, chosen: bool
) -> None:
    a, b = torch.empty(rows, inner, dtype=dtype), torch.empty(inner, columns, dtype=dtype)
    assert by_tiles(a, b) is chosen


def agreed(monkeypatch: pytest.MonkeyPatch, *reasons: str | None) -> Tiles:
    """What ranks agree on that have these reasons not to use tiles."""
    communicator = single_rank("here")
    monkeypatch.setattr(type(communicator), "all_gather_object", lambda self, own: list(reasons))
    monkeypatch.setattr(type(communicator), "world_size", len(reasons))
    return agree_on_tiles("inductor", 1, communicator)


def test_tiles_are_used_if_every_rank_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, None, None) == Tiles(used=True)
    assert agreed(monkeypatch, NO_TILES, NO_TILES) == Tiles()
    for reasons in [(None, NO_TILES), (NO_TILES, None), ("no compiler", NO_TILES), ("no compiler", "no compiler")]:
        mixed = agreed(monkeypatch, *reasons)
        assert not mixed.used
        assert mixed.notice is not None
        assert ("no compiler" in mixed.notice) is ("no compiler" in reasons)


def test_with_several_threads_or_the_plain_engine_they_are_not() -> None:
    assert agree_on_tiles("inductor", 2, single_rank("here")) == Tiles()
    assert agree_on_tiles("plain", 1, single_rank("here")) == Tiles()


@needs_tiles
def test_a_kernel_that_cannot_be_built_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    for remembered in (build, tile_product):
        remembered.cache_clear()
    tiles = agree_on_tiles("inductor", 1, single_rank("here"))
    monkeypatch.undo()
    for remembered in (build, tile_product):
        remembered.cache_clear()
    assert tiles == Tiles(notice=tiles.notice)
    assert "false cannot build tile_product.c" in (tiles.notice or "")


def test_without_tiles_nothing_is_multiplied_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tile_product", lambda: None)
    a = torch.empty(SIDE, SIDE)
    with pytest.raises(InternalError, match="without them"):
        product(a, a)


@needs_tiles
@pytest.mark.parametrize(("bias", "apart"), [((SIDE,), False), ((SIDE, SIDE), True), ((1,), True)])
def test_a_bias_is_added_by_the_kernel_or_after_it(bias: tuple[int, ...], apart: bool) -> None:
    torch.manual_seed(0)
    symbols = {"bias": torch.randn(bias), "a": torch.randn(SIDE, SIDE), "b": torch.randn(SIDE, SIDE)}
    node = Node("linear", "aten.addmm.default", tuple(Ref(name) for name in symbols), (), ("y",))
    built = rebuild([node], list(symbols), ["y"], fake_values([node], symbols), tiles=True)
    called = [str(call.target) for call in built.graph.nodes if call.op == "call_function"]
    assert called == ["sambasim.product.default", *(["aten.add.Tensor"] if apart else [])]
    torch.testing.assert_close(built(*symbols.values())[0], torch.addmm(*symbols.values()), rtol=1e-5, atol=1e-4)


class Net(nn.Module):
    """Products of every layout: forward, gradients of activations, and gradients of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, SIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@needs_tiles
def test_each_pass_of_compiled_code_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one too, in which gradients are not yet written to their places: a resumed run begins with it."""
    try:
        find_compiler()
    except MachineError:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    torch.manual_seed(0)
    model, inputs = Net(), {"x": torch.randn(SIDE, SIDE)}
    options = CompileOptions(
        model=ModelOptions(target="net:Net"),
        optimizer=OptimizerOptions(name="sgd"),
        training=TrainingOptions(batch_size=SIDE),
        pef_name="net",
        output_folder=tmp_path,
    )
    path = compile_model(model, inputs, options, by_keyword=False).path
    program = read(path).program
    assert program.training is not None
    memory = DeviceMemory(program, private_storage(program.device_bytes))
    place_weights(program, memory, map_weights(path))
    place_inputs(memory, inputs)
    multiplied = []

    def counted(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        multiplied.append(out is not None)
        return product(a, b, bias, out=out)

    monkeypatch.setattr("sambasim.runtime.engine.inductor.product", counted)
    executable = Executor(program.training, program, memory.tensor, Inductor(tiles=True))
    written = "".join(path.read_text() for path in (tmp_path / "cache").rglob("*.py"))
    # Both products of the forward, and the gradient of what lies between them.
    assert written.count("torch.ops.sambasim.product.default(") == 3
    names = [member.gradient for group in program.groups for member in group.members]
    passes = []
    for _ in range(3):
        executable.run(tangent_of(program, 1.0))
        passes.append([memory.tensor(name).clone() for name in names])
    assert multiplied == [False, False, True, True, True, True]  # the gradients of both weights, in each pass
    executable.run(tangent_of(program, 1.0), accumulate=True)
    assert all(torch.equal(memory.tensor(name), 2 * one) for name, one in zip(names, passes[0], strict=True))
    plain = Executor(program.training, program, memory.tensor)
    plain.run(tangent_of(program, 1.0))
    torch.testing.assert_close(passes[0], [memory.tensor(name) for name in names], rtol=1e-4, atol=1e-8)
    for later in passes[1:]:
        assert all(map(torch.equal, later, passes[0]))
