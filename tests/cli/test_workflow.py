"""The commands of the README in an empty folder: in this process where one rank is enough, else under mpirun."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sambasim as ss
from sambasim.quickstart.digits import DigitsClassifier, digits
from sambasim.records.metrics import BytesMoved, InferenceRecord, read_run
from tests.faults.command import sambasim
from tests.support.mpi import ROOT, SAMBASIM, run_job, run_mpi
from tests.support.whole import whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which the quick start was compiled."""
    folder = tmp_path_factory.mktemp("empty")
    compiled = sambasim(["compile", "--data-parallel", "-ws", "2"], folder).check()
    assert f"PEF file {folder}/out/digits/digits.pef created\nCompilation succeeded\n" in compiled.stdout
    assert "mpirun -np 2 sambasim run --reduce-on-rdu --pef out/digits/digits.pef" in compiled.stdout
    assert [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] == ["out/digits/digits.pef"]
    return folder


def test_weights_are_saved_loaded_and_predicted_with(folder: Path) -> None:
    command = ["run", "--pef", "digits", "--emulate-replicas", "2", "--epochs", "8", "--json"]
    trained = sambasim([*command, "--save", "digits.safetensors"], folder).summary
    assert trained.evaluation is not None
    assert (trained.evaluation.accuracy or 0) >= 0.95
    model = DigitsClassifier()
    model.load_state_dict(load_file(folder / "digits.safetensors"))
    model.eval()
    images, labels = digits()[1].tensors
    with torch.no_grad():
        logits = model(images)
    correct = logits.argmax(1) == labels
    assert float(correct.float().mean()) == pytest.approx(trained.evaluation.accuracy)
    predict = ["run", "--inference", "--pef", "digits", "--weights", "digits.safetensors", "--json"]
    predict += ["--predictions", "out.safetensors"]
    found = InferenceRecord.model_validate_json(run_mpi(2, [*SAMBASIM, *predict], cwd=folder).check().stdout)
    assert (found.samples, found.accuracy) == (360, trained.evaluation.accuracy)
    predictions = load_file(folder / "out.safetensors")
    torch.testing.assert_close(predictions["output_0"], logits)


def test_a_training_pef_predicts_samples_without_labels(folder: Path) -> None:
    images = digits()[1].tensors[0][:40]
    np.savez(folder / "images.npz", image=images.numpy())
    predict = ["run", "digits", "--inference", "--data", "images.npz", "--predictions", "images.safetensors"]
    printed = sambasim(predict, folder).check().stdout
    assert "notice: no loss, because the samples have no target" in printed
    assert "accuracy" not in printed
    model = DigitsClassifier()
    model.load_state_dict(ss.load(folder / "out/digits/digits.pef").weights)
    assert torch.allclose(load_file(folder / "images.safetensors")["output_0"], model.eval()(images), atol=1e-6)
    refused = sambasim(["run", "digits", "--data", "images.npz", "--emulate-replicas", "2"], folder)
    assert "lacks target" in refused.stderr


def test_an_inference_pef_predicts(folder: Path) -> None:
    sambasim(["compile", "--inference", "--pef-name", "forward", "--check", "0"], folder).check()
    predicted = sambasim(["run", "--inference", "--pef", "forward"], folder).check()
    assert predicted.stdout.startswith("predicted the 360 held-out samples of digits in")
    assert "notice: with the weights of the PEF, as they were compiled" in predicted.stdout


def test_a_model_with_a_loss_of_its_own_predicts_its_other_outputs(tmp_path: Path) -> None:
    small = ["--set", "model.args.layers=1", "--set", "model.args.width=16", "-b", "8"]
    config = ["--config", str(ROOT / "configs" / "char_gpt.toml")]
    sambasim(["compile", *config, *small, "--inference", "--check", "0"], tmp_path).check()
    predict = ["run", "--inference", "--pef", "char_gpt", "--predictions", "p.safetensors", "--json"]
    found = InferenceRecord.model_validate_json(sambasim(predict, tmp_path).check().stdout)
    (logits,) = load_file(tmp_path / "p.safetensors").values()
    assert logits.shape == (found.samples, 64, 96), "the loss, a mean over a batch, is left out"


def test_compile_under_mpirun_is_refused_once(tmp_path: Path) -> None:
    result = run_mpi(2, [*SAMBASIM, "compile"], cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("started 2 ranks, but a PEF is compiled by one process") == 1
    assert not list(tmp_path.iterdir())


def test_hyperparameters_and_schedule_change_without_a_compile(folder: Path) -> None:
    changes = ["--lr", "0.25", "--set", "training.schedule.name=linear", "--set", "training.schedule.warmup_steps=2"]
    command = ["run", "--pef", "digits", "--emulate-replicas", "2", "--steps", "4", "--no-evaluate"]
    outcome = sambasim([*command, *changes, "--metrics", "changed.jsonl"], folder).check()
    left_out = "each epoch leaves out 29 of 1437 samples, which do not fill a step"
    assert f"\n{left_out}\nnotice: changed for this run: optimizer.lr = 0.25 (compiled: 0.005)" in outcome.stdout
    lines = [json.loads(line) for line in (folder / "changed.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines if line["kind"] == "step"] == [0.125, 0.25, 0.25, 0.125]


def test_user_code_can_use_torch_distributed_and_its_printed_lines_stay_whole(folder: Path) -> None:
    (folder / "ranked.py").write_text("""import torch, torch.distributed as dist
from sambasim.quickstart.digits import digits
def samples():
    if dist.is_initialized():
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        dist.barrier()
        print('sum', total.item(), 'of', dist.get_world_size())
        for line in range(200):
            print('one', 'line', 'of', 'many', 'words', line)
    return digits()
""")
    command = [*SAMBASIM, "run", "--pef", "digits", "--data", "ranked.py:samples", "--steps", "1", "--no-evaluate"]
    command += ["--reduce-on-rdu", "--metrics", "m.jsonl"]
    result = run_mpi(3, command, cwd=folder, env={"PYTHONUNBUFFERED": "1"}).check()
    lines = result.stdout.splitlines()
    assert lines.count("sum 6.0 of 3") == 3
    assert [lines.count(f"one line of many words {line}") for line in range(200)] == [3] * 200
    assert "batch 32 × 3 replicas = global batch 96; 14 steps per epoch; sync: device" in result.stdout
    assert result.stdout.count("weights_sha256") == 1, "only rank 0 prints"
    summary = read_run(folder / "m.jsonl").summary
    assert summary is not None
    assert (summary.world_size, summary.steps, summary.sync) == (3, 1, "device")
    peer = (3 - 1) * 4 * (28928 + 512)  # each owner of a slice of the quick start's two groups reads it from two peers
    assert summary.bytes == BytesMoved(device_to_host=0, host_to_device=0, peer=peer, network=0)


@whole
def test_the_package_builds_as_a_wheel_and_works_from_it(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    run_job([*build, "--quiet"], timeout=120).check()
    (wheel,) = tmp_path.glob("sambasim-*.whl")
    run_job([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")]).check()
    environ = {"PYTHONPATH": str(tmp_path / "site") + os.pathsep, "PYTHONSAFEPATH": "1"}
    compiled = run_job([*SAMBASIM, "compile", "--data-parallel", "-ws", "2"], cwd=tmp_path, env=environ).check()
    assert "Compilation succeeded" in compiled.stdout
    run_job(
        [*SAMBASIM, "run", "--pef", "digits", "--emulate-replicas", "2", "--steps", "1"], cwd=tmp_path, env=environ
    ).check()


@pytest.mark.usefixtures("fresh")  # the last one: from here on, processes start anew
def test_every_rank_has_a_log(folder: Path) -> None:
    run = [*SAMBASIM, "run", "--pef", "digits", "--steps", "2", "--no-evaluate", "--log-dir", "logs"]
    run_mpi(2, run, cwd=folder).check()
    logs = sorted((folder / "logs").iterdir())
    assert [log.name for log in logs] == ["rank0.log", "rank1.log"]
    assert all("step 2 epoch 1 loss" in log.read_text() for log in logs)
