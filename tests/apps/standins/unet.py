"""Stands for U-Nets of the old API: layers of `sambaflow.samba.nn`, `utils.compile`, and `model.run`.

With --loss-on-host the model has no loss: FWD runs alone, the host differentiates, and the gradient goes back by sn_grad.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import sys

import torch
import torch.distributed as dist
from fingerprint import print_weights

import sambaflow.samba as samba
import sambaflow.samba.nn as nn
import sambaflow.samba.utils as utils
from sambaflow.mac.metadata import ConvTilingMetadata
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
                         nn.Conv2d(cout, cout, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, in_channels=1, out_channels=2, init_features=4, loss_on_host=False):
        super(UNet, self).__init__()
        f = init_features
        self.loss_on_host = loss_on_host
        self.encoder1 = block(in_channels, f)
        self.pool1 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.encoder2 = block(f, 2 * f)
        self.pool2 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.bottleneck = block(2 * f, 4 * f)
        self.upconv2 = nn.ConvTranspose2d(4 * f, 2 * f, kernel_size=2, stride=2)
        self.decoder2 = block(4 * f, 2 * f)
        self.upconv1 = nn.ConvTranspose2d(2 * f, f, kernel_size=2, stride=2)
        self.decoder1 = block(2 * f, f)
        self.conv = nn.Conv2d(f, out_channels, kernel_size=1)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, mask=None):
        enc1 = self.encoder1(x)
        enc2 = self.encoder2(self.pool1(enc1))
        dec2 = self.upconv2(self.bottleneck(self.pool2(enc2)))
        dec2 = self.decoder2(samba.cat((dec2, enc2), dim=1))
        dec1 = self.decoder1(samba.cat((self.upconv1(dec2), enc1), dim=1))
        out = self.conv(dec1)
        if self.loss_on_host:
            return out
        return self.criterion(out, mask), out


def add_user_args(parser):
    parser.add_argument("-b", "--batch-size", type=int, default=4)
    parser.add_argument("--data-parallel", action="store_true", help="train on several RDUs")
    parser.add_argument("--visualize", action="store_true")
    parser.add_argument("--in-width", type=int, default=16)
    parser.add_argument("--in-height", type=int, default=16)
    parser.add_argument("--in-channels", type=int, default=1)
    parser.add_argument("--init-features", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--loss-on-host", action="store_true")
    parser.add_argument("--num-epochs", "-e", type=int, default=1)


def batches(args):
    g = torch.Generator().manual_seed(13)
    images = torch.randn(32, args.in_channels, args.in_height, args.in_width, generator=g)
    masks = (images[:, 0] > 0.3).long()
    return list(zip(images.split(args.batch_size), masks.split(args.batch_size)))


def train(args, model, optimizer):
    rank = dist.get_rank() if dist.is_initialized() else -1
    criterion = torch.nn.CrossEntropyLoss()
    h = {"lr": args.lr, "momentum": 0.9}
    for epoch in range(args.num_epochs):
        for i, (image, mask) in enumerate(batches(args)):
            x = samba.from_torch(image, name="image", batch_dim=0)
            if args.loss_on_host:
                optimizer.zero_grad()
                out = model.run((x,), section_types=["fwd"])[0]
                output = samba.to_torch(out).float()
                output.requires_grad = True
                loss = criterion(output, mask)
                loss.backward()
                model.output_tensors[0].sn_grad = output.grad
                samba.session.run(input_tensors=(x,), output_tensors=model.output_tensors, hyperparam_dict=h,
                                  data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu,
                                  section_types=["bckwd", "opt"])
            else:
                y = samba.from_torch(mask, name="mask", batch_dim=0)
                loss, out = model.run([x, y], hyperparam_dict=h)
                loss = samba.to_torch(loss).mean()
            if rank <= 0:
                print("Epoch [{}/{}], Step [{}], Loss: {:.4f}".format(epoch + 1, args.num_epochs, i + 1, loss.item()))
    model.write_host_params()
    print_weights(model, rank)


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_user_args)
    utils.set_seed(256)
    model = UNet(args.in_channels, 2, args.init_features, args.loss_on_host)
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=0.0)
    image = samba.randn(args.batch_size, args.in_channels, args.in_height, args.in_width, name="image", batch_dim=0)
    mask = samba.randint(2, (args.batch_size, args.in_height, args.in_width), name="mask", batch_dim=0)
    if args.loss_on_host:
        inputs = (image,)
    else:
        inputs = (image, mask)
    if args.command == "compile":
        if args.loss_on_host:
            samba.session.compile(model, inputs, optimizer, name="unet", app_dir=utils.get_file_dir(__file__),
                                  config_dict=vars(args), init_output_grads=True,
                                  metadata={ConvTilingMetadata.key: ConvTilingMetadata(original_size=[args.in_height, args.in_width])})
        else:
            utils.compile(args, model, inputs, optimizer, name="unet", app_dir=utils.get_file_dir(__file__))
    elif args.command == "run":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        train(args, model, optimizer)
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        outs = model.run(inputs, section_types=["fwd"])
        gold = model(*inputs)
        out_gold = gold if args.loss_on_host else gold[1]
        utils.assert_close(samba.to_torch(outs[-1]), out_gold, "output", threshold=0.51, visualize=args.visualize)
        print("test passed")
    else:
        common_app_driver(args, model, inputs, optimizer, name="unet", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
