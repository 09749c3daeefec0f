"""An app whose replicas have several chips: `python -m tests.apps.chips FOLDER NAME …` trains each PEF, and writes what
each rank has seen to FOLDER/NAME.RANK.pt. NAME is that of a PEF, alone, with `:rdu`, or with `:sliced` for a device
sync as of a large model.

Two optimizers, clipping, BatchNorm and dropout; two whole steps, and two of two batches each, section by section. The
second step turns on momentum.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.runtime.transports import window
from sambasim.runtime.transports.window import SMALL_BYTES
from sambasim.samba import ending, process
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH, FEATURES, CLASSES = 16, 12, 5
STEPS = ((0,), (1,), (2, 3), (4, 5))
"""The batches of each step."""
CHANGED_RATE = 0.3


class Net(nn.Module):
    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 64, bias=False), nn.BatchNorm1d(64)
        self.dropout, self.second = nn.Dropout(0.1), nn.Linear(64, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x + self.second(self.dropout(torch.nn.functional.gelu(self.norm(self.first(x))))))
        return nn.functional.cross_entropy(logits, label), logits


def model_and_optimizers() -> tuple[Net, list[Any]]:
    torch.manual_seed(3)
    model = Net()
    samba.from_torch_model_(model)
    first = [*model.first.parameters(), *model.norm.parameters()]
    rest = [*model.second.parameters(), *model.head.parameters()]
    adam = samba.optim.AdamW(first, lr=0.01, max_grad_norm=0.5)
    return model, [adam, samba.optim.SGD(rest, lr=0.1, dampening=0.5, max_grad_norm=0.5)]


def batch_of(number: int, replica: int, replicas: int) -> list[samba.SambaTensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    label = torch.randint(CLASSES, (BATCH,), generator=generator)
    size = BATCH // replicas
    own = slice(replica * size, (replica + 1) * size)
    return [samba.from_torch_tensor(one[own], name, 0) for one, name in ((x, "x"), (label, "label"))]


def compiled(name: str, replicas: int, folder: Path, **config: object) -> str:
    model, optimizers = model_and_optimizers()
    given = {"output_folder": str(folder), "data_parallel": True, "world_size": replicas, **config}
    return session.compile(model, batch_of(0, 0, replicas), optimizers, name=name, config_dict=given)


def train(pef: str, *, reduce_on_rdu: bool, drops: bool) -> Mapping[str, object]:
    """The outputs of each batch, and what the host has at the end."""
    model, optimizers = model_and_optimizers()
    ranks = ending.communicator()
    trace_graph(model, batch_of(0, ranks.rank, ranks.world_size), optimizers, pef=pef)
    sync: dict[str, Any] = {"data_parallel": True, "reduce_on_rdu": reduce_on_rdu}
    outputs: list[list[Tensor]] = []
    gradients = []
    for step, numbers in enumerate(STEPS):
        rate = {"p": 0.0} if not drops else {"p": CHANGED_RATE} if step == 2 else {}
        rate |= {"momentum": 0.9} if step == 1 else {}
        for number in numbers:
            torch.manual_seed(number)
            batch = batch_of(number, ranks.rank, ranks.world_size)
            if len(numbers) == 1:
                found = session.run(batch, model.output_tensors, hyperparam_dict=rate, **sync)
            else:
                found = session.run(batch, model.output_tensors, hyperparam_dict=rate, section_types=["FWD"])
                found[0].sn_grad = 1 / len(numbers)
                session.run(section_types=["BCKWD"])
            outputs.append([samba.to_torch(one).clone() for one in found])
        if len(numbers) > 1:
            gradients.append(samba.to_torch(session.get_tensors_by_name(["net__first__weight__grad"])[0]))
            session.run(section_types=["OPT"], **sync)
    session.to_cpu(model)
    states = [dict(sorted(one.state_dict()["state"].items())) for one in optimizers]
    return {"outputs": outputs, "gradients": gradients, "weights": model.state_dict(), "states": states}


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        pef, _, way = name.partition(":")
        drops = pef in ("weight", "plain")
        window.SMALL_BYTES = 0 if way == "sliced" else SMALL_BYTES
        found = train(str(folder / pef / f"{pef}.pef"), reduce_on_rdu=way != "", drops=drops)
        assert session.machine is not None
        assert session.machine.replica._memory.is_sliced == (way == "sliced")
        torch.save(found, folder / f"{name}.{process.current().rank}.pt")
        session.reset()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
