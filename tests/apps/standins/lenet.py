"""Stands for the LeNet app with checkpoints: `params = vars(args)` everywhere, and the real rate in hyperparam_dict.

It evaluates on the device with section_types=["fwd"], and goes on from `<steps>.pt`.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from fingerprint import print_weights
from torch.utils.data import DataLoader, TensorDataset

import sambaflow.samba as samba
import sambaflow.samba.optim as optim
import sambaflow.samba.utils as sn_utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.benchmark_acc import AccuracyReport
from sambaflow.samba.utils.pef_utils import get_pefmeta_dict


class LeNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.state = {}
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5)
        self.fc1 = nn.Linear(16 * 2 * 2, 48)
        self.fc2 = nn.Linear(48, num_classes)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        out = self.fc2(torch.relu(self.fc1(x)))
        return self.criterion(out, labels), out


def add_args(parser):
    parser.add_argument("-b", "--batch-size", "--batch_size", type=int, default=32, metavar="N")
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=256)


def add_run_args(parser):
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--checkpoint-dir", type=str, default="")
    parser.add_argument("--resume", type=str, default=None)
    parser.add_argument("--acc-report-json", type=str, default=None)


def loaders(params):
    g = torch.Generator().manual_seed(1)
    labels = torch.randint(params["num_classes"], (320,), generator=g)
    images = torch.randn(params["num_classes"], 1, 16, 16, generator=g)[labels]
    images = images + 0.7 * torch.randn(320, 1, 16, 16, generator=g)
    kw = dict(batch_size=params["batch_size"], num_workers=params["num_workers"])
    return (DataLoader(TensorDataset(images[:256], labels[:256]), **kw),
            DataLoader(TensorDataset(images[256:], labels[256:]), **kw))


def save(params, model, optimizer, steps, epochs):
    samba.session.to_cpu(model)
    os.makedirs(params["checkpoint_dir"], exist_ok=True)
    state = {"completed_steps": steps, "completed_epochs": epochs,
             "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, os.path.join(params["checkpoint_dir"], f"{steps}.pt"))


def evaluate(params, model, loader):
    correct, total, losses = 0, 0, 0.0
    for images, labels in loader:
        loss, out = samba.session.run(
            input_tensors=[samba.from_torch(images, name="images", batch_dim=0),
                           samba.from_torch(labels, name="labels", batch_dim=0)],
            output_tensors=model.output_tensors, section_types=["fwd"])
        losses += samba.to_torch(loss).mean().item()
        _, predicted = torch.max(samba.to_torch(out).data, 1)
        correct += (predicted == labels).sum().item()
        total += labels.size(0)
    return 100.0 * correct / total, losses / len(loader)


def train(params, model, optimizer):
    local_rank = dist.get_rank() if dist.is_initialized() else -1
    train_loader, test_loader = loaders(params)
    steps = model.state["completed_steps"]
    for epoch in range(model.state["completed_epochs"], params["epochs"]):
        running = 0
        for images, labels in train_loader:
            loss, _ = samba.session.run(
                input_tensors=(samba.from_torch(images, name="images", batch_dim=0),
                               samba.from_torch(labels, name="labels", batch_dim=0)),
                output_tensors=model.output_tensors, hyperparam_dict={"lr": params["lr"]},
                data_parallel=params["data_parallel"], reduce_on_rdu=params["reduce_on_rdu"])
            running += samba.to_torch(loss).mean()
            steps += 1
        acc, val_loss = evaluate(params, model, test_loader)
        if local_rank <= 0:
            sys.stdout.write("Epoch %d train loss %.4f val loss %.4f acc %.2f\n" % (epoch + 1, running / len(train_loader), val_loss, acc))
            if params["checkpoint_dir"]:
                save(params, model, optimizer, steps, epoch + 1)
    if params["acc_report_json"] and local_rank <= 0:
        report = AccuracyReport(val_metrics={"acc": acc, "loss": val_loss}, batch_size=params["batch_size"],
                                num_iterations=steps)
        report.save(params["acc_report_json"])
    samba.session.to_cpu(model)
    print_weights(model, local_rank)


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_args, run_parser_fn=add_run_args)
    params = vars(args)
    sn_utils.set_seed(params["seed"])
    model = LeNet(params["num_classes"])
    samba.from_torch_model_(model)
    inputs = (samba.randn(params["batch_size"], 1, 16, 16, name="images", batch_dim=0).bfloat16().float(),
              samba.randint(params["num_classes"], (params["batch_size"],), name="labels", batch_dim=0))
    optimizer = None if params["inference"] else optim.SGD(model.parameters(), lr=0.0)
    model.state = {"completed_steps": 0, "completed_epochs": 0}
    if params["command"] == "compile":
        samba.session.compile(model, inputs, optimizer, name="lenet", app_dir=sn_utils.get_file_dir(__file__),
                              config_dict=params, pef_metadata=get_pefmeta_dict(params, model), squeeze_bs_dim=True)
    elif params["command"] == "run":
        if params["resume"]:
            checkpoint = torch.load(params["resume"])
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            model.state["completed_steps"] = checkpoint["completed_steps"]
            model.state["completed_epochs"] = checkpoint["completed_epochs"]
        sn_utils.trace_graph(model, inputs, optimizer, config_dict=params, squeeze_bs_dim=True)
        train(params, model, optimizer)
    elif params["command"] == "test":
        sn_utils.trace_graph(model, inputs, optimizer, config_dict=params, squeeze_bs_dim=True)
        gold_loss, gold_out = model(*inputs)
        loss, out = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors, hyperparam_dict={"lr": 0.0})
        sn_utils.assert_close(loss.mean(), gold_loss.mean(), "loss", threshold=0.085)
        sn_utils.assert_close(out, gold_out, "out", threshold=0.085, rtol=0.1)
        print("test passed")
    elif params["command"] == "measure-performance":
        sn_utils.trace_graph(model, inputs, optimizer, pef=params["pef"], mapping=params["mapping"])
        sn_utils.measure_performance(model, inputs, params["batch_size"], params["n_chips"], params["inference"],
                                     run_graph_only=params["run_graph_only"], n_iterations=params["num_iterations"],
                                     json=params["json"], compiled_stats_json=params["compiled_stats_json"],
                                     data_parallel=params["data_parallel"], reduce_on_rdu=params["reduce_on_rdu"],
                                     use_sambaloader=True, min_duration=params["min_duration"])
    elif params["command"] == "measure-sections":
        sn_utils.trace_graph(model, inputs, optimizer, pef=params["pef"], mapping=params["mapping"])
        sn_utils.measure_sections(model, inputs, num_sections=params["num_sections"], n_iterations=params["num_iterations"],
                                  batch_size=params["batch_size"], data_parallel=params["data_parallel"],
                                  reduce_on_rdu=params["reduce_on_rdu"], json=params["json"],
                                  min_duration=params["min_duration"])


if __name__ == "__main__":
    main(sys.argv[1:])
