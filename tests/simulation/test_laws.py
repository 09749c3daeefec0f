"""Laws that a predicted step obeys, on models that are captured on tensors without memory."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.capture.step import Example
from sambasim.compiler.front import compile_shapes
from sambasim.costs.cut import Level
from sambasim.hardware.budget import budget_of
from sambasim.hardware.spec import DeviceSpec, load_device
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions, TrainingOptions
from sambasim.simulation.alone import RankAlone, price_ranks
from tests.support.whole import whole_case

LEVELS: tuple[Level, ...] = ("o0", "o1", "o3")


class Perceptron(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Convolutions(nn.Module):
    def __init__(self, features: int, depth: int) -> None:
        super().__init__()
        sizes = [3, *[features] * depth]
        self.layers = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(features) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x.square().mean()


@cache
def _perceptron(batch_size: int = 4096, width: int = 1024, depth: int = 6) -> Program:
    return _compiled(lambda: Perceptron(width, depth), (batch_size, width))


@cache
def _convolutions(batch_size: int = 64, width: int = 32, depth: int = 3, *, inference: bool = False) -> Program:
    return _compiled(lambda: Convolutions(width, depth), (batch_size, 3, 64, 64), inference=inference)


class Layers(nn.Module):
    """Two decoder layers of GPT-2, and a large vocabulary."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.head(self.layers(x)), -1)[..., 0].mean()


@cache
def _two_layers() -> Program:
    return _compiled(lambda: Layers(768, 50257), (16, 512, 768))


def _compiled(make: Callable[[], nn.Module], shape: tuple[int, ...], *, inference: bool = False) -> Program:
    optimizer, training = OptimizerOptions(name="adamw"), TrainingOptions(batch_size=shape[0])
    options = CompileOptions(optimizer=optimizer, training=training, pef_name="law", inference=inference)
    return compile_shapes(make, lambda _: Example({"x": torch.zeros(shape)}, False), options)


def _step(program: Program, level: Level = "o3", tiles: int | None = None) -> RankAlone:
    return _on(load_device("sn30"), program, level, tiles)


def _on(
    device: DeviceSpec, program: Program, level: Level = "o3", tiles: int | None = None, samples: int | None = None
) -> RankAlone:
    return price_ranks(program, budget_of(device, tiles), samples, level=level)[0].alone


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", [partial(_perceptron, 1 << 16), partial(_convolutions, 1 << 12), _two_layers])
def test_more_tiles_are_never_slower_and_none_is_a_cliff(model: Callable[[], Program], level: Level) -> None:
    program = model()
    seconds = [_step(program, level, tiles).device_s for tiles in range(1, 9)]
    if model is not _two_layers:
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] < 0.8 * seconds[0]
    for tiles, (fewer, more) in enumerate(pairwise(seconds), 1):
        assert fewer / more <= 1.3 * (tiles + 1) / tiles, f"{tiles} tiles: {seconds}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", [_perceptron, _convolutions, _two_layers])
def test_more_units_are_never_slower_and_are_conserved(model: Callable[[], Program], level: Level) -> None:
    device, seconds = load_device("sn30"), []
    for pcus in (80, 320, 640, 700, 1280, 5120):
        step = _on(device.model_copy(update={"pcus": pcus}), model(), level)
        assert all(section.price.units <= step.budget.placeable_units for section in step.sections)
        seconds.append(step.predicted_s)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "widths", [(31, 32, 33, 63, 64, 65, 80, 81, 161), (12800, 12801, 12880), whole_case((1000, 1024, 1056, 2048))]
)
def test_a_wider_model_is_never_quicker(widths: tuple[int, ...], level: Level) -> None:
    seconds = [_step(_perceptron(width=width), level).device_s for width in widths]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("level", LEVELS)
def test_a_larger_batch_and_a_deeper_model_are_never_quicker(level: Level) -> None:
    by_batch = [_step(_perceptron(batch), level, 4).device_s for batch in (16, 64, 256, 1024, 4096)]
    assert by_batch == sorted(by_batch)
    by_depth = [_step(_perceptron(depth=depth), level).device_s for depth in (2, 3, 6)]
    assert by_depth == sorted(by_depth)


@pytest.mark.parametrize("model", [_perceptron, _convolutions])
@pytest.mark.parametrize("tiles", [1, 3, 8])
def test_each_level_is_no_slower_than_the_one_before(model: Callable[[], Program], tiles: int) -> None:
    o0, o1, o3 = (_step(model(), level, tiles).device_s for level in LEVELS)
    assert o3 <= o1 <= o0


def test_hbm_that_is_too_small_leaves_states_to_ddr() -> None:
    program, device = _perceptron(), load_device("sn40")
    whole = _on(device, program)
    assert whole.tiers.slow_bytes == 0
    for kept in (0.5, 0.01):
        small = device.model_copy(update={"hbm_capacity_bytes": int(whole.need.size_bytes * kept)})
        step = _on(small, program)
        assert step.tiers.slow_bytes == step.need.size_bytes - int(whole.need.size_bytes * kept)
        assert step.device_s > whole.device_s
    assert step.tiers.states == 1.0
    assert step.tiers.rest > 0


def test_another_batch_size_of_a_program_is_that_of_a_capture() -> None:
    sizes, device = (16, 4096), load_device("sn30")
    for compiled, wanted in (sizes, sizes[::-1]):
        scaled = _on(device, _perceptron(compiled), tiles=2, samples=wanted)
        captured = _on(device, _perceptron(wanted), tiles=2)
        assert scaled.device_s == pytest.approx(captured.device_s, rel=0.02)
        assert scaled.need.size_bytes == pytest.approx(captured.need.size_bytes, rel=0.02)


@pytest.mark.parametrize("model", [_perceptron, _convolutions])
def test_the_parts_are_the_total_and_the_sections_those_of_the_compiler(model: Callable[[], Program]) -> None:
    program = model()
    step = _step(program)
    assert sum(section.price.predicted_s for section in step.sections) == pytest.approx(step.device_s)
    assert sum(step.device_s_by_kind.values()) == pytest.approx(step.device_s)
    assert sum(step.device_s_by_bound.values()) == pytest.approx(step.device_s)
    assert step.predicted_s == pytest.approx(step.device_s + step.host_s)
    for section, group in zip(step.sections[-len(program.groups) :], program.groups, strict=True):
        states = len(program.optimizers[group.optimizer].states)
        assert section.load.traffic_bytes == 4 * group.numel * (3 + 2 * states), "each tensor is read and written once"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tiles", [1, 8])
def test_shares_of_units_and_of_the_chip(level: Level, tiles: int) -> None:
    step = _step(_perceptron(), level, tiles)
    for section in step.sections:
        assert section.unit_share == section.price.units / step.budget.units <= 1
        assert section.unit_share > 0 or not section.load.product_flops
        assert section.chip_share <= 1 or section.operators == 1
    assert any(section.chip_share > 0 for section in step.sections)
