"""Stands for the logistic regression starter in its long form: weight norm, gold test, accuracy report.

Its DistributedSampler has num_replicas=1 and no rank, so nothing is sharded; it evaluates on the host.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import argparse
import sys
from typing import Tuple

import torch
import torch.nn as nn
import torch.distributed as dist
from fingerprint import print_weights
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.env import use_mock_samba_runtime
from sambaflow.samba.test import TestWithGold
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.benchmark_acc import AccuracyReport
from sambaflow.samba.utils.common import common_app_driver


class LogReg(nn.Module):
    """Logistic regression"""

    def __init__(self, num_features: int, num_classes: int, bias: bool):
        super().__init__()
        self.num_features = num_features
        self.num_classes = num_classes
        self.lin_layer = nn.Linear(in_features=num_features, out_features=num_classes, bias=bias)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        out = self.lin_layer(inputs)
        loss = self.criterion(out, targets)
        return loss, out


def add_args(parser: argparse.ArgumentParser):
    parser.add_argument("--lr", type=float, default=0.0015)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--weight-decay", type=float, default=3e-4)
    parser.add_argument("--num-epochs", "-e", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=-1)
    parser.add_argument("--num-features", type=int, default=784)
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--yaml-config", default=None, type=str)
    parser.add_argument("--data-dir", "--data-folder", type=str, default="mnist_data")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--weight-norm", action="store_true", help="Apply weight norm to the linear layer")
    parser.add_argument("--acc-report-json", type=str, default=None)


def prepare_dataloader(args: argparse.Namespace):
    g = torch.Generator().manual_seed(3)
    labels = torch.randint(args.num_classes, (384,), generator=g)
    images = torch.randn(args.num_classes, args.num_features, generator=g)[labels]
    images = images + torch.randn(384, args.num_features, generator=g)
    train_dataset = TensorDataset(images[:320], labels[:320])
    test_dataset = TensorDataset(images[320:], labels[320:])
    train_sampler = DistributedSampler(train_dataset, num_replicas=1)
    print("world size", args.world_size)
    train_loader = torch.utils.data.DataLoader(dataset=train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = torch.utils.data.DataLoader(dataset=test_dataset, batch_size=args.batch_size, shuffle=False)
    return train_loader, test_loader


def train(args: argparse.Namespace, model: nn.Module, optimizer) -> None:
    train_loader, test_loader = prepare_dataloader(args)
    hyperparam_dict = {"lr": args.lr, "weight_decay": args.weight_decay}
    total_step = len(train_loader)
    for epoch in range(args.num_epochs):
        avg_loss = 0
        for i, (images, labels) in enumerate(train_loader):
            if args.num_steps > 0 and i >= args.num_steps:
                break
            sn_images = samba.from_torch_tensor(images.reshape(-1, args.num_features), name="image", batch_dim=0)
            sn_labels = samba.from_torch_tensor(labels, name="label", batch_dim=0)
            loss, outputs = samba.session.run(
                input_tensors=[sn_images, sn_labels],
                output_tensors=model.output_tensors,
                hyperparam_dict=hyperparam_dict,
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )
            loss, outputs = samba.to_torch(loss), samba.to_torch(outputs)
            avg_loss += loss.mean()
        if dist.get_rank() == 0:
            print("Epoch [{}/{}], Step [{}/{}], Loss: {:.4f}".format(
                epoch + 1, args.num_epochs, i + 1, total_step, avg_loss / (i + 1)))

    samba.session.to_cpu(model)
    test_acc = 0.0
    with torch.no_grad():
        correct, total, total_loss = 0, 0, 0
        for images, labels in test_loader:
            loss, outputs = model(images.reshape(-1, args.num_features), labels)
            loss, outputs = samba.to_torch(loss), samba.to_torch(outputs)
            total_loss += loss.mean()
            _, predicted = torch.max(outputs.data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum()
        test_acc = 100.0 * correct / total
    if dist.get_rank() == 0:
        print("Test Accuracy: {:.2f}".format(test_acc), " Loss: {:.4f}".format(total_loss / len(test_loader)))
        if args.acc_report_json is not None:
            report = AccuracyReport(val_accuracy=test_acc.item(), batch_size=args.batch_size,
                                    num_iterations=args.num_epochs * total_step)
            report.save(args.acc_report_json)
    print_weights(model, dist.get_rank())


def test(args: argparse.Namespace, model: nn.Module, optimizer, inputs) -> None:
    if args.gold_file_path:
        TestWithGold(args, "logreg", model, None, optimizer).test()
        return
    samba.session.tracing = False
    with samba.patched_torch():
        gold_loss, gold_outputs = model(*inputs)
    loss, outputs = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors)
    thresh = 1e-2 if use_mock_samba_runtime() else 3e-3
    utils.assert_close(loss.mean(), gold_loss.mean(), "loss", threshold=thresh, visualize=args.visualize)
    utils.assert_close(outputs, gold_outputs, "outputs", threshold=thresh, visualize=args.visualize)
    gold_loss.mean().backward()
    if args.weight_norm:
        magnitude, direction = samba.session.get_tensors_by_name(
            ["logreg__lin_layer__weight_magnitude", "logreg__lin_layer__weight_direction"])
        print("magnitude", tuple(magnitude.data.shape), "direction", tuple(direction.data.shape))
    else:
        utils.assert_close(model.lin_layer.weight.sn_grad, model.lin_layer.weight.grad, "lin_layer__weight__grad",
                           threshold=thresh, visualize=args.visualize)
    print("test passed")


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_args)
    utils.set_seed(256)
    ipt = samba.randn(args.batch_size, args.num_features, name="image", batch_dim=0, named_dims=("B", "F")).bfloat16().float()
    tgt = samba.randint(args.num_classes, (args.batch_size,), name="label", batch_dim=0, named_dims=("B",))
    model = LogReg(args.num_features, args.num_classes, args.bias)
    samba.from_torch_model_(model)
    if args.weight_norm:
        utils.weight_norm_(model.lin_layer)
    inputs = (ipt, tgt)
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    if args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        test(args, model, optimizer, inputs)
    elif args.command == "run":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        train(args, model, optimizer)
    else:
        common_app_driver(args=args, model=model, inputs=inputs, optim=optimizer, name=model.__class__.__name__,
                          init_output_grads=not args.inference, app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
