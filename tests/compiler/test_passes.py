"""The passes: what each leaves, by law where there is one; and programs that no machine holds, from shapes alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import capture_model
from sambasim.compiler.front import compile_shapes
from sambasim.compiler.passes import Fits, Partition, pipeline, run_pipeline
from sambasim.compiler.update import REDUCE_BUFFER
from sambasim.costs.cut import MOST_OF_A_MODULE, MOST_STAGES, Level
from sambasim.errors import MachineError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import Graph, Node, Ref, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.options.compile import CompileOptions, compile_options
from sambasim.published.models import MODELS
from tests.support.compiled import Made, compile_from_options, net_options
from tests.support.mpi import ROOT


def _options(folder: Path = Path("out"), **changes: object) -> CompileOptions:
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.9}, "training": {"batch_size": 4}}
    return net_options(folder, **{"loss": {"name": "cross_entropy"}, **sgd, **changes})


BUDGET = budget_of(load_device("sn30"))


def _sequences() -> nn.Module:
    """An LSTM with the sizes of a public SambaFlow PEF."""
    lstm, head = nn.LSTM(28, 256, batch_first=True), nn.Linear(256, 10)
    return Made(lambda net, x: net.head(net.lstm(x)[0][:, -1]), lstm=lstm, head=head)


def test_a_gradient_group_for_each_parameter_as_in_a_public_pef_of_an_lstm() -> None:
    inputs = {"x": torch.zeros(4, 3, 28), "target": torch.zeros(4, dtype=torch.int64)}
    options = _options(data_parallel=True, gradient_groups="parameter")
    program = compile_shapes(_sequences, lambda model: Example(inputs, False), options)
    members = [[member.parameter for member in group.members] for group in program.groups]
    assert sorted(members) == sorted([s.name] for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER)
    assert len(members) == 6
    assert program.symbols[REDUCE_BUFFER].type.numel == 4 * 256 * 256 + 64 == 262_208
    assert len({group.wrapper for group in program.groups}) == 6


MOST_OF_A_SECTION = {"o0": 1, "o1": MOST_OF_A_MODULE, "o3": MOST_STAGES}

runs = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=50)
@given(forward=runs, backward=runs, level=st.sampled_from(["o0", "o1", "o3"]))
def test_any_partition_covers_each_node_once_and_in_order(
    forward: list[tuple[str, int]], backward: list[tuple[str, int]], level: Level
) -> None:
    modules = [[module for module, count in part for _ in range(count)] for part in (forward, backward)]
    nodes = tuple(
        Node(f"node_{index}", "aten.relu.default", (Ref(f"value_{index}"),), (), (f"value_{index + 1}",), module)
        for index, module in enumerate(modules[0] + modules[1])
    )
    values = {f"value_{index + 1}": TensorType("float32", (2, 3)) for index in range(len(nodes))}
    symbols = {"value_0": Symbol("value_0", SymbolKind.INPUT, TensorType("float32", (2, 3)))}
    split = len(modules[0])
    whole = (
        Section(0, SectionKind.FWD, "forward", 0, split),
        Section(1, SectionKind.BCKWD, "backward", split, len(nodes)),
    )
    graph = Graph("training", ("value_0",), nodes, (), values, whole)
    empty = replace(graph, nodes=(), sections=())
    program = Program("p", 1, symbols, graph, empty, None, None, False, (), (), (), 0)
    partitioned = Partition(level, BUDGET)(program).step
    sections = partitioned.sections
    covered = [node for section in sections for node in partitioned.section_nodes(section)]
    assert covered == list(nodes)
    assert all(before.stop == after.start for before, after in pairwise(sections))
    for section in sections:
        assert 1 <= section.stop - section.start <= MOST_OF_A_SECTION[level]
        assert (section.kind is SectionKind.FWD) == (section.stop <= split)
        if level == "o1":
            assert len({node.module for node in partitioned.section_nodes(section)}) == 1
    assert len({section.name for section in sections}) == len(sections)


def deep(width: int, layers: int) -> nn.Module:
    def then(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = torch.softmax(layer(x), -1)
        return x.square().mean()

    return Made(then, layers=nn.ModuleList(nn.Linear(width, width) for _ in range(layers)))


def wide(width: int) -> nn.Module:
    scale = nn.Parameter(torch.ones(width))
    return Made(lambda net, x: torch.softmax(x * net.scale, -1).square().mean(), scale=scale)


def _compiled(model: Callable[..., nn.Module], rows: int, *args: int, tiles: int | None = None) -> Program:
    options = _options(optimizer={"name": "adamw"}, training={"batch_size": rows}, loss=None, num_tiles=tiles)
    inputs = {"x": torch.zeros(1, args[0]).expand(rows, args[0])}
    program = compile_shapes(lambda: model(*args), lambda _: Example(inputs, False), options)
    return Fits(budget_of(load_device("sn30"), tiles))(program)


def test_tensors_between_sections_need_room_in_ddr() -> None:
    """4 layers of 64 GiB of softmax each: more than 1 tile's 128 GiB, less than all."""
    compiled = partial(_compiled, deep, 1 << 20, 1 << 15, 4)
    with pytest.raises(MachineError) as refused:
        compiled(tiles=1)
    assert "of DDR, and 1 of 8 tiles of SN30 has 128.0 GiB" in refused.value.what
    assert "is the result of aten." in refused.value.what
    assert "test_passes.py:" in str(refused.value.where)
    assert "a larger --num-tiles" in str(refused.value.remedy)
    assert compiled(tiles=8).training is not None


def test_what_a_program_keeps_needs_room_in_ddr() -> None:
    """17 billion parameters with two states, 256 GiB."""
    with pytest.raises(MachineError, match=r"256\.\d GiB is for what the program keeps"):
        _compiled(deep, 1, 1 << 17, 1, tiles=1)
    compiled = _compiled(deep, 1, 1 << 17, 1, tiles=4)
    tiny = load_device("sn30").model_copy(update={"ddr_capacity_bytes": 1024})
    with pytest.raises(MachineError, match=r"of DDR, and SN30 has 1\.0 KiB") as refused:
        Fits(budget_of(tiny))(compiled)
    assert "--num-tiles" not in str(refused.value.remedy), "a device that is too small has no tiles to add"


def test_a_row_needs_room_on_the_chip() -> None:
    with pytest.raises(MachineError) as refused:
        _compiled(wide, 1, 20_000_000, tiles=1)
    assert "of memory on the chip, and a section on 1 of 8 tiles of SN30 has 68.0 MiB" in refused.value.what
    assert "aten._softmax.default" in refused.value.what
    assert _compiled(wide, 1, 20_000_000, tiles=8).training is not None


OPTIONS = _options(optimizer={"name": "adamw"}, loss=None)
GPT = {"heads": 2, "layers": 1, "length": 16, "vocabulary": 100}
MAKE, BATCH = MODELS["gpt2"]


def _fake(width: int) -> Program:
    example = Example(BATCH(4, width=width, **GPT), by_keyword=True)
    return compile_shapes(lambda: MAKE(width=width, **GPT), lambda model: example, OPTIONS)


def test_the_program_is_that_of_real_tensors() -> None:
    example = Example(BATCH(4, **GPT), by_keyword=True)
    built = capture_model(MAKE(width=32, **GPT), example, OPTIONS)
    real, fake = run_pipeline(built.program, pipeline(OPTIONS), print), _fake(32)
    assert (fake.training, fake.groups, fake.device_bytes) == (real.training, real.groups, real.device_bytes)


def test_a_model_that_no_machine_holds_takes_no_memory() -> None:
    before = torch.get_default_dtype()
    assert _fake(2**16).device_bytes > 3 * 10**11
    assert torch.get_default_dtype() is before


@pytest.mark.parametrize("target", ["examples.char_gpt:CharGPT", "transformers:GPT2LMHeadModel"])
def test_weights_that_do_not_fit_into_this_machine_are_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sambasim.commands.compile.available_bytes", lambda: 1 << 16)
    inputs = 'data.inputs={input_ids = "int64[8] < 9", labels = "int64[8] < 9"}'
    options = compile_options(None, target, ["optimizer.name=sgd", "data.source=synthetic", inputs], {})
    with pytest.raises(MachineError, match=r"weights of this model need more than the 64.0 KiB of memory"):
        compile_from_options(options)
