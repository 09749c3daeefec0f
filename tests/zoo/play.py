"""Plays one entry: compile, train with `sambasim run` at np 1 and 2, and the same steps in plain PyTorch."""

import copy
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import sambasim as ss
from sambasim.compiler.capture.step import Example
from sambasim.errors import SambasimError
from sambasim.options.compile import CompileOptions
from sambasim.runtime.machine.process import Stream, derive
from tests.support.compiled import compile_model
from tests.support.installation import Installation
from tests.support.mpi import ROOT
from tests.zoo.case import Case, Outcome, evaluate_loss

REPLICAS, BATCH, STEPS, RATE = (1, 2), 2, 3, 0.05
"""The third step's loss shows what two steps did to the weights."""

CLOSE = 1e-6
"""How far losses may be off, relative to eager's, so that rounding explains it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an entry. `detail`: the error, or losses that differ."""

    outcome: Outcome
    detail: str = ""


def play(entry: Case, folder: Path, *, in_process: bool = False) -> Verdict:
    """Leaves its files in `folder`. With `in_process`, two replicas are those of an emulation, which has the bits of
    two ranks."""
    torch.set_num_threads(1)
    batch = entry.batch(STEPS * BATCH * max(REPLICAS), seed=1)
    save_file({name: tensor.clone() for name, tensor in batch.items()}, folder / "samples.safetensors")
    try:
        _compile(entry, batch, folder)
    except SambasimError as error:
        return Verdict("refused", str(error))
    except Exception as error:
        return Verdict("failed", f"{type(error).__name__}: {error}")
    outcome: Outcome = "exact"
    detail = ""
    for replicas in REPLICAS:
        try:
            ours = _losses_here(folder, replicas) if in_process else _losses(folder, replicas)
        except RuntimeError as error:
            return Verdict("failed", str(error))
        theirs = list(eager_losses(entry, batch, replicas))
        if ours != theirs:
            off = max(abs(one - other) / max(abs(other), 1e-9) for one, other in zip(ours, theirs, strict=True))
            outcome = "wrong" if not off <= CLOSE else outcome if outcome == "wrong" else "close"
            detail = f"np {replicas}: {ours}, eager {theirs}"
    return Verdict(outcome, detail)


def _compile(entry: Case, batch: Mapping[str, Tensor], folder: Path) -> None:
    options = {
        "model": {"target": f"tests.zoo:{entry.name}"},
        "loss": {"name": entry.loss} if entry.loss else None,
        "optimizer": {"name": "sgd", "lr": RATE},
        "training": {"batch_size": BATCH, "evaluate": False},
        "data": {"source": str(folder / "samples.safetensors"), "shuffle": False},
        "pef_name": "zoo",
        "output_folder": str(folder),
        "data_parallel": True,
    }
    inputs = {name: tensor[:BATCH] for name, tensor in batch.items()}
    compile_model(entry.module(), Example(inputs, entry.loss is None), CompileOptions.model_validate(options))


def _losses(folder: Path, replicas: int) -> list[float]:
    """The loss of each step of a run. Raises RuntimeError, with what it printed, if it fails."""
    metrics = folder / "metrics.jsonl"
    flags = ("--steps", str(STEPS), "--threads", "1", "--no-evaluate", "--metrics", str(metrics), "--reduce-on-rdu")
    _installed().call("run", "--pef", str(folder / "zoo" / "zoo.pef"), "--json", *flags, folder=folder, np=replicas)
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    metrics.unlink()
    return [record["loss"] for record in records if record["kind"] == "step"]


def _losses_here(folder: Path, replicas: int) -> list[float]:
    pef = ss.load(folder / "zoo" / "zoo.pef")
    return ss.run(pef, replicas=replicas, steps=STEPS, threads=1, quiet=True).losses


def _installed() -> Installation:
    """The sambasim of this environment, or of the one that it is beside."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("sambasim", path=places)
    if found is None:
        raise RuntimeError("sambasim is not on the path")
    return Installation(Path(found).with_name("python"), ROOT)


def eager_losses(entry: Case, batch: Mapping[str, Tensor], replicas: int) -> Iterator[float]:
    """Data-parallel training as PyTorch's documentation describes it: a copy for each replica, mean gradients."""
    first = entry.module()
    models = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    for step in range(STEPS):
        losses = []
        for replica, model in enumerate(models):
            rows = [replica + replicas * (step * BATCH + row) for row in range(BATCH)]
            torch.manual_seed(derive(0, replica, step, 0, Stream.GRAPH))
            model.zero_grad()
            loss = evaluate_loss(entry, model, {name: tensor[rows] for name, tensor in batch.items()})
            torch.autograd.backward(loss)
            losses.append(loss.item())
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradients = [one.grad for one in parameters if one.grad is not None]
            if len(gradients) == replicas > 1:
                mean = sum(gradients[1:], gradients[0]) / replicas
                for one in parameters:
                    one.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        yield sum(losses) / replicas
