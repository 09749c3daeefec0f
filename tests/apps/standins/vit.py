"""Stands for ViT ports: training with --do-train, else evaluation on the training graph at rate 0, outputs on the host.

The model is written as in timm: qkv in one linear layer, permute and unbind, a class token, blocks in a Sequential.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from fingerprint import print_weights

import sambaflow.samba as samba
import sambaflow.samba.utils as utils
from sambaflow.samba import SambaTensor, to_torch
from sambaflow.samba.utils import assert_close, get_rank, get_world_size, is_main_process, set_seed, trace_graph
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, img=16, patch=4, dim=32, depth=2, heads=2, num_classes=5):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (img // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images, labels):
        x = self.proj(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.norm(self.blocks(x + self.pos_embed))
        out = self.head(x[:, 0])
        return F.cross_entropy(out, labels), out


def add_args(parser):
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--in-width", type=int, default=16)
    parser.add_argument("--in-height", type=int, default=16)
    parser.add_argument("--num-classes", type=int, default=5)


def add_run_args(parser):
    parser.add_argument("--do-train", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)


def loader(args):
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(args.num_classes, (128,), generator=g)
    images = torch.randn(args.num_classes, 3, args.in_height, args.in_width, generator=g)[labels]
    images = images + 0.5 * torch.randn(128, 3, args.in_height, args.in_width, generator=g)
    dataset = torch.utils.data.TensorDataset(images, labels)
    return samba.sambaloader.SambaLoader(torch.utils.data.DataLoader(dataset, args.batch_size), ["image", "label"])


def one_epoch(args, model, output_tensors, hyper):
    correct, total, losses = 0, 0, []
    for images, labels in loader(args):
        kw = {"hyperparam_dict": hyper} if hyper is not None else {}
        loss, out = samba.session.run(input_tensors=(images, labels), output_tensors=output_tensors,
                                      data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu, **kw)
        out = to_torch(out).float()
        losses.append(to_torch(loss).mean().tolist())
        predicted = out.argmax(dim=1)
        correct += (predicted == labels).sum().item()
        total += labels.size(0)
    return sum(losses) / len(losses), 100.0 * correct / total


def main(argv):
    args = parse_app_args(dev_mode=True, common_parser_fn=add_args, test_parser_fn=add_run_args, run_parser_fn=add_run_args)
    set_seed(256)
    model = ViT(args.in_width, num_classes=args.num_classes)
    if args.inference:
        model.eval()
    samba.from_torch_model_(model)
    optimizer = None if args.inference else samba.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.997), weight_decay=0.01)
    image = samba.randn(args.batch_size, 3, args.in_height, args.in_width, name="image", batch_dim=0).bfloat16().float()
    label = samba.randint(args.num_classes, (args.batch_size,), name="label", batch_dim=0)
    inputs = [image, label]
    if args.command in ["run", "test"]:
        traced = trace_graph(model, inputs, optimizer, init_output_grads=not args.inference, pef=args.pef, mapping=args.mapping, dev_mode=True)
    if args.command == "run":
        if args.do_train:
            for epoch in range(args.epochs):
                loss, acc = one_epoch(args, model, traced, {"lr": args.lr})
                if is_main_process():
                    print("Epoch [{}/{}], Loss: {:.4f}, world {}".format(epoch + 1, args.epochs, loss, get_world_size()))
        loss, acc = one_epoch(args, model, traced, None if args.inference else {"lr": 0.0})
        if is_main_process():
            print("evaluation: loss {:.4f} accuracy {:.2f}".format(loss, acc))
        samba.session.to_cpu(model)
        print_weights(model, get_rank())
    elif args.command == "test":
        gold = model(image, label)
        outs = samba.session.run(input_tensors=inputs, output_tensors=traced, hyperparam_dict={"lr": 0.0})
        assert_close(gold[0], outs[0], "loss", threshold=0.05, visualize=args.visualize)
        assert_close(gold[1], outs[1], "out", 0.1, 0.1, visualize=args.visualize)
        print("test passed")
    else:
        common_app_driver(args=args, model=model, inputs=inputs, optim=optimizer, name=model.__class__.__name__,
                          squeeze_bs_dim=True, init_output_grads=not args.inference, app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
