"""Promise one: device sync, host sync and one process that plays all replicas give the same bits."""

import json
import sys
from pathlib import Path

import pytest
from torch import nn

from sambasim.compiler.front import compile_from_options
from sambasim.pef import read
from tests.support.examples import VARIANTS, CompiledExample, example_options
from tests.support.mpi import RANKS, ROOT, run_mpi
from tests.support.whole import is_whole, whole, whole_case

BODY = ROOT / "tests" / "mpi" / "bodies" / "exactness.py"


@pytest.fixture(scope="module")
def compiled(examples: list[CompiledExample]) -> list[CompiledExample]:
    """Every example with every optimizer, with and without clipping; by default, every example with one of the six."""
    return examples if is_whole() else examples[:: VARIANTS + 1]


def digests_of(np: int, paths: list[Path], *, steps: int, threads: int, env: dict[str, str]) -> list[dict[str, object]]:
    """What each PEF has been trained to by each way, with and without accumulation, on `np` ranks."""
    argv = [sys.executable, str(BODY), str(steps), str(threads), *map(str, paths)]
    result = run_mpi(np, argv, timeout=280, env=env).check()
    lines: list[dict[str, object]] = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2 * len(paths), result.stdout
    return lines


def compare(lines: list[dict[str, object]]) -> None:
    """All ways have the same bits, and no two PEFs do."""
    assert lines
    apart = [line for line in lines if not line["device"] == line["host"] == line["emulated"]]
    assert not apart
    digests = {str(line["device"]) for line in lines}
    assert len(digests) == len(lines), "two configurations that differ ended alike: they cannot both have been trained"


def few(compiled: list[CompiledExample]) -> list[CompiledExample]:
    """Every example: those with AdamW; by default, all of `compiled`."""
    return [one for one in compiled if one.optimizer == "adamw"] if is_whole() else compiled


@pytest.mark.parametrize("np", [np if np == 2 else whole_case(np) for np in RANKS if np > 1])
def test_device_host_and_emulation_are_equal_for_every_example(np: int, compiled: list[CompiledExample]) -> None:
    """Every example, with and without accumulation; SGD, Adam and AdamW, with and without clipping, are all there."""
    compare(digests_of(np, [one.path for one in compiled], steps=2, threads=1, env={}))


def test_they_are_equal_with_two_threads_too(compiled: list[CompiledExample]) -> None:
    chosen = [one.path for one in few(compiled) if one.clipped or not is_whole()]
    compare(digests_of(2, chosen, steps=2, threads=2, env={}))


@pytest.mark.parametrize("clipping", ["optimizer.max_grad_norm=", whole_case("optimizer.max_grad_norm=0.05")])
def test_a_group_for_each_parameter_trains_to_the_same_bits(clipping: str, tmp_path: Path) -> None:
    """By every way of sync; and, without clipping, to those of one group for each backward section."""
    paths = []
    for grouping in ("section", "parameter"):
        named = (clipping, f"compile.gradient_groups={grouping}", f"compile.pef_name={grouping}")
        paths.append(compile_from_options(example_options("lstm_classifier", tmp_path, *named)).path)
    assert [len(read(path).program.groups) for path in paths] == [1, 10]
    lines = digests_of(2, paths, steps=2, threads=1, env={})
    by_section, by_parameter = lines[:2], lines[2:]
    compare(by_section)
    compare(by_parameter)
    if clipping.endswith("="):
        assert [line["device"] for line in by_section] == [line["device"] for line in by_parameter]


def transposed_digits() -> nn.Module:
    """A classifier of digits, whose parameters are not contiguous."""
    convolution, head = nn.Conv2d(1, 4, 3), nn.Linear(144, 10)
    for layer in (convolution, head):
        layer.weight.data = layer.weight.data.transpose(0, -1).contiguous().transpose(0, -1)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), head)


def test_parameters_that_are_not_contiguous_train_alike(tmp_path: Path) -> None:
    target = "model.target=tests.mpi.test_exactness:transposed_digits"
    path = compile_from_options(example_options("digits", tmp_path, target, "model.args={}")).path
    compare(digests_of(2, [path], steps=2, threads=1, env={}))


EACH_ALONE = {"MPIR_CVAR_NOLOCAL": "1"}
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}


SEVERAL_NODES = [
    whole_case(2, TWO_NODES),
    whole_case(2, EACH_ALONE),
    (3, EACH_ALONE),
    (4, TWO_NODES),
    whole_case(4, EACH_ALONE),
]


@pytest.mark.parametrize(("np", "nodes"), SEVERAL_NODES)
def test_they_are_equal_over_several_nodes(np: int, nodes: dict[str, str], compiled: list[CompiledExample]) -> None:
    """MPICH makes nodes of one machine: two, or each rank on its own."""
    chosen = [one.path for one in few(compiled)]
    compare(digests_of(np, chosen, steps=2, threads=1, env=nodes))


@whole
@pytest.mark.parametrize("nodes", [{}, TWO_NODES, EACH_ALONE], ids=["one node", "two nodes", "each alone"])
def test_they_are_equal_at_eight_replicas(nodes: dict[str, str], compiled: list[CompiledExample]) -> None:
    chosen = [one.path for one in few(compiled) if one.example in ("digits", "char_gpt")]
    compare(digests_of(8, chosen, steps=2, threads=1, env=nodes))
