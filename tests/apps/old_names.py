"""Stands for apps of the oldest names: from_torch_, trace_graph(args, …), model.run(a, b), Variable, nn.DataParallel.

The model returns (out, loss), in this order; `common_app_driver` is called before the command is looked at.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Variable

import sambaflow.samba as samba
import sambaflow.samba.utils as utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver


class OldNet(nn.Module):
    def __init__(self):
        super(OldNet, self).__init__()
        self.features = nn.DataParallel(nn.Sequential(nn.Conv2d(1, 6, kernel_size=3, padding=1), nn.Tanh(), nn.AvgPool2d(4)))
        self.classifier = nn.Linear(6 * 3 * 3, 4)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        x = self.features(x)
        out = self.classifier(x.view(x.size(0), -1))
        return out, self.loss(out, y)


def add_args(parser):
    parser.add_argument("-bs", type=int, default=16)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--epochs", default=2, type=int)


def data():
    g = torch.Generator().manual_seed(23)
    y = torch.randint(4, (160,), generator=g)
    x = torch.randn(4, 1, 12, 12, generator=g)[y] + 0.5 * torch.randn(160, 1, 12, 12, generator=g)
    return torch.utils.data.TensorDataset(x, y)


def train(args, model):
    rank = dist.get_rank() if dist.is_initialized() else -1
    for epoch in range(args.epochs):
        loader = torch.utils.data.DataLoader(data(), batch_size=args.bs)
        for i, (images, labels) in enumerate(loader):
            images, labels = Variable(images), Variable(labels)
            x = samba.from_torch(images, name="x", batch_dim=0).float()
            y = samba.from_torch(labels, name="y", batch_dim=0)
            if args.data_parallel:
                out, loss = samba.session.run((x, y), model.output_tensors, hyperparam_dict={"lr": args.lr},
                                              data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)
            else:
                out, loss = model.run(x, y, hyperparam_dict={"lr": args.lr})
            sys.stdout.write("\r" if rank > 0 else "")
        if rank <= 0:
            print("Epoch: {} Loss: {:.4f}".format(epoch, samba.to_torch(torch.mean(loss))))
    model.cpu()
    if rank <= 0:
        weights = [samba.to_torch(value).detach().numpy().tobytes() for value in model.state_dict().values()]
        print("weights", hashlib.sha256(b"".join(weights)).hexdigest())


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_args, run_parser_fn=add_args)
    utils.set_seed(256)
    x = samba.randn(*[args.bs, 1, 12, 12], name="x", batch_dim=0).bfloat16().float()
    y = samba.randint(4, (args.bs,), name="y", batch_dim=0)
    model = OldNet()
    samba.from_torch_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    inputs = (x, y)
    common_app_driver(args, model, inputs, optimizer, name="old_names", app_dir=utils.get_file_dir(__file__))
    if args.command in ("run", "test"):
        utils.trace_graph(args, model, inputs, optimizer)
    if args.command == "run":
        train(args, model)
    elif args.command == "test":
        out_gold, loss_gold = model(x, y)
        out, loss = model.run(x, y)
        utils.assert_close(out, out_gold, "out", threshold=1e-2)
        loss_gold.mean().backward()
        for name, param in model.named_parameters():
            utils.assert_close(param.sn_grad, param.grad, name, threshold=1e-2)
        print("test passed")


if __name__ == "__main__":
    main(sys.argv[1:])
