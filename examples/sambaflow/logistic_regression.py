"""A SambaFlow app: logistic regression on images of handwritten digits, written as for the hardware.

    python -m sambasim examples/sambaflow/logistic_regression.py compile -b 32 --data-parallel -ws 2 --pef-name logreg
    mpirun -np 2 python -m sambasim examples/sambaflow/logistic_regression.py run -b 32 --data-parallel \\
        --reduce-on-rdu --pef logreg
    python -m sambasim examples/sambaflow/logistic_regression.py test -b 32 --pef logreg

The images are the 1,797 of the UCI set that come with sambasim; apart from them nothing else here imports sambasim.
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
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.quickstart.digits import digits

PIXELS, CLASSES = 64, 10


class LogReg(nn.Module):
    """Images `[batch, 64]` and labels `[batch]` to `(loss, logits)`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(PIXELS, CLASSES)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lin_layer(image)
        return self.criterion(logits, label), logits


class FlatDigits(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is `(image, label)`: float32 `[64]`, int64 `[]`."""

    def __init__(self, images: Dataset[tuple[Tensor, Tensor]]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]  # a Dataset need not have a length; this one has

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        return image.flatten(), label


def add_user_args(parser: ArgumentParser) -> None:
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("-e", "--num-epochs", type=int, default=5)


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoint", help="File for the trained weights.")


def train(args: Namespace, model: LogReg) -> None:
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    training, held_out = digits()
    sampler = DistributedSampler(FlatDigits(training), replicas, rank)
    loader = DataLoader(FlatDigits(training), batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.num_epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for image, label in samba.SambaLoader(loader, ["image", "label"]):
            loss, _ = samba.session.run(
                input_tensors=[image, label],
                output_tensors=model.output_tensors,
                hyperparam_dict={"lr": args.lr, "momentum": args.momentum},
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )
            total += loss.mean().item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}")
    samba.session.to_cpu(model)
    if rank == 0:
        images, labels = FlatDigits(held_out), torch.stack([label for _, label in held_out])
        _, logits = model(torch.stack([images[index][0] for index in range(len(images))]), labels)
        print(f"held out: accuracy {(logits.argmax(1) == labels).float().mean():.2%}")
        if args.checkpoint:
            torch.save(model.state_dict(), args.checkpoint)


def test(model: LogReg, inputs: tuple[samba.SambaTensor, ...]) -> None:
    """What the device computes, against what PyTorch does on the host."""
    loss, logits = samba.session.run(inputs, model.output_tensors, section_types=["FWD", "BCKWD"])
    model.zero_grad()
    gold_loss, gold_logits = model(*(samba.to_torch(tensor) for tensor in inputs))
    gold_loss.backward()
    (gradient,) = samba.session.get_tensors_by_name([f"{model.lin_layer.weight.sn_name}__grad"])
    utils.assert_close(loss, gold_loss, "loss", threshold=3e-3)
    utils.assert_close(logits, gold_logits, "logits", threshold=3e-3)
    utils.assert_close(gradient, model.lin_layer.weight.grad, "gradient of the weight", threshold=3e-3)
    print("device and host agree")


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, common_parser_fn=add_user_args, run_parser_fn=add_run_args)
    utils.set_seed(256)
    model = LogReg()
    samba.from_torch_model_(model)
    inputs = (
        samba.randn(args.batch_size, PIXELS, name="image", batch_dim=0).bfloat16().float(),
        samba.randint(CLASSES, (args.batch_size,), name="label", batch_dim=0),
    )
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    if args.command in ("run", "test"):
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        if args.command == "run":
            train(args, model)
        else:
            test(model, inputs)
    else:
        common_app_driver(args, model, inputs, optimizer, name="logreg", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
