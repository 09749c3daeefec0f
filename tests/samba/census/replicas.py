"""The data-parallel rows of the census, as one app: each row trains a model of its own on two replicas.

Its weights are those of plain PyTorch with the mean of the gradients of both replicas, bit for bit; a line for each row
and rank tells their digest. Called by test_replicas.py, with each sync.
"""

import argparse
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sambaflow import samba  # type: ignore[import-not-found]  # the import finder has it
from sambaflow.samba.utils import get_rank, get_world_size, is_main_process  # type: ignore[import-not-found]
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.samba.harness import BATCH, LogReg, OnlyOut, Plainly, batch_of, equal, plain, same_weights, seeded

REPLICAS = 2
Start = Callable[[int], Tensor]


class Row:
    """A model that is traced, and its reference."""

    def __init__(self, args: argparse.Namespace, pef: str, model: type[Any] = LogReg, *settings: Any) -> None:
        self.args, self.parallel = args, {"data_parallel": args.data_parallel, "reduce_on_rdu": args.reduce_on_rdu}
        self.model = samba.from_torch_model_(seeded(model, *settings))
        self.plainly = Plainly(self.model)
        self.optimizers = samba.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.pef = f"{args.pefs}/{pef}/{pef}.pef"
        self.takes = 1 if model is OnlyOut else 2

    def trace(self, inputs: Any = None, **options: Any) -> Any:
        inputs = self.batch(0) if inputs is None else inputs
        return samba.utils.trace_graph(self.model, inputs, self.optimizers, pef=self.pef, **options)

    def batch(self, step: int, rank: int | None = None) -> list[Any]:
        return batch_of(REPLICAS * step + (get_rank() if rank is None else rank))[: self.takes]

    def expect(self, batches: list[list[Any]], start: Start | None = None, lr: float = 0.1) -> None:
        """The step of the reference: `batches` are those of the replicas, and `start` is the gradient of each."""
        self.plainly.optimizer.param_groups[0]["lr"] = lr
        self.plainly.optimizer.zero_grad()
        for rank, batch in enumerate(batches):
            first = self.plainly.model(*map(plain, batch))[0]
            first.mean().backward() if start is None else first.backward(start(rank))
        for parameter in self.plainly.model.parameters():
            parameter.grad.div_(len(batches))
        self.plainly.optimizer.step()

    def expect_step(self, step: int, start: Start | None = None, lr: float = 0.1) -> None:
        self.expect([self.batch(step, rank) for rank in range(REPLICAS)], start, lr)


def bckwd_reduce(row: Row) -> None:
    """section_types=['fwd'], ['bckwd', 'reduce'], ['opt']"""
    outputs = row.trace()
    for step in range(2):
        for kinds in (["fwd"], ["bckwd", "reduce"], ["opt"]):
            samba.session.run(row.batch(step), outputs, section_types=kinds, **row.parallel)
        row.expect_step(step)


def checkpoint(row: Row) -> None:
    """(input_tensors=, output_tensors=, hyperparam_dict=h, data_parallel=, reduce_on_rdu=); to_cpu, state_dict() of
    model and optimizer on one rank alone; both load it and go on"""
    row.trace()
    for part in range(2):
        for step in (2 * part, 2 * part + 1):
            loss, _ = samba.session.run(
                input_tensors=row.batch(step), output_tensors=row.model.output_tensors, hyperparam_dict={"lr": 0.5},
                **row.parallel,
            )  # fmt: skip
            assert equal(loss, row.plainly.model(*map(plain, row.batch(step)))[0])
            row.expect_step(step, lr=0.5)
        if is_main_process():
            samba.session.to_cpu(row.model)
            torch.save((row.model.state_dict(), row.optimizers.state_dict()), "checkpoint.pt")
        dist.barrier()
        model, state = torch.load("checkpoint.pt")
        states = zip(state["state"].values(), row.plainly.optimizer.state.values(), strict=True)
        assert all(equal(ours["momentum_buffer"], theirs["momentum_buffer"]) for ours, theirs in states)
        row.model.load_state_dict(model)
        row.optimizers.load_state_dict(state)
        samba.session.to_device(row.model)


def momentum(row: Row) -> None:
    """hyperparam_dict={'momentum': 0.9}, off, and on again, of a PEF compiled with momentum, and an SGD without"""
    row.optimizers = samba.optim.SGD(row.model.parameters(), lr=0.1, dampening=0.5)
    outputs = row.trace()
    for step, number in enumerate((0.0, 0.9, 0.9, 0.0, 0.5)):
        samba.session.run(row.batch(step), outputs, hyperparam_dict={"momentum": number}, **row.parallel)
        row.plainly.optimizer.param_groups[0].update(momentum=number, dampening=0.5)
        row.expect_step(step)


def host_loss(row: Row) -> None:
    """grad_of_outputs=[output.grad] of a loss on the host, then output.sn_grad = output.grad"""
    outputs = row.trace()
    for step in range(2):

        def start(rank: int, step: int = step) -> Tensor:
            output = row.plainly.model(*map(plain, row.batch(step, rank)))[0].detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(output, plain(batch_of(REPLICAS * step + rank)[1]))
            gradient: Tensor = torch.autograd.grad(loss, output)[0]
            return gradient

        samba.session.run(row.batch(step), row.model.output_tensors, section_types=["fwd"], **row.parallel)
        gradient = start(get_rank())
        if step:
            row.model.output_tensors[0].sn_grad = gradient
        given = None if step else [gradient]
        samba.session.run(
            row.batch(step), outputs, section_types=["bckwd", "opt"], grad_of_outputs=given, **row.parallel
        )
        row.expect_step(step, start)


def llm(row: Row) -> None:
    """per-rank slices of a global batch; sn_grad before run(inputs_dict, loss_tensor); all_reduce / world_size"""
    images, labels = map(plain, batch_of(9, REPLICAS * BATCH))
    scale = torch.rand(REPLICAS * BATCH, generator=torch.Generator().manual_seed(9))

    def of(rank: int) -> slice:
        return slice(rank * BATCH, (rank + 1) * BATCH)

    own = of(get_rank())
    inputs_dict = samba.from_named_dict({"inputs": images[own], "targets": labels[own]})
    loss_tensor = row.trace(inputs_dict, loss_indices=[0], data_parallel_mode="normal")[0]
    loss_tensor.sn_grad = scale[own]
    (losses,) = samba.session.run(inputs_dict, loss_tensor, **row.parallel)
    step_loss = (samba.to_torch(losses.float()) * scale[own]).sum()
    if dist.is_initialized():
        dist.all_reduce(step_loss)
    step_loss /= get_world_size()
    gold = sum((row.plainly.model(images[of(r)], labels[of(r)])[0] * scale[of(r)]).sum() for r in range(REPLICAS))
    assert equal(step_loss, gold / REPLICAS)
    row.expect([[images[of(r)], labels[of(r)]] for r in range(REPLICAS)], lambda rank: scale[of(rank)])
    if is_main_process():
        (losses,) = samba.session.run(inputs_dict, loss_tensor, section_types=["fwd"])
        assert equal(losses, row.plainly.model(images[own], labels[own])[0])
    dist.barrier()


def num_replicas_1(row: Row) -> None:
    """DistributedSampler(dataset, num_replicas=1) with no rank: nothing is sharded"""
    outputs = row.trace()
    dataset = TensorDataset(*map(plain, batch_of(5, 4 * BATCH)))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1)
    for images, labels in DataLoader(dataset, BATCH, sampler=sampler):
        samba.session.run([images, labels], outputs, **row.parallel)
        row.expect([[images, labels]])


def measuring(row: Row) -> None:
    """measure_performance and measure_sections(data_parallel=, reduce_on_rdu=)"""
    row.trace()
    utils, batch = samba.utils, row.batch(0)
    throughput, latency = utils.measure_performance(row.model, batch, BATCH, 1, False, n_iterations=2, **row.parallel)
    assert abs(throughput - REPLICAS * BATCH / latency) < 1e-6 * throughput
    options = {"num_sections": 5, "n_iterations": 2, "batch_size": BATCH, **row.parallel}
    sections: Any = utils.measure_sections(row.model, batch, **options)["sections"]
    kinds = [kind for section in sections for kind in section["kind"].split("+")]
    assert kinds[-3:] == ["REDUCE", "OPT", "GATHER"], "in rows of their own, or in one"
    assert all(section["predicted_s"] > 0 for section in sections)
    for _ in range(2 * (3 + 2)):  # of which three warm up
        row.expect_step(0)


ROWS: dict[Callable[[Row], None], tuple[Any, ...]] = {
    checkpoint: ("logreg",),
    bckwd_reduce: ("logreg",),
    momentum: ("logreg",),
    host_loss: ("onlyout", OnlyOut),
    llm: ("llm", LogReg, "none"),
    num_replicas_1: ("logreg",),
    measuring: ("logreg",),
}
"""By row: the name of its PEF, and its model, with what that is made with, if it is no LogReg. Rows of whole steps,
of several optimizers and of samplers are in `tests/apps`."""


def _add_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pefs")


def main(argv: list[str]) -> None:
    args = samba.utils.argparser.parse_app_args(argv=argv, common_parser_fn=_add_args, run_parser_fn=_add_args)
    torch.set_num_threads(1)
    for call, about in ROWS.items():
        row = Row(args, *about)
        call(row)
        samba.session.to_cpu(row.model)
        assert same_weights(row.model, row.plainly.model), call.__doc__
        digest = hashlib.sha256(b"".join(plain(one).numpy().tobytes() for one in row.model.parameters())).hexdigest()
        sys.stdout.write(f"row {call.__name__} {get_rank()} {digest}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
