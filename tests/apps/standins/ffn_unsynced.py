"""Stands for apps with the data parallel mistake: `--data-parallel` is typed, and `session.run` is not given it.

Each replica trains on an order of its own, so without a sync of gradients the weights of the replicas differ.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from fingerprint import print_weights

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver


class Net(nn.Module):
    def __init__(self, nf, nc):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(nf, 32)
        self.fc2 = nn.Linear(32, nc)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, y):
        out = self.fc2(torch.relu(self.fc1(x)))
        return self.criterion(out, y), out


def add_args(parser):
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--num-features", type=int, default=32)
    parser.add_argument("--num-classes", type=int, default=4)


def add_run_args(parser):
    parser.add_argument("--num-epochs", "-e", type=int, default=1)


def train(args, model):
    rank = dist.get_rank() if dist.is_initialized() else 0
    g = torch.Generator().manual_seed(7)
    labels = torch.randint(args.num_classes, (256,), generator=g)
    images = torch.randn(args.num_classes, args.num_features, generator=g)[labels] + torch.randn(256, args.num_features, generator=g)
    dataset = torch.utils.data.TensorDataset(images, labels)
    order = torch.Generator().manual_seed(rank)
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True, generator=order)
    for epoch in range(args.num_epochs):
        for i, (images, labels) in enumerate(loader):
            sn_images = samba.from_torch_tensor(images, name="x", batch_dim=0)
            sn_labels = samba.from_torch_tensor(labels, name="y", batch_dim=0)
            loss, outputs = samba.session.run(input_tensors=[sn_images, sn_labels],
                                              output_tensors=model.output_tensors,
                                              hyperparam_dict={"lr": args.lr})
        print("rank {} Epoch [{}/{}], Loss: {:.4f}".format(rank, epoch + 1, args.num_epochs, samba.to_torch(loss).mean()))
    samba.session.to_cpu(model)
    print_weights(model, rank)


def test(args, model, inputs):
    gold = model(*inputs)
    outs = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors)
    utils.assert_close(gold[0].mean(), outs[0].mean(), "loss", 1e-2)
    utils.assert_close(gold[1], outs[1], "out", 1e-2)
    print("test passed")


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_args, run_parser_fn=add_run_args)
    utils.set_seed(42)
    model = Net(args.num_features, args.num_classes)
    samba.from_torch_model_(model)
    inputs = (samba.randn(args.batch_size, args.num_features, name="x", batch_dim=0),
              samba.randint(args.num_classes, (args.batch_size,), name="y", batch_dim=0))
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr) if not args.inference else None
    if args.command == "run":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef)
        train(args, model)
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef)
        test(args, model, inputs)
    else:
        common_app_driver(args, model, inputs, optimizer, name=model.__class__.__name__,
                          app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
