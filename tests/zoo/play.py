"""Plays one entry: compile, train one replica and two, and take the same steps in plain PyTorch."""

import copy
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


def play(entry: Case, folder: Path) -> Verdict:
    """Leaves its files in `folder`. Two replicas are emulated, which has the bits of two ranks."""
    torch.set_num_threads(1)
    batch = entry.batch(STEPS * BATCH * max(REPLICAS), seed=1)
    save_file({name: tensor.clone() for name, tensor in batch.items()}, folder / "samples.safetensors")
    try:
        _compile(entry, batch, folder)
    except SambasimError as error:
        return Verdict("refused", str(error))
    outcome: Outcome = "exact"
    detail = ""
    pef = ss.load(folder / "zoo" / "zoo.pef")
    for replicas in REPLICAS:
        ours = ss.run(pef, replicas=replicas, steps=STEPS, threads=1, quiet=True).losses
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
        "training": {"batch_size": BATCH},
        "evaluation": {"enabled": False},
        "data": {"source": str(folder / "samples.safetensors"), "shuffle": False},
        "pef_name": "zoo",
        "output_folder": str(folder),
        "data_parallel": True,
    }
    inputs = {name: tensor[:BATCH] for name, tensor in batch.items()}
    compile_model(entry.module(), Example(inputs, entry.loss is None), CompileOptions.model_validate(options))


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
