"""Promise one: device sync, host sync and one process that plays all replicas give the same bits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sambasim.pef import read
from tests.mpi.training import EACH_ALONE, TWO_NODES, run_of, train
from tests.support.compiled import compile_from_options
from tests.support.examples import VARIANTS, CompiledExample, example_options
from tests.support.mpi import RANKS
from tests.support.whole import is_whole, whole, whole_case


@pytest.fixture(scope="module")
def paths(examples: list[CompiledExample]) -> list[Path]:
    """Every example with every optimizer, with and without clipping; by default, every example with one of the six."""
    return [one.path for one in (examples if is_whole() else examples[:: VARIANTS + 1])]


@pytest.fixture(scope="module")
def few(examples: list[CompiledExample], paths: list[Path]) -> list[Path]:
    """Every example: those with AdamW; by default, all of `paths`."""
    return [one.path for one in examples if one.optimizer == "adamw"] if is_whole() else paths


def check_exact(
    np: int,
    paths: Sequence[Path],
    env: Mapping[str, str] | None = None,
    threads: int = 1,
    accumulations: Sequence[int] = (1, 2),
) -> list[object]:
    """Each PEF gives the same bits by all ways, with and without accumulation. Returns what each came to."""
    ways: Mapping[str, Mapping[str, Any]] = {"device": {"reduce_on_rdu": True}, "host": {}, "emulated": {"emulate": np}}
    named = {f"{path.stem} ×{count}": (path, count) for path in paths for count in accumulations}
    found = train(
        np,
        [
            run_of(f"{name} {way}", path, steps=2, accumulation=count, threads=threads, **how)
            for name, (path, count) in named.items()
            for way, how in ways.items()
        ],
        env=env,
    )
    outcomes = {name: [found[f"{name} {way}"].outcome for way in ways] for name in named}
    assert [name for name, (device, host, emulated) in outcomes.items() if not device == host == emulated] == []
    return [device for device, _, _ in outcomes.values()]


def check_apart(outcomes: Sequence[object]) -> None:
    """Configurations that differ cannot all have been trained if two end alike."""
    assert len(set(outcomes)) == len(outcomes)


@pytest.mark.parametrize("np", [np if np == 2 else whole_case(np) for np in RANKS if np > 1])
def test_device_host_and_emulation_are_equal_for_every_example(np: int, paths: list[Path]) -> None:
    """With and without accumulation; SGD, Adam and AdamW, with and without clipping, are all there."""
    check_apart(check_exact(np, paths))


@whole
def test_they_are_equal_with_two_threads_too(few: list[Path]) -> None:
    check_apart(check_exact(2, few if is_whole() else few[:3], threads=2))


@pytest.mark.parametrize(
    ("np", "nodes"),
    [
        whole_case(2, TWO_NODES),
        whole_case(2, EACH_ALONE),
        whole_case(3, EACH_ALONE),
        (4, TWO_NODES),
        whole_case(4, EACH_ALONE),
        whole_case(8, {}),
        whole_case(8, TWO_NODES),
        whole_case(8, EACH_ALONE),
    ],
)
def test_they_are_equal_over_several_nodes(np: int, nodes: dict[str, str], few: list[Path]) -> None:
    """MPICH makes nodes of one machine: two, or each rank on its own."""
    chosen = few if np < 8 else [path for path in few if path.stem.startswith(("digits", "char_gpt"))]
    check_apart(check_exact(np, chosen, nodes, accumulations=(1, 2) if is_whole() else (2,)))


def transposed_digits() -> nn.Module:
    """A classifier of digits, whose parameters are not contiguous."""
    convolution, head = nn.Conv2d(1, 4, 3), nn.Linear(144, 10)
    for layer in (convolution, head):
        layer.weight.data = layer.weight.data.transpose(0, -1).contiguous().transpose(0, -1)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), head)


@whole
def test_a_group_for_each_parameter_trains_to_the_same_bits(tmp_path: Path) -> None:
    """As one group for each backward section does. And parameters need not be contiguous."""
    paths = []
    for grouping in ("section", "parameter"):
        chosen = (f"parallel.gradient_groups={grouping}", f"compile.pef_name={grouping}")
        paths.append(compile_from_options(example_options("lstm_classifier", tmp_path, *chosen)).path)
    assert [len(read(path).program.groups) for path in paths] == [1, 10]
    target = "model.target=tests.mpi.test_exactness:transposed_digits"
    paths.append(compile_from_options(example_options("digits", tmp_path, target, "model.args={}")).path)
    outcomes = check_exact(2, paths)
    assert outcomes[:2] == outcomes[2:4]
    check_apart(outcomes[2:])
