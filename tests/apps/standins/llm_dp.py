"""Stands for the data parallel LLM example: a dict of inputs, loss_indices, sn_grad set before the run, overrides.

Each replica takes its slice of a global batch; rank 0 evaluates by section_types=["fwd"] and the others wait at a barrier.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import sys
from typing import Dict

import torch
import torch.nn as nn
from fingerprint import print_weights

from sambaflow import samba
from sambaflow.samba import SambaTensor
from sambaflow.samba.schema.snconfig import SNConfig
from sambaflow.samba.utils import get_rank, get_world_size, set_seed, trace_graph
from sambaflow.samba.utils.argparser import SambaConfig, parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta_dict

CONFIG = {"model.max_seq_length": 12, "model.vocab": 32, "training.steps": 6, "training.evaluate_every": 3, "training.lr": 0.01}


class TinyLM(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.criterion = nn.CrossEntropyLoss(reduction="none", ignore_index=-100)

    def forward(self, input_ids, article_ids, labels):
        x = self.embed(input_ids.long())
        x = self.norm(x + torch.tanh(self.mix(x)) + article_ids.unsqueeze(-1) * 0.0)
        logits = self.head(x)
        return self.criterion(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()), logits


def add_args(parser):
    parser.add_argument("overrides", nargs="*", help="key=value of the configuration")


def configuration(args):
    cfg = dict(CONFIG)
    for override in args.overrides:
        key, value = override.split("=")
        cfg[key.lstrip("+")] = type(cfg.get(key, ""))(value)
    return cfg


def get_inputs(args, cfg) -> Dict[str, SambaTensor]:
    shape = (args.batch_size, cfg["model.max_seq_length"])
    return {"input_ids": SambaTensor(torch.zeros(shape, dtype=torch.int32), name="input_ids", batch_dim=0),
            "article_ids": SambaTensor(torch.zeros(shape, dtype=torch.float32), name="article_ids", batch_dim=0),
            "labels": SambaTensor(torch.zeros(shape, dtype=torch.int32), name="labels", batch_dim=0)}


def global_batch(step, args, cfg, world):
    g = torch.Generator().manual_seed(step)
    start = torch.randint(cfg["model.vocab"], (args.batch_size * world, 1), generator=g)
    return (start + 3 * torch.arange(cfg["model.max_seq_length"] + 1)) % cfg["model.vocab"]


def to_inputs(tokens):
    parts = {"input_ids": tokens[:, :-1].int(), "article_ids": torch.zeros_like(tokens[:, :-1]).float(), "labels": tokens[:, 1:].int()}
    return {name: samba.from_torch_tensor(t.contiguous(), name=name, batch_dim=0) for name, t in parts.items()}


def evaluate(args, cfg, loss_tensor):
    inputs_dict = to_inputs(global_batch(1000, args, cfg, 1))
    loss = samba.session.run(inputs_dict, loss_tensor, section_types=["fwd"])[0]
    return samba.to_torch(loss).float().mean().item()


def train(args, cfg, model, optimizers, outputs):
    rank, world = (get_rank(), get_world_size()) if torch.distributed.is_initialized() else (0, 1)
    loss_tensor = outputs[0]
    for step in range(cfg["training.steps"]):
        tokens = global_batch(step, args, cfg, world)[rank * args.batch_size:(rank + 1) * args.batch_size]
        inputs_dict = to_inputs(tokens)
        count = args.batch_size * cfg["model.max_seq_length"]
        scale = torch.ones(count) / count
        loss_tensor.sn_grad = samba.from_torch_tensor(scale)
        out = samba.session.run(inputs_dict, loss_tensor, hyperparam_dict={"lr": cfg["training.lr"]}, data_parallel=args.data_parallel,
                                reduce_on_rdu=args.reduce_on_rdu)
        loss = samba.to_torch(out[0]).float()
        loss = (loss * scale).sum()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(loss)
        loss = loss / world
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
        if (step + 1) % cfg["training.evaluate_every"] == 0:
            if rank == 0:
                print(f"eval loss {evaluate(args, cfg, loss_tensor):.4f}")
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
    samba.session.to_cpu(model)
    print_weights(model, rank)


def main():
    args = parse_app_args(argv=sys.argv[1:], common_parser_fn=add_args)
    cfg = configuration(args)
    _ = SambaConfig(args, SNConfig).get_all_params()
    set_seed(256)
    model = TinyLM(cfg["model.vocab"], 16)
    samba.from_torch_model_(model)
    optimizers = [samba.optim.AdamW(model.parameters(), lr=cfg["training.lr"], betas=(0.9, 0.95), weight_decay=0.1)]
    inputs = get_inputs(args, cfg)
    if args.command == "compile":
        pef = samba.session.compile(model, inputs, optimizers=optimizers, name="llm", inference=False, config_dict=vars(args),
                                    pef_metadata=get_pefmeta_dict(vars(args), model))
        print(f"pef: {pef}")
    elif args.command == "run":
        outputs = trace_graph(model, inputs, optimizers, pef=args.pef, loss_indices=[0], data_parallel_mode="normal", transfer_device=False)
        samba.session.to_device()
        train(args, cfg, model, optimizers, outputs)
    elif args.command == "test":
        outputs = trace_graph(model, inputs, optimizers, pef=args.pef, loss_indices=[0])
        gold = model(**inputs)
        loss = samba.session.run(inputs, outputs[0], section_types=["FWD"])[0]
        samba.utils.assert_close(loss, gold[0], "loss", threshold=0.05)
        print("test passed")
    else:
        common_app_driver(args, model, inputs, optimizers, name="llm")


if __name__ == "__main__":
    main()
