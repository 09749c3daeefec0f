"""A SambaFlow app: a feed-forward network reads images of handwritten digits, and Adam trains it.

    python -m sambasim examples/sambaflow/feed_forward.py compile -b 32 --data-parallel -ws 2 --pef-name feed_forward
    mpirun -np 2 python -m sambasim examples/sambaflow/feed_forward.py run -b 32 --data-parallel --reduce-on-rdu \\
        --pef feed_forward
    python -m sambasim examples/sambaflow/feed_forward.py test -b 32 --pef feed_forward

After ten epochs on two replicas it classifies 97 % of the held-out digits correctly. The images are the 1,797 of the
UCI set that come with sambasim; apart from them nothing else here imports sambasim.
"""

import sys
from argparse import ArgumentParser, Namespace

import torch
import torch.distributed as dist
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.quickstart.digits import digits


class FeedForward(nn.Module):
    """Images `[batch, features]` and labels `[batch]` to `(loss, logits)`."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gemm1 = nn.Linear(features, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.gemm2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.norm(self.gemm1(image)))
        logits = self.head(torch.relu(self.gemm2(hidden)))
        return self.criterion(logits, label), logits


def add_common_args(parser: ArgumentParser) -> None:
    parser.add_argument("--num-features", type=int, default=64)
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--weight-decay", type=float, default=1e-4)


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("-e", "--num-epochs", type=int, default=10)
    parser.add_argument("--checkpoint", help="File for the trained weights.")


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """The samples to train on and those held out, each `(image, label)`: float32 `[64]`, int64 `[]`."""
    training, held_out = (TensorDataset(part.tensors[0].flatten(1), part.tensors[1]) for part in digits())
    return training, held_out


def get_inputs(args: Namespace) -> tuple[samba.SambaTensor, ...]:
    return (
        samba.randn(args.batch_size, args.num_features, name="image", batch_dim=0).bfloat16().float(),
        samba.randint(args.num_classes, (args.batch_size,), name="label", batch_dim=0),
    )


def train(args: Namespace, model: FeedForward) -> None:
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if args.data_parallel else (0, 1)
    training, held_out = datasets()
    sampler = DistributedSampler(training, replicas, rank)
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch in samba.SambaLoader(loader, ["image", "label"]):
            loss, _ = samba.session.run(
                input_tensors=batch,
                output_tensors=model.output_tensors,
                hyperparam_dict={"lr": args.lr},
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )
            total += loss.mean().item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}", flush=True)
    samba.session.to_cpu(model)
    if rank == 0:
        evaluate(model, held_out)
        if args.checkpoint:
            torch.save(model.state_dict(), args.checkpoint)


def evaluate(model: FeedForward, held_out: TensorDataset) -> None:
    """On the host, which has the trained weights after `to_cpu`."""
    images, labels = held_out.tensors
    with torch.no_grad():
        _, logits = model(images, labels)
    print(f"held out: accuracy {(logits.argmax(1) == labels).float().mean():.2%}")


def test(model: FeedForward, inputs: tuple[samba.SambaTensor, ...]) -> None:
    """What the device computes, against what PyTorch does on the host."""
    loss, logits = samba.session.run(inputs, model.output_tensors, section_types=["FWD", "BCKWD"])
    parameters = dict(model.named_parameters())
    gradients = samba.session.get_tensors_by_name([f"{p.sn_name}__grad" for p in parameters.values()])
    gold_loss, gold_logits = model(*map(samba.to_torch, inputs))
    gold_loss.backward()
    utils.assert_close(loss, gold_loss, "loss", threshold=3e-3)
    utils.assert_close(logits, gold_logits, "logits", threshold=3e-3)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        # In bf16, a sum near 0 may be rounded to the other side of a ReLU.
        near = 1e-2 if gradient.dtype is torch.bfloat16 else 3e-3
        utils.assert_close(gradient, parameter.grad, f"gradient of {name}", threshold=near)
    print("device and host agree")


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, common_parser_fn=add_common_args, run_parser_fn=add_run_args)
    utils.set_seed(256)
    model = FeedForward(args.num_features, args.hidden, args.num_classes)
    samba.from_torch_model_(model)
    inputs = get_inputs(args)
    optimizer = samba.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    if args.command in ("run", "test"):
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        if args.command == "run":
            train(args, model)
        else:
            test(model, inputs)
    else:
        common_app_driver(args, model, inputs, optimizer, name="feed_forward", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
