"""Stands for the peak-finding CNN: patches of a detector to the centre of the peak in each, by MSE.

Short flags of one dash, sambaflow imported under try, files of samples, and a state_dict saved and read back.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import argparse
import os
import sys
import time

import numpy as np
import torch
from fingerprint import print_weights
from torch.utils.data import DataLoader, Dataset

try:
    import sambaflow
    import sambaflow.samba.optim as optim
    import sambaflow.samba.utils as utils
    from sambaflow import samba
    from sambaflow.samba.sambatensor import SambaTensor, from_torch_tensor
    from sambaflow.samba.utils.argparser import parse_app_args
    from sambaflow.samba.utils.common import common_app_driver
except:
    pass

try:
    import h5py
except ImportError:
    h5py = None


class PeakNet(torch.nn.Module):
    def __init__(self, psz):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 8, kernel_size=3)
        self.conv2 = torch.nn.Conv2d(8, 4, kernel_size=3)
        self.act = torch.nn.LeakyReLU(negative_slope=0.01)
        self.fc1 = torch.nn.Linear(4 * (psz - 4) ** 2, 32)
        self.fc2 = torch.nn.Linear(32, 2)
        self.criterion = torch.nn.MSELoss()

    def forward(self, patch, centre):
        x = self.act(self.conv1(patch))
        x = self.act(self.conv2(x))
        x = x.flatten(start_dim=1)
        x = self.fc2(self.act(self.fc1(x)))
        loss = self.criterion(x, centre)
        return loss, x


class PatchWisePeaks(Dataset):
    """Reads `patches` and `peaks` of an HDF5 file, or of two .npy files where there is no h5py."""

    def __init__(self, folder, psz):
        if h5py is not None:
            with h5py.File(os.path.join(folder, "peaks.h5"), "r") as fd:
                self.patch, self.peak = fd["patches"][:], fd["peaks"][:]
        else:
            self.patch, self.peak = (np.load(os.path.join(folder, n)) for n in ("patches.npy", "peaks.npy"))
        self.psz = psz

    def __len__(self):
        return self.peak.shape[0]

    def __getitem__(self, idx):
        img = self.patch[idx].astype(np.float32)[np.newaxis]
        return img, (self.peak[idx] / self.psz).astype(np.float32)


def write_peaks(folder, psz, n=256):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.RandomState(4)
    peaks = rng.uniform(2, psz - 3, size=(n, 2)).astype(np.float32)
    yy, xx = np.mgrid[:psz, :psz]
    patches = np.exp(-((yy - peaks[:, :1, None]) ** 2 + (xx - peaks[:, 1:, None]) ** 2) / 4).astype(np.float32)
    if h5py is not None:
        with h5py.File(os.path.join(folder, "peaks.h5"), "w") as fd:
            fd["patches"], fd["peaks"] = patches, peaks
    else:
        np.save(os.path.join(folder, "patches.npy"), patches)
        np.save(os.path.join(folder, "peaks.npy"), peaks)


def add_common_args(parser: argparse.Namespace):
    parser.add_argument("-lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("-mbsize", type=int, default=32, help="mini batch size")
    parser.add_argument("-psz", type=int, default=11, help="working patch size")


def add_run_args(parser):
    parser.add_argument("-maxep", type=int, default=3, help="max training epochs")
    parser.add_argument("-outdir", type=str, default="peaks_out")


def train(args, model):
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        write_peaks(args.outdir, args.psz)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ds = PatchWisePeaks(args.outdir, args.psz)
    sampler = torch.utils.data.distributed.DistributedSampler(ds) if args.data_parallel else None
    loader = DataLoader(dataset=ds, batch_size=args.mbsize, sampler=sampler, shuffle=(sampler is None), drop_last=True)
    losses = []
    for epoch in range(args.maxep):
        tick = time.time()
        for patch, centre in loader:
            out = samba.session.run(
                input_tensors=[from_torch_tensor(patch, name="patch", batch_dim=0),
                               from_torch_tensor(centre, name="centre", batch_dim=0)],
                output_tensors=model.output_tensors,
                hyperparam_dict={"lr": args.lr},
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu)
            losses.append(samba.to_torch(out[0]).tolist())
        if rank == 0:
            print("[Info] epoch: %d loss: %s, %.2f s" % (epoch, np.mean(losses[-len(loader):]), time.time() - tick))
    samba.session.to_cpu(model)
    if rank == 0:
        path = os.path.join(args.outdir, "mdl.pth")
        torch.save(model.state_dict(), path)
        weights = torch.load(path)
        host = PeakNet(args.psz)
        host.load_state_dict({k: v.torch_tensor() if isinstance(v, SambaTensor) else v for k, v in weights.items()})
        patches, centres = (torch.from_numpy(np.stack(part)) for part in zip(*(ds[i] for i in range(64))))
        print("host error of the saved model %.3f" % host(patches, centres)[0].item())
    print_weights(model, rank)


def main():
    argv = sys.argv[1:]
    args = parse_app_args(argv=argv, common_parser_fn=add_common_args, run_parser_fn=add_run_args)
    utils.set_seed(0)
    model = PeakNet(args.psz)
    samba.from_torch_(model)
    optimizer = optim.Adam(model.parameters(), lr=args.lr, eps=1e-8)
    ipt = samba.randn(args.mbsize, 1, args.psz, args.psz, name="patch", batch_dim=0).bfloat16().float()
    tgt = samba.randn(args.mbsize, 2, name="centre", batch_dim=0).bfloat16().float()
    if args.command in ("run", "test"):
        utils.trace_graph(model, (ipt, tgt), optimizer, pef=args.pef, mapping=args.mapping)
    if args.command == "run":
        train(args, model)
    elif args.command == "test":
        gold = model(ipt, tgt)
        outs = samba.session.run(input_tensors=(ipt, tgt), output_tensors=model.output_tensors)
        for name, a, b in zip(["loss", "out"], outs, gold):
            samba.utils.assert_close(a, b, name, threshold=0.05, visualize=args.visualize)
        print("test passed")
    else:
        common_app_driver(args, model, (ipt, tgt), optimizer, name="peaknet")


if __name__ == "__main__":
    main()
