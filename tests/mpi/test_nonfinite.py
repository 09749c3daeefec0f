"""Losses that are NaN or infinite on one replica alone: all ranks stop alike, or leave the same steps out."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.mpi.training import EACH_ALONE, WAYS, run_of, train
from tests.support.damaged import compiled
from tests.support.mpi import SAMBASIM, run_mpi
from tests.support.whole import is_whole, whole_case

DAMAGES: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "second": {"9": "nan"},
    **({"last": {"47": "nan"}} if is_whole() else {}),
}
"""By step: the sample that is NaN. Two replicas take samples in turn, so replica 1 has number 9 in its second batch."""

ONE_NAN = 'data.args={inputs={9="nan"}}'
FLAGS = {
    "device": ["--reduce-on-rdu"],
    "host": [],
    "gloo": ["--host-sync", "gloo"],
    "server": ["--host-sync", "parameter-server"],
}


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Of few parameters, which each replica updates itself; and of many, which lie once in the node's memory."""
    chosen, folder = ("optimizer.name=adamw", "optimizer.lr=0.01"), tmp_path_factory.mktemp("nonfinite")
    return {name: compiled(folder / name, *chosen, width=width) for name, width in (("small", 16), ("large", 256))}


@pytest.mark.parametrize(
    ("np", "env", "ways"),
    [
        (2, {}, ("device", "mpi", "gloo", "server")),
        whole_case(2, EACH_ALONE, ("device",)),
        whole_case(3, {}, ("servers",)),
    ],
    ids=["one node", "two nodes", "own server"],
)
def test_all_ways_of_syncing_skip_alike(
    np: int, env: dict[str, str], ways: tuple[str, ...], pefs: Mapping[str, Path]
) -> None:
    hows = {"emulated": {"emulate": 2}, **{way: WAYS[way] for way in ways}}
    runs = [
        run_of(f"{size} {damage} {way}", path, steps=6, data={"args": {"inputs": inputs}}, on_nonfinite="skip", **how)
        for size, path in pefs.items()
        for damage, inputs in DAMAGES.items()
        for way, how in hows.items()
    ]
    if np == 2:
        runs += [run_of(f"{size} none stop", path, steps=6, reduce_on_rdu=True) for size, path in pefs.items()]
    found = {name: run.summary for name, run in train(np, runs, env=env).items()}
    for name, run in found.items():
        kind = name.rpartition(" ")[0]
        assert (run.steps, run.skipped_steps) == (6, int("none" not in kind)), name
        assert run.state_sha256 == found[f"{kind} emulated"].state_sha256, name
    assert len({run.state_sha256 for run in found.values()}) == len(pefs) * len(DAMAGES), "a skip shows"


@pytest.mark.parametrize("way", [way if way == "device" else whole_case(way) for way in FLAGS])
@pytest.mark.parametrize("size", [whole_case("small"), "large"])
def test_all_ranks_stop_alike_with_one_error(way: str, size: str, pefs: Mapping[str, Path], tmp_path: Path) -> None:
    saved, pef = tmp_path / "w.safetensors", pefs[size]
    command = [*SAMBASIM, "run", "--threads", "1", "--pef", str(pef), "--set", ONE_NAN]
    result = run_mpi(2, [*command, "--save", str(saved), *FLAGS[way]])
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error[") == 1
    assert "error[numerics] (every rank): the loss of step 2 is not finite: nan on replica 1 of 2" in result.stderr
    assert f"try:   mpirun -np 2 sambasim run --threads 1 --pef {pef} " in result.stderr
    assert not saved.exists()
