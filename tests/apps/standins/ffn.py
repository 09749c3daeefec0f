"""Stands for the boilerplate of a feed-forward network with a logistic regression head, trained data parallel.

The vendor's starter form: flags of both parsers, `session.run` with both data parallel keywords, no sharding of the data.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import argparse
import sys
from typing import List, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
from fingerprint import print_weights
from torch.utils.data import DataLoader, TensorDataset

import sambaflow
import sambaflow.samba as samba
import sambaflow.samba.utils as utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta


class FFN(nn.Module):
    def __init__(self, num_features: int, ffn_dim_1: int, ffn_dim_2: int) -> None:
        super().__init__()
        self.gemm1 = nn.Linear(num_features, ffn_dim_1, bias=False)
        self.relu = nn.ReLU()
        self.gemm2 = nn.Linear(ffn_dim_1, ffn_dim_2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gemm2(self.relu(self.gemm1(x)))


class LogReg(nn.Module):
    def __init__(self, num_features: int, num_classes: int):
        super().__init__()
        self.lin_layer = nn.Linear(in_features=num_features, out_features=num_classes, bias=False)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        out = self.lin_layer(inputs)
        loss = self.criterion(out, targets)
        return loss, out


class FFNLogReg(nn.Module):
    def __init__(self, num_features: int, ffn_embedding_size: int, embedding_size: int, num_classes: int) -> None:
        super().__init__()
        self.ffn = FFN(num_features, ffn_embedding_size, embedding_size)
        self.logreg = LogReg(embedding_size, num_classes)
        self._init_params()

    def _init_params(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        out = self.ffn(inputs)
        loss, out = self.logreg(out, targets)
        return loss, out


def add_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-features", type=int, default=64)
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--ffn-dim-1", type=int, default=32)
    parser.add_argument("--ffn-dim-2", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05, help="Learning rate for training")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("-e", "--num-epochs", type=int, default=2)


def add_run_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-e", "--num-epochs", type=int, default=2)
    parser.add_argument("--data-folder", type=str, default="mnist_data")
    parser.add_argument("--print-every", type=int, default=10000)


def get_inputs(args: argparse.Namespace) -> Tuple[samba.SambaTensor]:
    images = samba.randn(args.batch_size, args.num_features, name="image", batch_dim=0).bfloat16().float()
    labels = samba.randint(args.num_classes, (args.batch_size,), name="label", batch_dim=0)
    images.host_memory = False
    labels.host_memory = False
    return (images, labels)


def prepare_dataloader(args: argparse.Namespace):
    g = torch.Generator().manual_seed(7)
    centres = torch.randn(args.num_classes, args.num_features, generator=g)
    labels = torch.randint(args.num_classes, (384,), generator=g)
    images = centres[labels] + torch.randn(384, args.num_features, generator=g)
    train = TensorDataset(images[:320], labels[:320])
    test = TensorDataset(images[320:], labels[320:])
    return DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, args.batch_size, shuffle=False)


def train(args: argparse.Namespace, model: nn.Module, output_tensors) -> None:
    args.local_rank = dist.get_rank() if dist.is_initialized() else -1
    train_loader, test_loader = prepare_dataloader(args)
    total_step = len(train_loader)
    hyperparam_dict = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    for epoch in range(args.num_epochs):
        avg_loss = 0
        for i, (images, labels) in enumerate(train_loader):
            sn_images = samba.from_torch_tensor(images, name="image", batch_dim=0)
            sn_labels = samba.from_torch_tensor(labels, name="label", batch_dim=0)
            loss, outputs = samba.session.run(
                input_tensors=[sn_images, sn_labels],
                output_tensors=output_tensors,
                hyperparam_dict=hyperparam_dict,
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )
            loss, outputs = samba.to_torch(loss), samba.to_torch(outputs)
            avg_loss += loss.mean()
            if (i + 1) % args.print_every == 0 and args.local_rank <= 0:
                print("Step [{}/{}], Loss: {:.4f}".format(i + 1, total_step, avg_loss / (i + 1)))
        if args.local_rank <= 0:
            print("Epoch [{}/{}], Loss: {:.4f}".format(epoch + 1, args.num_epochs, avg_loss / total_step))

    samba.session.to_cpu(model)
    with torch.no_grad():
        correct = 0
        total = 0
        total_loss = 0
        for images, labels in test_loader:
            loss, outputs = model(images, labels)
            loss, outputs = samba.to_torch(loss), samba.to_torch(outputs)
            total_loss += loss.mean()
            _, predicted = torch.max(outputs.data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum()
    if args.local_rank <= 0:
        print("Test Accuracy: {:.2f} Loss: {:.4f}".format(100.0 * correct / total, total_loss / len(test_loader)))
    print_weights(model, args.local_rank)


def test(args: argparse.Namespace, model: nn.Module, inputs: Tuple[samba.SambaTensor], outputs) -> None:
    samba.session.tracing = False
    outputs_gold = model(*inputs)
    outputs_samba = samba.session.run(
        input_tensors=inputs,
        output_tensors=outputs,
        data_parallel=args.data_parallel,
        reduce_on_rdu=args.reduce_on_rdu,
    )
    for i, (output_samba, output_gold) in enumerate(zip(outputs_samba, outputs_gold)):
        print("samba:", output_samba.abs().sum())
        print("gold:", output_gold.abs().sum())
        utils.assert_close(output_samba, output_gold, f"forward output #{i}", threshold=0.01, visualize=args.visualize)
    gold_loss = outputs_gold[0]
    gold_loss.mean().backward()
    for name, param in model.named_parameters():
        utils.assert_close(param.sn_grad, param.grad, name, threshold=0.01, visualize=args.visualize)
    print("test passed")


def main(argv: List[str]) -> None:
    utils.set_seed(256)
    args = parse_app_args(argv=argv, common_parser_fn=add_args, run_parser_fn=add_run_args)
    inputs = get_inputs(args)
    model = FFNLogReg(args.num_features, args.ffn_dim_1, args.ffn_dim_2, args.num_classes)
    samba.from_torch_model_(model)
    if args.inference:
        optimizer = None
    else:
        optimizer = sambaflow.samba.optim.SGD(
            model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
        )
    if args.command == "compile":
        samba.session.compile(
            model,
            inputs,
            optimizer,
            name="ffn_mnist_torch",
            app_dir=utils.get_file_dir(__file__),
            config_dict=vars(args),
            pef_metadata=get_pefmeta(args, model),
        )
    elif args.command == "test":
        outputs = utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        test(args, model, inputs, outputs)
    elif args.command == "run":
        traced_outputs = utils.trace_graph(
            model, inputs, optimizer, pef=args.pef, mapping=args.mapping, distlearn_config=args.distlearn_config
        )
        train(args, model, traced_outputs)
    else:
        common_app_driver(args, model, inputs, optimizer, name="ffn_mnist_torch", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
