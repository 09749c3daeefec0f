"""`run --inference` on several ranks, of a PEF for inference and of one for training, both with `--data-parallel`."""

from pathlib import Path

import numpy as np
import pytest

from sambasim.options.compile import QUICK_START
from sambasim.pef import read
from sambasim.quickstart.digits import digits
from sambasim.records.metrics import InferenceRecord
from tests.faults.command import sambasim
from tests.support.mpi import SAMBASIM, run_mpi

PEFS = {"forward": ("--inference", "--inference "), "step": ("", "--reduce-on-rdu ")}
"""By name: a flag of the compile, and of the command that comes next."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predicting")
    for name, (flag, then) in PEFS.items():
        done = sambasim(f"compile {flag} --data-parallel -ws 2 --check 0 --pef-name {name}", folder).check()
        assert "\nruns on at least 2 replicas, each with " in done.stdout
        assert f"\nnext: mpirun -np 2 sambasim run {then}--pef out/{name}/{name}.pef\n" in done.stdout
    images, labels = (tensor[:40].numpy() for tensor in digits()[1].tensors)
    np.savez(folder / "two_batches.npz", image=images, target=labels)
    return folder


def predicted(folder: Path, ranks: int, pef: str, *flags: str) -> tuple[bytes, object]:
    """The file of predictions, and the figures over all samples."""
    command = ["run", "--inference", "--pef", pef, "--predictions", "p.safetensors", "--json", "--threads", "1", *flags]
    job = sambasim(command, folder) if ranks == 1 else run_mpi(ranks, [*SAMBASIM, *command], cwd=folder)
    found = InferenceRecord.model_validate_json(job.check().stdout)
    return (folder / "p.safetensors").read_bytes(), (found.samples, found.loss, found.accuracy)


@pytest.mark.parametrize("pef", PEFS)
def test_predictions_and_figures_have_the_bits_of_one_rank(folder: Path, pef: str) -> None:
    """Of 360 samples in batches of 32; and of 40, for which the third rank has no batch."""
    small = ("--data", "two_batches.npz")
    whole, part = predicted(folder, 1, pef), predicted(folder, 1, pef, *small)
    assert [figures[0] for _, figures in (whole, part)] == [360, 40]  # type: ignore[index]  # of three
    assert predicted(folder, 2, pef) == whole
    assert predicted(folder, 3, pef, "--data-parallel", "--reduce-on-rdu") == whole
    assert predicted(folder, 3, pef, *small) == part


def test_only_who_asks_for_replicas_needs_as_many_as_were_compiled(folder: Path) -> None:
    refused = sambasim("run --inference --data-parallel --pef forward", folder)
    assert refused.returncode == 2
    assert "at least 2 replicas (-ws 2), and 1 replica was started" in refused.stderr
    assert "mpirun -np 2 sambasim run --inference --data-parallel --pef forward" in refused.stderr
    sambasim("run --inference --data-parallel --pef step", folder).check()


def test_it_has_an_axis_and_no_sections_of_a_sync(folder: Path) -> None:
    program = read(folder / "out/forward/forward.pef").program
    assert (str(program.mesh[0].name), program.world_size, program.data_parallel) == ("dp", 2, False)
    assert set(program.evaluation.section_counts) == {"FWD"}
    assert not program.runtime_arguments


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("inspect forward", "2 or more, data parallel"),
        ("inspect forward --json", '"world_size":2'),
        ("verify out/forward/forward.pef", "forward"),
        ("simulate forward", "replicas"),
        ("simulate forward --replicas 1,2,4", "replicas"),
        (f"simulate {QUICK_START} --set compile.inference=true --replicas 2", "replicas"),
        ("tilestat forward", ""),
        ("compare forward forward", ""),
        ("plan forward", None),
    ],
)
def test_commands_take_it(folder: Path, command: str, says: str | None) -> None:
    done = sambasim(command, folder)
    assert done.returncode == (2 if says is None else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert (says or "") in done.stdout
