"""A SambaFlow app: a small GPT-2 from its training to a Hugging Face folder, from which `gpt2_generate.py` writes text.

    python -m sambasim examples/sambaflow/gpt2_train.py compile --o1 --data-parallel -ws 2 --pef-name gpt2
    mpirun -np 2 python -m sambasim examples/sambaflow/gpt2_train.py run --data-parallel --reduce-on-rdu \\
        --checkpoint gpt2.pt --pef gpt2
    python examples/sambaflow/gpt2_convert.py gpt2.pt gpt2_hf

With --resume gpt2.pt a run trains on from a checkpoint.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from gpt2_model import GPT2, LENGTH
from gpt_model import ALPHABET, windows
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

Inputs = Sequence[samba.SambaTensor]
NAMES = ["tokens", "targets"]


def add_user_args(parser: ArgumentParser) -> None:
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="Steps of this run.")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--resume", help="A checkpoint to train on from.")
    parser.add_argument("--checkpoint", help="File for the weights and the state of the optimizer.")


def batches(args: Namespace, rank: int, replicas: int, taken: int) -> Iterator[Inputs]:
    """This replica's share of the text, epoch after epoch, without the first `taken` batches."""
    text = windows(LENGTH)
    sampler = DistributedSampler(text, replicas, rank)
    loader = DataLoader(text, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    epochs, rest = divmod(taken, len(loader))
    for epoch in count(epochs):
        sampler.set_epoch(epoch)
        yield from islice(samba.SambaLoader(loader, NAMES), rest, None)
        rest = 0


def train(args: Namespace, model: GPT2, optimizer: samba.optim.AdamW, done: int) -> None:
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = batches(args, rank, replicas, done)
    loss_tensor = model.output_tensors[0]
    for step in range(done, done + args.steps):
        loss_tensor.sn_grad = torch.ones(())  # from here the backward starts: the scale of the loss
        loss, _ = samba.session.run(
            input_tensors=next(data),
            output_tensors=model.output_tensors,
            data_parallel=args.data_parallel,
            reduce_on_rdu=args.reduce_on_rdu,
        )
        if rank == 0 and (step + 1) % args.log_every == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    samba.session.to_cpu(model)
    if rank == 0 and args.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done + args.steps}
        torch.save(state, args.checkpoint)


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, common_parser_fn=add_user_args, run_parser_fn=add_run_args)
    utils.set_seed(256)
    model = GPT2()
    samba.from_torch_model_(model)
    shape = (args.batch_size, LENGTH)
    inputs = tuple(samba.randint(len(ALPHABET), shape, name=name, batch_dim=0) for name in NAMES)
    optimizer = samba.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01, max_grad_norm=1.0)
    if args.command == "run":
        done = 0
        if args.resume:
            state = torch.load(Path(args.resume))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["step"]
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        train(args, model, optimizer, done)
    else:
        common_app_driver(args, model, inputs, optimizer, name="gpt2", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
