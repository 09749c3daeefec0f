"""Stands for GPT training on one RDU: a loss for each token, scaled by sn_grad, and three AdamW over parameter groups.

The list of optimizers goes to compile, to trace_graph and to to_cpu; rates are set in param_groups and by hyperparam_dict.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from fingerprint import print_weights

import sambaflow
import sambaflow.samba as samba
import sambaflow.samba.utils as utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.pef_utils import get_pefmeta


class Layer(nn.Module):
    def __init__(self, dim, heads, length):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)
        self.register_buffer("mask", torch.triu(torch.full((length, length), -1e4), diagonal=1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (a.view(b, t, self.heads, c // self.heads).transpose(1, 2) for a in (q, k, v))
        w = torch.matmul(q, k.transpose(-1, -2)) / (c // self.heads) ** 0.5 + self.mask
        x = x + self.proj(torch.matmul(torch.softmax(w, dim=-1), v).transpose(1, 2).reshape(b, t, c))
        return x + self.out(nn.functional.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, dim, heads, layers, length):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        self.h = nn.ModuleList([Layer(dim, heads, length) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.criterion = nn.CrossEntropyLoss(reduction="none")

    def forward(self, input_ids, position_ids, labels):
        x = self.wte(input_ids) + self.wpe(position_ids)
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        loss = self.criterion(logits.view(-1, logits.shape[-1]), labels.view(-1).long())
        return loss, logits


def add_args(parser):
    parser.add_argument("--max_seq_length", type=int, default=16)
    parser.add_argument("--vocab_size", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--adam_beta2", type=float, default=0.95)
    parser.add_argument("--steps_this_run", type=int, default=8)
    parser.add_argument("--save", type=str, default=None)


def make_optimizers(args, model):
    embeddings = [p for n, p in model.named_parameters() if n.startswith(("wte", "wpe"))]
    decay = [p for n, p in model.named_parameters() if not n.startswith(("wte", "wpe")) and p.dim() > 1]
    no_decay = [p for n, p in model.named_parameters() if not n.startswith(("wte", "wpe")) and p.dim() == 1]
    kw = dict(lr=args.learning_rate, betas=(0.9, args.adam_beta2))
    return [sambaflow.samba.optim.AdamW(embeddings, weight_decay=0.0, **kw),
            sambaflow.samba.optim.AdamW(decay, weight_decay=args.weight_decay, **kw),
            sambaflow.samba.optim.AdamW(no_decay, weight_decay=0.0, **kw)]


def get_inputs(args):
    shape = (args.batch_size, args.max_seq_length)
    return (samba.randint(args.vocab_size, shape, name="input_ids", batch_dim=0, dtype=torch.int16).int(),
            samba.from_torch_tensor(torch.arange(args.max_seq_length).repeat(args.batch_size, 1), name="position_ids", batch_dim=0),
            samba.randint(0, args.vocab_size, shape, name="labels", batch_dim=0))


def train(args, model, optimizers, traced_outputs):
    rank = dist.get_rank() if dist.is_initialized() else -1
    g = torch.Generator().manual_seed(17 + max(rank, 0))
    positions = torch.arange(args.max_seq_length).repeat(args.batch_size, 1)
    for step in range(args.steps_this_run):
        start = torch.randint(args.vocab_size, (args.batch_size, 1), generator=g)
        tokens = (start + torch.arange(args.max_seq_length + 1)) % args.vocab_size
        lr = args.learning_rate * min(1.0, (step + 1) / 4)
        for opt in optimizers:
            for i in range(len(opt.param_groups)):
                opt.param_groups[i]["lr"] = lr
        scale = torch.full((args.batch_size * args.max_seq_length,), 1.0 / (args.batch_size * args.max_seq_length))
        scale[:: args.max_seq_length] = 0.0
        traced_outputs[0].sn_grad = scale
        inputs = [samba.from_torch_tensor(t, name=n, batch_dim=0) for n, t in
                  (("input_ids", tokens[:, :-1].int()), ("position_ids", positions), ("labels", tokens[:, 1:]))]
        loss, logits = samba.session.run(inputs, traced_outputs, hyperparam_dict={"lr": lr}, data_parallel=args.data_parallel,
                                         reduce_on_rdu=args.reduce_on_rdu)
        loss = samba.to_torch(loss).float() * scale
        if rank <= 0:
            print(f"step {step + 1} loss {loss.sum().item():.4f}")
    samba.session.to_cpu(model, optimizers)
    if args.save and rank <= 0:
        torch.save({"global_step": step + 1, "model": {k: samba.to_torch(v) for k, v in model.state_dict().items()},
                    "optimizer": [opt.state_dict() for opt in optimizers]}, args.save)
    print_weights(model, rank)


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_args, dev_mode=True)
    utils.set_seed(42)
    model = GPT(args.vocab_size, 32, 2, 2, args.max_seq_length)
    samba.from_torch_model_(model)
    optimizers = make_optimizers(args, model)
    inputs = get_inputs(args)
    if args.command == "compile":
        path = samba.session.compile(model, inputs, optimizers, name="gpt", app_dir=utils.get_file_dir(__file__), squeeze_bs_dim=False,
                                     config_dict=vars(args), pef_metadata=get_pefmeta(args, model), init_output_grads=not args.inference)
        print("compiled", path)
        return
    traced_outputs = utils.trace_graph(model, inputs, optim=optimizers, init_output_grads=True, pef=args.pef, mapping=args.mapping)
    if args.command == "run":
        train(args, model, optimizers, traced_outputs)
    elif args.command == "test":
        loss, logits = samba.session.run(inputs, traced_outputs, section_types=["fwd"])
        gold_loss, gold_logits = model(*inputs)
        utils.assert_close(gold_loss, loss, "loss", threshold=0.1)
        utils.assert_close(gold_logits, logits, "logits", threshold=0.1)
        print("test passed")
    elif args.command == "measure-performance":
        throughput, latency = utils.measure_performance(model, inputs, args.batch_size, args.n_chips, args.inference,
                                                        run_graph_only=args.run_graph_only, n_iterations=args.num_iterations,
                                                        json=args.json, data_parallel=args.data_parallel,
                                                        reduce_on_rdu=args.reduce_on_rdu, min_duration=args.min_duration)
        print("throughput above 0:", throughput > 0)
    elif args.command == "measure-sections":
        utils.measure_sections(model, inputs, num_sections=args.num_sections, n_iterations=args.num_iterations,
                               batch_size=args.batch_size, json=args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
