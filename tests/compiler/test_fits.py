"""What has no room on the device is refused with the resource, the need, the limit and the operator."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.front import compile_shapes
from sambasim.compiler.passes import Fits
from sambasim.errors import MachineError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions, TrainingOptions


class Deep(nn.Module):
    """Layers whose results the backward needs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x), -1)
        return x.square().mean()


class Wide(nn.Module):
    """A softmax over everything."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.scale, -1).square().mean()


def _compiled(model: type[nn.Module], rows: int, *args: int, tiles: int | None = None) -> Program:
    options = CompileOptions(
        optimizer=OptimizerOptions(name="adamw"),
        training=TrainingOptions(batch_size=rows),
        pef_name="fits",
        num_tiles=tiles,
    )
    inputs = {"x": torch.zeros(1, args[0]).expand(rows, args[0])}
    return compile_shapes(lambda: model(*args), lambda _: (inputs, False), options)


def test_tensors_between_sections_need_room_in_ddr() -> None:
    """4 layers of 64 GiB of softmax each: more than 1 tile's 128 GiB, less than all."""
    compiled = partial(_compiled, Deep, 1 << 20, 1 << 15, 4)
    with pytest.raises(MachineError) as refused:
        compiled(tiles=1)
    assert "of DDR, and 1 of 8 tiles of SN30 has 128.0 GiB" in refused.value.what
    assert "is the result of aten." in refused.value.what
    assert "test_fits.py:" in str(refused.value.where)
    assert "a larger --num-tiles" in str(refused.value.remedy)
    assert compiled(tiles=8).training is not None


def test_what_a_program_keeps_needs_room_in_ddr() -> None:
    """17 billion parameters with two states, 256 GiB."""
    with pytest.raises(MachineError, match=r"256\.\d GiB is for what the program keeps"):
        _compiled(Deep, 1, 1 << 17, 1, tiles=1)
    assert _compiled(Deep, 1, 1 << 17, 1, tiles=4).training is not None


def test_a_device_that_is_too_small_says_nothing_of_tiles() -> None:
    tiny = load_device("sn30").model_copy(update={"ddr_capacity_bytes": 1024})
    with pytest.raises(MachineError, match=r"of DDR, and SN30 has 1\.0 KiB") as refused:
        Fits(budget_of(tiny, load_calibration()))(_compiled(Deep, 4, 8, 1))
    assert "--num-tiles" not in str(refused.value.remedy)


def test_a_row_needs_room_on_the_chip() -> None:
    with pytest.raises(MachineError) as refused:
        _compiled(Wide, 1, 20_000_000, tiles=1)
    assert "of memory on the chip, and a section on 1 of 8 tiles of SN30 has 64.0 MiB" in refused.value.what
    assert "aten._softmax.default" in refused.value.what
    assert _compiled(Wide, 1, 20_000_000, tiles=8).training is not None
