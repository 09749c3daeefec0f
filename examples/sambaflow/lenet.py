"""A SambaFlow app: LeNet-5 reads handwritten digits, with checkpoints, resumption, and inference by a PEF of its own.

    python -m sambasim examples/sambaflow/lenet.py compile -b 32 --data-parallel -ws 2 --pef-name lenet
    mpirun -np 2 python -m sambasim examples/sambaflow/lenet.py run -b 32 --data-parallel --reduce-on-rdu --pef lenet \\
        --num-epochs 5 --save-folder checkpoints
    mpirun -np 2 python -m sambasim examples/sambaflow/lenet.py run -b 32 --data-parallel --reduce-on-rdu --pef lenet \\
        --num-epochs 10 --save-folder checkpoints --resume checkpoints/epoch_5.pt
    python -m sambasim examples/sambaflow/lenet.py test -b 32 --pef lenet

    python -m sambasim examples/sambaflow/lenet.py compile -b 36 --inference --pef-name lenet_inference
    python -m sambasim examples/sambaflow/lenet.py run -b 36 --inference --pef lenet_inference \\
        --resume checkpoints/epoch_10.pt

After ten epochs on two replicas it classifies 96 % of the held-out digits correctly. The images are the 1,797 of the
UCI set that come with sambasim, enlarged from 8 by 8 to the 32 by 32 pixels of LeNet-5; apart from them nothing else
here imports sambasim. Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 86(11),
1998; here with ReLU and maxima where that has tanh and means.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.quickstart.digits import digits

SIZE, CLASSES = 32, 10


class LeNet(nn.Module):
    """Images `[batch, 1, 32, 32]` to logits `[batch, 10]`; with labels `[batch]`, to `(loss of each, logits)`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.maxpool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)
        self.criterion = nn.CrossEntropyLoss(reduction="none")

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        features = self.maxpool(torch.relu(self.conv1(image)))
        features = self.maxpool(torch.relu(self.conv2(features)))
        hidden = torch.relu(self.fc1(features.flatten(1)))
        logits = self.fc3(torch.relu(self.fc2(hidden)))
        return logits if label is None else (self.criterion(logits, label), logits)


def add_common_args(parser: ArgumentParser) -> None:
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("-e", "--num-epochs", type=int, default=5)
    parser.add_argument("--save-folder", type=Path, help="Where checkpoints go; without it there are none.")
    parser.add_argument("--checkpoint-interval", type=int, default=1, help="Epochs from one checkpoint to the next.")
    parser.add_argument("--resume", type=Path, help="The checkpoint to resume from, or to predict with.")


def enlarged(samples: TensorDataset) -> TensorDataset:
    """Samples are `(image, label)`: float32 `[1, 32, 32]`, int64 `[]`."""
    images, labels = samples.tensors
    return TensorDataset(F.interpolate(images, (SIZE, SIZE), mode="bilinear"), labels)


def get_inputs(args: Namespace) -> tuple[samba.SambaTensor, ...]:
    image = samba.randn(args.batch_size, 1, SIZE, SIZE, name="image", batch_dim=0)
    label = samba.randint(CLASSES, (args.batch_size,), name="label", batch_dim=0)
    return (image,) if args.inference else (image, label)


def load(args: Namespace, model: LeNet, optimizer: samba.optim.SGD) -> int:
    """The checkpoint to the host, before trace_graph sends it to the device. Returns how many epochs are done."""
    checkpoint = torch.load(args.resume)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epoch"])


def save(args: Namespace, model: LeNet, optimizer: samba.optim.SGD, epoch: int, rank: int) -> None:
    """What the device has, by one rank; the others wait until it is written."""
    samba.session.to_cpu(model)
    if rank == 0:
        args.save_folder.mkdir(parents=True, exist_ok=True)
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.save_folder / f"epoch_{epoch}.pt")
    if args.data_parallel:
        dist.barrier()


def train(args: Namespace, model: LeNet, optimizer: samba.optim.SGD, epochs_done: int) -> None:
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if args.data_parallel else (0, 1)
    training, held_out = map(enlarged, digits())
    sampler = DistributedSampler(training, replicas, rank)
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(epochs_done, args.num_epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images, labels in samba.SambaLoader(loader, ["image", "label"]):
            loss, _ = samba.session.run(
                input_tensors=(images, labels),
                output_tensors=model.output_tensors,
                hyperparam_dict={"lr": args.lr, "momentum": args.momentum},
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )
            total += loss.mean().item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}", flush=True)
        if args.save_folder and (epoch + 1) % args.checkpoint_interval == 0:
            save(args, model, optimizer, epoch + 1, rank)
    if rank == 0:
        evaluate(args, model, held_out)


def evaluate(args: Namespace, model: LeNet, held_out: TensorDataset) -> None:
    """Reads the held-out images on the device: forward alone."""
    loader = DataLoader(held_out, batch_size=args.batch_size, drop_last=True)
    right = 0
    for images, labels in samba.SambaLoader(loader, ["image", "label"]):
        inputs = [images] if args.inference else [images, labels]
        *_, logits = samba.session.run(inputs, model.output_tensors, section_types=["FWD"])
        right += int((logits.argmax(1) == labels).sum())
    read = len(loader) * args.batch_size
    print(f"held out: {right} of {read} right, accuracy {right / read:.2%}")


def test(args: Namespace, model: LeNet, inputs: tuple[samba.SambaTensor, ...]) -> None:
    """What the device computes, against what PyTorch does on the host."""
    sections = ["FWD"] if args.inference else ["FWD", "BCKWD"]
    *losses, logits = samba.session.run(inputs, model.output_tensors, section_types=sections)
    gold = model(*map(samba.to_torch, inputs))
    if args.inference:
        utils.assert_close(logits, gold, "logits", threshold=3e-3)
    else:
        gold_losses, gold_logits = gold
        utils.assert_close(losses[0], gold_losses, "losses", threshold=3e-3)
        utils.assert_close(logits, gold_logits, "logits", threshold=3e-3)
        gold_losses.mean().backward()
        parameters = dict(model.named_parameters())
        gradients = samba.session.get_tensors_by_name([f"{p.sn_name}__grad" for p in parameters.values()])
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            utils.assert_close(gradient, parameter.grad, f"gradient of {name}", threshold=3e-3)
    print("device and host agree")


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, common_parser_fn=add_common_args, run_parser_fn=add_run_args)
    utils.set_seed(256)
    model = LeNet()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    inputs = get_inputs(args)
    if args.inference:
        model.eval()
    if args.command in ("run", "test"):
        epochs_done = load(args, model, optimizer) if args.command == "run" and args.resume else 0
        optimizers = None if args.inference else optimizer
        utils.trace_graph(model, inputs, optimizers, pef=args.pef, mapping=args.mapping)
        if args.command == "test":
            test(args, model, inputs)
        elif args.inference:
            evaluate(args, model, enlarged(digits()[1]))
        else:
            train(args, model, optimizer, epochs_done)
    else:
        common_app_driver(args, model, inputs, optimizer, name="lenet", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
