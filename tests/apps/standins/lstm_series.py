"""Stands for the class-based driver of time-series nets: CNN or LSTM, with the arguments of sambaflow built in code.

    python lstm_series.py compile --net lstm
    python lstm_series.py run --net lstm --pef out/series_lstm/series_lstm.pef
    python lstm_series.py inference --net lstm --pef out/series_lstm/series_lstm.pef

`inference` runs the PEF of training by a plain `session.run` with 'p' 0 and without a rate.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import argparse
import sys

import torch
import torch.distributed as dist
from fingerprint import print_weights
from torch import nn

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta
from sambaflow.samba.utils.trainer.samba import train as samba_train
from sambaflow.samba.utils.trainer.torch import train as torch_train


class SeriesLSTM(nn.Module):
    def __init__(self, features, hidden, p):
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(hidden, 1)
        self.criterion = nn.MSELoss()

    def forward(self, x, y):
        hidden, _ = self.lstm(x)
        pred = self.head(self.drop(hidden[:, -1]))
        return self.criterion(pred, y), pred


class SeriesCNN(nn.Module):
    def __init__(self, features, hidden, p):
        super().__init__()
        self.conv = nn.Conv1d(features, hidden, kernel_size=3, padding=1)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(hidden, 1)
        self.criterion = nn.MSELoss()

    def forward(self, x, y):
        hidden = torch.relu(self.conv(torch.transpose(x, 1, 2)))
        pred = self.head(self.drop(torch.mean(hidden, dim=2)))
        return self.criterion(pred, y), pred


class SambaFramework:
    optimizer_config = {"lr": 0.01, "learning_rate": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.0, "p": 0.1}

    def __init__(self, command, user):
        self.user = user
        self.batch_size = 16
        argv = [command, f"-b={self.batch_size}", "--log-level=error"]
        if command == "compile":
            argv += [f"--pef-name=series_{user.net}", f"--output-folder={user.out}"]
            argv += ["--data-parallel", "-ws=2"] if user.dp else []
        else:
            argv += [f"--pef={user.pef}"]
            argv += ["--data-parallel"] if user.dp else []
            argv += ["--reduce-on-rdu"] if user.on_rdu else []
        self.args = parse_app_args(argv=argv, common_parser_fn=self.add_args)
        utils.set_seed(256)
        net = {"lstm": SeriesLSTM, "cnn": SeriesCNN}[user.net]
        self.model = net(self.args.features, 16, 0.1)
        samba.from_torch_model_(self.model)
        self.inputs = (samba.randn(self.batch_size, self.args.length, self.args.features, name="x", batch_dim=0),
                       samba.randn(self.batch_size, 1, name="y", batch_dim=0))
        self.optimizer = samba.optim.AdamW(self.model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.0)

    @staticmethod
    def add_args(parser: argparse.ArgumentParser):
        parser.add_argument("--length", type=int, default=12)
        parser.add_argument("--features", type=int, default=4)
        parser.add_argument("--min-throughput", type=float, default=0.0)

    def data(self, n=256):
        g = torch.Generator().manual_seed(11)
        x = torch.randn(n, self.args.length, self.args.features, generator=g)
        y = x[:, -1, :1] + 0.5 * x[:, -2, 1:2]
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=self.batch_size, drop_last=True)

    def compile(self):
        samba.session.compile(model=self.model, inputs=self.inputs, optimizers=self.optimizer, name="series",
                              config_dict=vars(self.args), pef_metadata=get_pefmeta(self.args, self.model))

    def step(self, x, y, **kw):
        return samba.session.run(
            input_tensors=[samba.from_torch_tensor(x, name="x", batch_dim=0), samba.from_torch_tensor(y, name="y", batch_dim=0)],
            output_tensors=self.model.output_tensors, data_parallel=self.args.data_parallel,
            reduce_on_rdu=self.args.reduce_on_rdu, **kw)

    def trace(self):
        utils.trace_graph(self.model, self.inputs, self.optimizer, init_output_grads=True, pef=self.args.pef)

    def run(self):
        self.trace()
        rank = dist.get_rank() if dist.is_initialized() else -1
        for epoch in range(2):
            losses = []
            for x, y in self.data():
                loss, pred = self.step(x, y, hyperparam_dict=self.optimizer_config)
                losses.append(samba.to_torch(loss).mean().tolist())
            evaluation = dict(self.optimizer_config, lr=0.0, p=0)
            val = [samba.to_torch(self.step(x, y, hyperparam_dict=evaluation)[0]).mean().item() for x, y in self.data(64)]
            if rank <= 0:
                print("epoch {} loss {:.4f} val {:.4f}".format(epoch + 1, sum(losses) / len(losses), sum(val) / len(val)))
        samba.session.to_cpu(self.model)
        print_weights(self.model, rank)

    def inference(self):
        self.trace()
        preds = []
        for x, y in self.data(64):
            loss, pred = self.step(x, y)
            preds.append(samba.to_torch(pred))
        print("predictions", tuple(torch.cat(preds).shape))

    def test(self):
        self.trace()
        self.model.eval()
        gold = self.model(*self.inputs)
        outs = self.step(*self.inputs, hyperparam_dict={"p": 0}, section_types=["fwd"])
        for i, (a, b) in enumerate(zip(outs, gold)):
            utils.assert_close(a, b, f"output {i}", threshold=0.05)
        print("test passed")

    def measure(self):
        common_app_driver(self.args, self.model, self.inputs, self.optimizer, name="series", app_dir=utils.get_file_dir(__file__))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["compile", "run", "inference", "test", "measure-performance", "measure-sections"])
    parser.add_argument("--net", default="lstm")
    parser.add_argument("--pef", default="")
    parser.add_argument("--out", default="out")
    parser.add_argument("--dp", action="store_true")
    parser.add_argument("--on-rdu", action="store_true")
    user = parser.parse_args()
    framework = SambaFramework("run" if user.mode == "inference" else user.mode, user)
    getattr(framework, "measure" if user.mode.startswith("measure") else user.mode)()


if __name__ == "__main__":
    main()
