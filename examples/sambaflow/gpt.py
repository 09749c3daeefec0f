"""A SambaFlow app: a small GPT with three optimizers, whose steps are run section by section.

    python -m sambasim examples/sambaflow/gpt.py compile --grad-accumulation-steps 2 --data-parallel -ws 2 \\
        --pef-name gpt
    mpirun -np 2 python -m sambasim examples/sambaflow/gpt.py run --grad-accumulation-steps 2 --data-parallel \\
        --reduce-on-rdu --pef gpt
    python -m sambasim examples/sambaflow/gpt.py test --grad-accumulation-steps 2 --pef gpt

In 200 steps on two replicas the loss falls from 4.6 to 2.3 nats a character.

An optimizer step is made of several batches: each goes through FWD and BCKWD, and gradients add up on the device until
GRADNORM and OPT use them. The embeddings, of which a batch touches some rows alone, have an optimizer of their own;
norms and biases have one that does not decay them. Model and text are in `gpt_model.py`.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import count

import torch
import torch.distributed as dist
from gpt_model import ALPHABET, GPT, windows
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

Inputs = Sequence[samba.SambaTensor]
Optimizers = list[torch.optim.Optimizer]


def add_user_args(parser: ArgumentParser) -> None:
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="Characters of a sample.")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--checkpoint", help="File for the trained weights.")


def get_optimizers(args: Namespace, model: GPT) -> Optimizers:
    """For embeddings, for the other matrices, and for norms and biases."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    others = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    common = {"lr": args.learning_rate, "max_grad_norm": args.max_grad_norm}
    return [
        samba.optim.Adam(tables, betas=(0.9, 0.99), **common),
        samba.optim.AdamW(
            [p for p in others if p.ndim > 1], betas=(0.9, 0.95), weight_decay=args.weight_decay, **common
        ),
        samba.optim.AdamW([p for p in others if p.ndim == 1], betas=(0.9, 0.95), weight_decay=0.0, **common),
    ]


def learning_rate(args: Namespace, step: int) -> float:
    """Up for `--warmup-steps`, then down in a straight line to a tenth at the last step; steps count from 0."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    return args.learning_rate * (1 - 0.9 * (step - args.warmup_steps) / (args.steps - args.warmup_steps))


def batches(args: Namespace, rank: int, replicas: int) -> Iterator[Inputs]:
    """This replica's share of the text, epoch after epoch."""
    text = windows(args.length)
    sampler = DistributedSampler(text, replicas, rank)
    loader = DataLoader(text, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from samba.SambaLoader(loader, ["tokens", "targets"])


def forward_and_backward(model: GPT, batch: Inputs, share: float) -> Inputs:
    """Run one batch, its loss scaled by `share`. Returns loss and logits."""
    loss, logits = samba.session.run(batch, model.output_tensors, section_types=["FWD"])
    loss.sn_grad = share
    samba.session.run(section_types=["BCKWD"])
    return loss, logits


def train(args: Namespace, model: GPT) -> None:
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = batches(args, rank, replicas)
    micro_steps = args.grad_accumulation_steps
    total = 0.0
    for step in range(args.steps):
        for _ in range(micro_steps):
            loss, _ = forward_and_backward(model, next(data), 1 / micro_steps)
            total += loss.item() / micro_steps
        samba.session.run(
            section_types=["GRADNORM", "OPT"],
            hyperparam_dict={"lr": learning_rate(args, step)},
            data_parallel=args.data_parallel,
            reduce_on_rdu=args.reduce_on_rdu,
        )
        if rank == 0 and (step + 1) % args.log_every == 0:
            print(f"step {step + 1}: loss {total / args.log_every:.4f}", flush=True)
            total = 0.0
    samba.session.to_cpu(model)
    if rank == 0 and args.checkpoint:
        torch.save(model.state_dict(), args.checkpoint)


def test(args: Namespace, model: GPT, inputs: Inputs) -> None:
    """What the device computes, against what PyTorch does on the host."""
    micro_steps = args.grad_accumulation_steps
    for _ in range(micro_steps):
        loss, logits = forward_and_backward(model, inputs, 1 / micro_steps)
    for _ in range(micro_steps):
        gold_loss, gold_logits = model(*map(samba.to_torch, inputs))
        (gold_loss / micro_steps).backward()
    utils.assert_close(loss, gold_loss, "loss", threshold=3e-3)
    near = 3e-2 if logits.dtype is torch.bfloat16 else 3e-3  # in bf16, weights and layers round one after another
    utils.assert_close(logits, gold_logits, "logits", threshold=near)
    for name, parameter in model.named_parameters():
        (gradient,) = samba.session.get_tensors_by_name([f"{parameter.sn_name}__grad"])
        utils.assert_close(gradient, parameter.grad, f"gradient of {name}", threshold=3e-3)
    print("device and host agree")


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, common_parser_fn=add_user_args, run_parser_fn=add_run_args)
    utils.set_seed(256)
    model = GPT(args.length, args.layers)
    samba.from_torch_model_(model)
    inputs = tuple(
        samba.randint(len(ALPHABET), (args.batch_size, args.length), name=name, batch_dim=0)
        for name in ("tokens", "targets")
    )
    optimizers = get_optimizers(args, model)
    if args.command in ("run", "test"):
        utils.trace_graph(model, inputs, optimizers, pef=args.pef, mapping=args.mapping)
        if args.command == "run":
            train(args, model)
        else:
            test(args, model, inputs)
    else:
        common_app_driver(args, model, inputs, optimizers, name="gpt", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
