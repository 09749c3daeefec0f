"""Laws that a predicted step obeys, on models that are captured on tensors without memory."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

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
from tests.support.compiled import Made
from tests.support.whole import whole_case

LEVELS: tuple[Level, ...] = ("o0", "o1", "o3")
SN30 = load_device("sn30")


def compiled(
    make: Callable[[], nn.Module],
    *shape: int,
    inference: bool = False,
    max_grad_norm: float | None = None,
    **build: Any,
) -> Program:
    optimizer = OptimizerOptions(name="adamw", max_grad_norm=max_grad_norm)
    training = TrainingOptions(batch_size=shape[0])
    options = CompileOptions(optimizer=optimizer, training=training, pef_name="net", inference=inference, **build)
    return compile_shapes(make, lambda _: Example({"x": torch.zeros(shape)}, False), options)


def _tanh(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = torch.tanh(layer(x))
    return x.square().mean()


def _relu(net: Any, x: Tensor) -> Tensor:
    for layer, norm in zip(net.layers, net.norms, strict=True):
        x = F.relu(norm(layer(x)))
    return x.square().mean()


@cache
def perceptron(batch_size: int = 4096, width: int = 1024, depth: int = 6) -> Program:
    layers = [(width, width)] * depth
    return compiled(lambda: Made(_tanh, layers=nn.ModuleList(nn.Linear(*pair) for pair in layers)), batch_size, width)


@cache
def convolutions(batch_size: int = 64, width: int = 32, depth: int = 3) -> Program:
    def made() -> nn.Module:
        layers = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise([3, *[width] * depth]))
        return Made(_relu, layers=layers, norms=nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth)))

    return compiled(made, batch_size, 3, 64, 64)


def _log_probability(net: Any, x: Tensor) -> Tensor:
    probability: Tensor = torch.log_softmax(net.head(net.layers(x)), -1)[..., 0].mean()
    return probability


@cache
def _two_layers() -> Program:
    """Two decoder layers of GPT-2, and a large vocabulary."""

    def made() -> nn.Module:
        layer = nn.TransformerEncoderLayer(768, 8, 3072, activation="gelu", batch_first=True, norm_first=True)
        layers, head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(768, 50257)
        return Made(_log_probability, layers=layers, head=head)

    return compiled(made, 16, 512, 768)


def _step(
    program: Program,
    level: Level = "o3",
    tiles: int | None = None,
    device: DeviceSpec = SN30,
    samples: int | None = None,
) -> RankAlone:
    return price_ranks(program, budget_of(device, tiles), samples, level=level)[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", [partial(perceptron, 1 << 16), partial(convolutions, 1 << 12), _two_layers])
def test_more_tiles_are_never_slower_and_none_is_a_cliff(model: Callable[[], Program], level: Level) -> None:
    program = model()
    seconds = [_step(program, level, tiles).device_s for tiles in range(1, 9)]
    if model is not _two_layers:
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] < 0.8 * seconds[0]
    for tiles, (fewer, more) in enumerate(pairwise(seconds), 1):
        assert fewer / more <= 1.3 * (tiles + 1) / tiles, f"{tiles} tiles: {seconds}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", [perceptron, convolutions, _two_layers])
def test_more_units_are_never_slower_and_are_conserved(model: Callable[[], Program], level: Level) -> None:
    seconds = []
    for pcus in (80, 320, 640, 700, 1280, 5120):
        step = _step(model(), level, device=SN30.model_copy(update={"pcus": pcus}))
        assert all(section.price.units <= step.budget.placeable_units for section in step.sections)
        seconds.append(step.predicted_s)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "widths", [(31, 32, 33, 63, 64, 65, 80, 81, 161), (12800, 12801, 12880), whole_case((1000, 1024, 1056, 2048))]
)
def test_a_wider_a_deeper_and_a_larger_batch_are_never_quicker(widths: tuple[int, ...], level: Level) -> None:
    wider = [_step(perceptron(width=width, depth=2), level).device_s for width in widths]
    larger = [_step(perceptron(), level, 4, samples=batch).device_s for batch in (16, 64, 256, 1024, 4096)]
    deeper = [_step(perceptron(depth=depth), level).device_s for depth in (2, 3, 6)]
    captured = [_step(perceptron(batch), level, 4).device_s for batch in (16, 256, 4096)]
    for seconds in (wider, larger, deeper, captured):
        assert seconds == sorted(seconds)


@pytest.mark.parametrize("model", [perceptron, convolutions])
@pytest.mark.parametrize("tiles", [1, 3, 8])
def test_each_level_is_no_slower_than_the_one_before_and_its_parts_add_up(
    model: Callable[[], Program], tiles: int
) -> None:
    program = model()
    steps = [_step(program, level, tiles) for level in LEVELS]
    assert [step.device_s for step in steps] == sorted((step.device_s for step in steps), reverse=True)
    for step in steps:
        by_section_s = [section.price.predicted_s for section in step.sections]
        for parts in (by_section_s, step.device_s_by_kind.values(), step.device_s_by_bound.values()):
            assert sum(parts) == pytest.approx(step.device_s)
        assert step.predicted_s == pytest.approx(step.device_s + step.host_s)
        for section, group in zip(step.sections[-len(program.groups) :], program.groups, strict=True):
            states = len(program.optimizers[group.optimizer].states)
            assert section.load.traffic_bytes == 4 * group.numel * (3 + 2 * states), "read and written once"
        for section in step.sections:
            assert section.unit_share == section.price.units / step.budget.units <= 1
            assert section.unit_share > 0 or not section.load.product_flops
            assert section.chip_share <= 1 or section.load.stages == 1
        assert any(section.chip_share > 0 for section in step.sections)


@pytest.mark.parametrize(
    ("dtype", "master_weights", "each"), [("fp32", False, 28), ("bf16", True, 28), ("bf16", False, 14)]
)
def test_an_update_moves_what_memory_holds(dtype: str, master_weights: bool, each: int) -> None:
    made = partial(Made, _tanh, layers=nn.ModuleList([nn.Linear(64, 64)]))
    rank = _step(compiled(made, 8, 64, dtype=dtype, master_weights=master_weights))
    numel, kept = sum(group.numel for group in rank.program.groups), rank.need.memory
    assert sum(update.load.traffic_bytes for update in rank.update) == each * numel
    unread_bytes = 2 * numel if master_weights else 0  # weights, which are rounded from masters
    read_bytes = sum(update.load.read_bytes for update in rank.update)
    assert read_bytes == kept.parameters + kept.gradients + kept.states - unread_bytes


def test_hbm_that_is_too_small_leaves_states_to_ddr() -> None:
    program, device = perceptron(), load_device("sn40")
    whole = _step(program, device=device)
    assert whole.tiers.slow_bytes == 0
    for kept in (0.5, 0.01):
        small = device.model_copy(update={"hbm_capacity_bytes": int(whole.need.size_bytes * kept)})
        step = _step(program, device=small)
        assert step.tiers.slow_bytes == step.need.size_bytes - int(whole.need.size_bytes * kept)
        assert step.device_s > whole.device_s
    assert step.tiers.states == 1.0
    assert step.tiers.rest > 0


def test_another_batch_size_of_a_program_is_that_of_a_capture() -> None:
    for compiled_for, wanted in ((16, 4096), (4096, 16)):
        scaled, captured = _step(perceptron(compiled_for), tiles=2, samples=wanted), _step(perceptron(wanted), tiles=2)
        assert scaled.device_s == pytest.approx(captured.device_s, rel=0.02)
        assert scaled.need.size_bytes == pytest.approx(captured.need.size_bytes, rel=0.02)
