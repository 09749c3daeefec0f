"""`--wire bf16`: gradients are sent in half of the bytes. Device sync, host sync and one process that plays all ranks
have the same bits, wherever nodes end, and others than those of float32."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from sambasim.pef import read
from tests.mpi.layouts import Layout
from tests.mpi.test_bits import ALL_LEVELS, WAYS, check_equal, slices
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, runs_of, train
from tests.mpi.training import WAYS as OF_REPLICAS
from tests.support.examples import CompiledExample
from tests.support.mpi import can_play_hosts
from tests.support.whole import is_whole, whole, whole_case

STEPS = 3
PEFS = {("char_gpt", "adamw", False), ("logistic_regression", "sgd", True)}
"""One with several groups, and one that devices of a node sync at once."""
WHOLE_PEFS = {("digits", "adamw", True), ("lstm_classifier", "adam", True), ("resnet", "adam", False)}
NARROW = {"wire": "bf16"}


@pytest.fixture(scope="module")
def paths(examples: Sequence[CompiledExample]) -> list[Path]:
    chosen = PEFS | WHOLE_PEFS if is_whole() else PEFS
    return [one.path for one in examples if (one.example, one.optimizer, one.clipped) in chosen]


def trained(
    np: int, pefs: Mapping[str, Path], ways: Mapping[str, Mapping[str, Any]], env: Mapping[str, str], hosts: int = 1
) -> dict[str, Trained]:
    """By name of a PEF and way; by all ways that have the same name but for its last word, to the same bits."""
    runs = [runs_of(name, path, ways, steps=STEPS, accumulation=2) for name, path in pefs.items()]
    found = train(np, [*chain(*runs)], env=env, hosts=hosts)
    check_equal(found)
    return found


@pytest.mark.parametrize(
    ("np", "env", "hosts"),
    [
        whole_case(2, {}, 1),
        (2, EACH_ALONE, 1),
        whole_case(3, {}, 1),
        whole_case(3, EACH_ALONE, 1),
        whole_case(4, {}, 1),
        whole_case(4, TWO_NODES, 1),
        whole_case(4, {}, 2),  # of neighbouring ranks, which send one sum
    ],
)
def test_every_way_has_the_same_bits_and_gradients_take_half_of_the_bytes(
    np: int, env: Mapping[str, str], hosts: int, paths: Sequence[Path]
) -> None:
    if hosts > 1 and not can_play_hosts():
        pytest.skip("it takes the privilege to change the host name of a process")
    ways: dict[str, Mapping[str, Any]] = {"fp32 device": OF_REPLICAS["device"], "fp32 mpi": {}}
    ways |= {f"bf16 {way}": {**OF_REPLICAS[way], **NARROW} for way in ("device", "mpi", "server")}
    ways |= {"bf16 emulated": {"emulate": np, **NARROW}, "few emulated": {"emulate": np - 1, **NARROW}}
    ways["few servers"] = {**OF_REPLICAS["servers"], **NARROW}
    found = trained(np, {path.stem: path for path in paths}, ways, env, hosts)
    for path in paths:
        one = {way: found[f"{path.stem} {way}"] for way in ways}
        moved = {way: found.summary.bytes for way, found in one.items()}
        assert one["bf16 device"].outcome != one["fp32 device"].outcome
        assert one["few servers"].summary.wire == ("bf16" if np > 2 else None), "of one replica, nothing is rounded"
        for way in ways:
            assert one[way].sync.endswith(", wire bf16") == (one[way].summary.wire == "bf16")
            assert one[way].summary.exempt_from_exactness == []
            told = any(notice.startswith("--wire has no effect: there is one") for notice in one[way].notices)
            assert told == (np == 2 and way.startswith("few"))
            told = any("saves no bytes on one node" in notice for notice in one[way].notices)
            assert told == (way == "bf16 device" and not env and hosts == 1)
        sent = STEPS * read(path).program.gradient_bytes
        narrow, full = moved["bf16 mpi"], moved["fp32 mpi"]
        saved = (np - 1) * sent // 2
        assert (full.network - narrow.network, full.device_to_host - narrow.device_to_host) == (saved, saved)
        assert narrow.host_to_device == full.host_to_device
        narrow, full = moved["bf16 device"], moved["fp32 device"]
        placement = one["bf16 device"].summary.placement
        assert placement is not None
        parameters = sent * max(placement.node_of)  # once to each other node
        assert (narrow.peer, narrow.network - parameters) == (full.peer, (full.network - parameters) // 2)


@whole
@pytest.mark.parametrize(
    ("layouts", "env"),
    [
        (ALL_LEVELS[2], {}),
        (ALL_LEVELS[3], EACH_ALONE),
        (ALL_LEVELS[4], TWO_NODES),
        (slices(Layout("char_gpt", dp=2, pp=2), 1, 3), {}),
        ((Layout("char_gpt", dp=2, tp=2), Layout("char_gpt", dp=2, chips=2)), TWO_NODES),
    ],
    ids=str,
)
def test_all_layouts_have_the_same_bits(layouts: Sequence[Layout], env: Mapping[str, str], tmp_path: Path) -> None:
    ways = {**WAYS, "emulated": {"emulate": layouts[0].dp}}
    pefs = {str(layout): layout.compiled(tmp_path) for layout in layouts}
    found = trained(layouts[0].ranks, pefs, {way: {**how, **NARROW} for way, how in ways.items()}, env)
    assert {one.summary.wire for one in found.values()} == {"bf16"}
