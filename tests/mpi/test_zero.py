"""`--zero`: gradients and parameters in slices, with the bits of whole ones."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.pef import read
from sambasim.report.steps import step_record
from sambasim.simulation.step import predict_step
from sambasim.simulation.sync import SyncPath, Wire
from tests.mpi.bodies.train import Run
from tests.mpi.captures import compiled, in_stages
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, run_of, train
from tests.support.mpi import run_mpi
from tests.support.whole import is_whole, whole, whole_case

PARALLEL = ("parallel.data_parallel=true", "parallel.world_size=2")
CLIPPED = "optimizer.max_grad_norm=0.5"
ON_CHIPS = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"')


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By example and level of ZeRO, and in stages and on chips; by default, one example."""

    def folder() -> Path:
        return tmp_path_factory.mktemp("zero")

    levels = {level: (*PARALLEL, f"parallel.zero={level}") for level in range(4)}
    found = {f"char_gpt {level}": compiled("char_gpt", folder(), CLIPPED, *how) for level, how in levels.items()}
    if not is_whole():
        return found
    found |= {f"resnet {level}": compiled("resnet", folder(), *levels[level]) for level in (1, 3)}
    found |= {f"stages {level}": in_stages("char_gpt", folder(), *levels[level]) for level in (1, 3)}
    return found | {f"chips {level}": compiled("char_gpt", folder(), *ON_CHIPS, *levels[level]) for level in (1, 3)}


def check_equal(ranks: int, runs: list[Run], env: Mapping[str, str] | None = None) -> dict[str, Trained]:
    """Runs of one example, whose name is the first word of theirs, end with the same bits."""
    found = train(ranks, runs, env=env or {})
    of_example: dict[str, Trained] = {}
    for name, trained in found.items():
        assert trained.outcome == of_example.setdefault(name.split()[0], trained).outcome, name
    return found


@pytest.mark.parametrize(
    ("ranks", "env"),
    [(4, EACH_ALONE), whole_case(2, {}), whole_case(3, EACH_ALONE), whole_case(4, TWO_NODES), whole_case(4, {})],
)
def test_slices_have_the_bits_of_whole_gradients_and_parameters(
    ranks: int, env: dict[str, str], pefs: dict[str, Path]
) -> None:
    how: dict[str, Any] = {"steps": 3, "accumulation": 2, "evaluate": True}
    names = [name for name in pefs if name.split()[0] in ("char_gpt", "resnet")]
    runs = [run_of(f"{name} host", pefs[name], **how) for name in names]
    runs += [run_of(f"{name} played", pefs[name], **how, emulate=ranks) for name in names if name[-1] in "23"]
    runs += [run_of("char_gpt 3 device", pefs["char_gpt 3"], **how, reduce_on_rdu=True)]
    found = check_equal(ranks, runs, env)
    sliced, replicated = found["char_gpt 3 host"].summary, found["char_gpt 0 host"].summary
    assert sliced.bytes.network != replicated.bytes.network
    assert any(line.startswith("ZeRO 3: rank 0 keeps") for line in sliced.notices)
    device = found["char_gpt 3 device"].summary
    assert any(line.startswith("ZeRO 3 saves nothing more with --reduce-on-rdu") for line in device.notices)


@pytest.mark.parametrize("name", [whole_case("stages"), whole_case("chips")])
def test_stages_and_chips_keep_slices_too(name: str, pefs: dict[str, Path]) -> None:
    runs = [run_of(f"{name} {level}", pefs[f"{name} {level}"], steps=2, accumulation=2) for level in (1, 3)]
    played = run_of(f"{name} 3 played", pefs[f"{name} 3"], steps=2, accumulation=2, emulate=2)
    found = check_equal(4, [*runs, played])
    assert found[f"{name} 3"].summary.waited_s.keys() == {"pp" if name == "stages" else "tp"}


def test_a_prediction_has_the_bytes_of_the_run(pefs: dict[str, Path]) -> None:
    """Over host links, in bf16 instead of float32."""
    steps, replicas, micro_steps = 2, 2, 2
    names = [f"char_gpt {level}" for level in range(4)]
    found = train(replicas, [run_of(name, pefs[name], steps=steps, accumulation=micro_steps) for name in names])
    device = load_device("sn30")
    placement = place(replicas, device, None, load_cluster(device.cluster))
    for name in names:
        program, summary = read(pefs[name]).program, found[name].summary
        assert summary.predicted is not None
        step = predict_step(program, budget_of(device), placement, SyncPath.HOST, micro_steps)
        assert summary.predicted.predicted_step_s == step.predicted_s
        predicted_bytes = 2 * replicas * steps * step_record(step).axes[0].received_bytes[Wire.HOST.value]
        assert summary.bytes.device_to_host + summary.bytes.host_to_device == predicted_bytes


@whole
def test_a_checkpoint_of_slices_is_resumed_and_saved_weights_are_whole(pefs: dict[str, Path], tmp_path: Path) -> None:
    """By slices again, and by replicas with whole parameters."""
    folder, path = {"dir": str(tmp_path / "saved")}, pefs["char_gpt 3"]
    through, alone = tmp_path / "slices.safetensors", tmp_path / "whole.safetensors"
    check_equal(
        2,
        [
            run_of("char_gpt slices", path, steps=4, save=str(through)),
            run_of("char_gpt whole", pefs["char_gpt 1"], steps=4, save=str(alone)),
        ],
    )
    expected, found = load_file(alone), load_file(through)
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    runs = [
        run_of("char_gpt half", path, steps=2, checkpoint=folder),
        run_of("char_gpt rest", path, steps=4, checkpoint=folder | {"resume": "newest"}),
        run_of("char_gpt all", path, steps=4),
    ]
    trained = train(2, runs)
    assert trained["char_gpt rest"].outcome[:2] == trained["char_gpt all"].outcome[:2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host-sync", "gloo"), "--host-sync gloo keeps gradients whole"),
        (("--host-sync", "parameter-server"), "--host-sync parameter-server keeps gradients whole"),
        whole_case(("--engine", "inductor"), "--engine inductor cannot compile a pass that communicates"),
        (("--debug-numerics",), "--debug-numerics needs whole gradients"),
    ],
)
def test_what_needs_whole_gradients_is_refused(flags: tuple[str, ...], said: str, pefs: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "sambasim", "run", "--pef", str(pefs["char_gpt 2"]), *flags]
    refused = run_mpi(2, command, timeout=60)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert "--zero 2" in refused.stderr


FREES = """
import numpy as np
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.machine.huge_pages import freeing, private_pages

def resident_bytes():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

communicator = connect(["sambasim", "run"])
memory = np.frombuffer(private_pages(1 << 21), dtype=np.uint8)
free = freeing([memory[4096:900_000]])
for count in (1_000, 100_000):
    before = resident_bytes()
    for _ in range(count):
        free()
if communicator.rank == 0:
    print(resident_bytes() - before, flush=True)
communicator.finish()
"""


def test_freeing_pages_again_and_again_takes_no_memory() -> None:
    printed = run_mpi(2, [sys.executable, "-c", FREES], timeout=60).check().stdout
    assert int(printed) < 4 << 20
