"""The layouts in which sambasim trains each script."""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import sambasim as ss
from tests.parity.scripts import BATCH, STEPS, Script, Trained


class Layout(NamedTuple):
    """`ranks`: of a job of mpirun; 1 for one process, which plays them all."""

    replicas: int
    ranks: int
    compiled: dict[str, Any]
    run: dict[str, Any]


_SYNCS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "host": ({}, {}),
    "device": ({}, {"reduce_on_rdu": True}),
    "ZeRO 2": ({"zero": 2}, {}),
    "ZeRO 2, device": ({"zero": 2}, {"reduce_on_rdu": True}),
}
_STAGES = {"pipeline_stages": 2}
LAYOUTS = {
    "np 1": Layout(1, 1, {}, {}),
    "np 2, emulated": Layout(2, 1, {}, {}),
    "np 4, emulated": Layout(4, 1, {}, {}),
    **{f"np {ranks}, {sync}": Layout(ranks, ranks, *how) for ranks in (2, 4) for sync, how in _SYNCS.items()},
    "np 1, 2 stages": Layout(1, 2, _STAGES, {}),
    "np 2, 2 stages": Layout(2, 4, _STAGES, {}),
}
SCRIPTS = {"moco": 0.0, "gan": 1e-6, "gpt": 1e-5, "vae": 1e-6, "classifier": 1e-5, "detection": 1e-6, "texts": 1e-5}
"""With the largest difference from plain PyTorch of several replicas or micro-batches, relative to the largest number
of a tensor: the sum over them adds in another order than that over the whole batch."""


def goes(name: str, layout: Layout) -> bool:
    """A PEF of several lengths has no pipeline."""
    return name != "texts" or layout.compiled is not _STAGES


def script(name: str) -> Script:
    return cast(Script, import_module(f"tests.parity.scripts.{name}"))


def in_sambasim(name: str, layout: Layout, folder: Path) -> Trained:
    trained, samples = script(name), script(name).data()
    model, optimizers, schedulers = trained.build()
    size = BATCH // layout.replicas // trained.ACCUMULATED
    several = {"data_parallel": True, "world_size": layout.replicas} if layout.replicas > 1 else {}
    how = {**trained.HOW, **layout.compiled, **several, "output_folder": folder, "check": 0}
    is_pair = not all(isinstance(one, Tensor) for one in samples)  # to train and to evaluate
    batch = next(iter(trained.data()[0])) if is_pair else samples
    by_name = {key: one[:size] for key, one in batch.items()} if isinstance(batch, Mapping) else None
    example = by_name or tuple(one[:size] for one in batch)
    pef = ss.compile(model, example, optimizer=optimizers, name=name, quiet=True, **how)
    del schedulers  # an optimizer refers to its scheduler weakly
    order = {"data.shuffle": False, "training.accumulation_steps": trained.ACCUMULATED}
    how = {"replicas": layout.replicas, "steps": STEPS, "threads": 1, "quiet": True, "set": order, **layout.run}
    run = ss.run(pef, samples, **how, **vars(trained).get("RUN", {}))
    scores = [score for evaluation in run.evaluations for score in evaluation.metrics.values()]
    return Trained(run.losses, dict(run.weights), dict(run.ema), scores)


def main() -> None:
    """`ARGUMENTS: RANKS FOLDER`: saves what each script gives in each layout of so many ranks."""
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    for name in SCRIPTS:
        for title, layout in LAYOUTS.items():
            if layout.ranks == ranks and goes(name, layout):
                found = in_sambasim(name, layout, folder / "out")
                torch.save(tuple(found), saved_in(folder, name, title))


def saved_in(folder: Path, name: str, title: str) -> Path:
    return folder / f"{name} {title}.pt"


if __name__ == "__main__":
    main()
