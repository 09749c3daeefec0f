"""Stands for the histology estimator and split learning over it: the host has the loss, and hands input.sn_grad on.

Frozen layers, two outputs of which one has no gradient, a rate for each step, a SambaLoader with a hook, profiler events.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from fingerprint import print_weights

from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.sambaloader import SambaLoader
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c)
        self.relu = nn.ReLU()

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class SplitResNet(nn.Module):
    """The server's part: activations of the client to logits and class scores."""

    def __init__(self, channels, classes):
        super().__init__()
        self.layer1 = Residual(channels)
        self.layer2 = Residual(channels)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, activations):
        x = self.layer2(self.layer1(activations))
        logits = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits, torch.softmax(logits, dim=1)


class Cosine:
    def __init__(self, base_lr, steps):
        self.base_lr, self.steps = base_lr, steps

    def __call__(self, step):
        return 0.5 * self.base_lr * (1 + math.cos(math.pi * step / self.steps))


def add_args(parser):
    parser.add_argument("--channels", type=int, default=6)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--freeze", action="store_true")


def loader(args, epoch):
    g = torch.Generator().manual_seed(29)
    labels = torch.randint(3, (96,), generator=g)
    images = torch.randn(3, 3, args.size, args.size, generator=g)[labels] + 0.5 * torch.randn(96, 3, args.size, args.size, generator=g)
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = None
    if dist.is_initialized():
        sampler = torch.utils.data.distributed.DistributedSampler(dataset)
        sampler.set_epoch(epoch)
    data = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    return SambaLoader(data, ["images"], function_hook=lambda data: [data[0]], return_original_batch=True), len(data)


def train(args, model, optimizer):
    rank = dist.get_rank() if dist.is_initialized() else -1
    client = nn.Conv2d(3, args.channels, 3, padding=1)
    for p in client.parameters():
        dist.broadcast(p.data, 0) if dist.is_initialized() else None
    criterion = nn.CrossEntropyLoss()
    step, schedule = 0, Cosine(args.lr, args.epochs * 12)
    profiler = samba.session.profiler
    kw = dict(output_tensors=model.output_tensors, data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)
    for epoch in range(args.epochs):
        batches, n = loader(args, epoch)
        total = 0.0
        for sn_batch, (_, labels) in batches:
            event = profiler.start_event("compute_step")
            sent = client(samba.to_torch(sn_batch[0]))
            activations = samba.from_torch_tensor(sent.detach(), name="activations", batch_dim=0)
            logits, scores = samba.session.run(input_tensors=[activations], section_types=["fwd"], **kw)
            host = samba.to_torch(logits).float().detach()
            host.requires_grad = True
            loss = criterion(host, labels)
            loss.backward()
            samba.session.run(input_tensors=[activations], grad_of_outputs=[samba.from_torch_tensor(host.grad), None],
                              section_types=["bckwd", "opt"], hyperparam_dict={"lr": schedule(step)}, **kw)
            back = samba.to_torch(activations.sn_grad)
            sent.backward(back.float())
            with torch.no_grad():
                for p in client.parameters():
                    p -= schedule(step) * p.grad
                    p.grad = None
            profiler.end_event(event)
            total += loss.item()
            step += 1
        if rank <= 0:
            print("epoch {} loss {:.4f} lr {:.4f}".format(epoch + 1, total / n, schedule(step)))
    samba.session.to_cpu(model)
    if rank <= 0:
        fc = {k: v for k, v in model.state_dict().items() if k in ("fc.weight", "fc.bias")}
        model.load_state_dict(fc, strict=False)
    print_weights(model, rank)


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_args)
    utils.set_seed(256)
    model = SplitResNet(args.channels, 3)
    if args.freeze:
        for p in model.layer1.parameters():
            p.requires_grad = False
    samba.from_torch_model_(model)
    activations = samba.randn(args.batch_size, args.channels, args.size, args.size, name="activations", batch_dim=0, requires_grad=True)
    inputs = (activations,)
    optimizer = samba.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9, weight_decay=0.0)
    if args.command == "compile":
        samba.session.compile(model, inputs, optimizer, name="resnet_split", app_dir=utils.get_file_dir(__file__), config_dict=vars(args),
                              pef_metadata=get_pefmeta(args, model), init_output_grads=True, squeeze_bs_dim=True)
    elif args.command == "run":
        utils.trace_graph(model, inputs, optimizer, config_dict=vars(args), squeeze_bs_dim=True, transfer_device=True)
        train(args, model, optimizer)
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef)
        gold = model(*inputs)
        outs = samba.session.run(inputs, section_types=["fwd"])
        utils.assert_close(outs[0], gold[0], "logits", threshold=0.1)
        print("test passed")
    else:
        common_app_driver(args=args, model=model, inputs=inputs, optim=optimizer, name="resnet_split", squeeze_bs_dim=True,
                          get_output_grads=False, app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
