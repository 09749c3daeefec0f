"""Stands for the hook app of HF transformers: a model of the library from a config, with a dict of inputs, some None.

The inputs go on as `dict.values()`, and the app removes the None from them after tracing.
"""
# ruff: noqa
# fmt: off
# mypy: ignore-errors

import sys

import torch
import torch.distributed as dist
from fingerprint import print_weights
from transformers import BertConfig, BertForSequenceClassification

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta


class HookedBert(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, inputs_embeds=None, labels=None):
        outputs = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
                            position_ids=position_ids, inputs_embeds=inputs_embeds, labels=labels, return_dict=False)
        return outputs[0], outputs[1]


def add_common_args(parser):
    parser.add_argument("--module_name", type=str, default="bert")
    parser.add_argument("--task_name", type=str, default="sst2")
    parser.add_argument("--max_seq_length", type=int, default=12)
    parser.add_argument("--max_grad_norm_clip", type=float, default=1.0)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--dense_adam", action="store_true")


def add_run_args(parser):
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--do_train", action="store_true")
    parser.add_argument("--output_dir", type=str, default=None)


def get_inputs(args):
    n, t = args.batch_size, args.max_seq_length
    return {
        "input_ids": samba.randint(50, (n, t), name="input_ids", batch_dim=0),
        "attention_mask": None,
        "token_type_ids": samba.randint(2, (n, t), name="token_type_ids", batch_dim=0),
        "position_ids": None,
        "inputs_embeds": None,
        "labels": samba.randint(2, (n,), name="labels", batch_dim=0),
    }


def train(args, model, traced_outputs):
    rank = dist.get_rank() if dist.is_initialized() else -1
    g = torch.Generator().manual_seed(19)
    for step in range(args.max_steps):
        ids = torch.randint(50, (args.batch_size, args.max_seq_length), generator=g)
        batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "labels": (ids[:, 1] > 24).long()}
        inputs = [samba.SambaTensor(t, name=n, batch_dim=0) for n, t in batch.items()]
        loss, logits = samba.session.run(input_tensors=inputs, output_tensors=traced_outputs, hyperparam_dict={"lr": args.learning_rate},
                                         data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)
        if rank <= 0:
            print("step {} loss {:.4f}".format(step + 1, samba.to_torch(loss).float().mean().item()))
    samba.session.to_cpu(model)
    if args.output_dir and rank <= 0:
        model.bert.save_pretrained(args.output_dir, state_dict={k[5:]: samba.to_torch(v) for k, v in model.state_dict().items()})
    print_weights(model, rank)


def main(argv):
    args = parse_app_args(argv=argv, common_parser_fn=add_common_args, run_parser_fn=add_run_args, test_parser_fn=add_run_args, dev_mode=True)
    utils.set_seed(256)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "eager"
    model = HookedBert(config)
    optimizer = None
    if not args.inference:
        optimizer = samba.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                                      max_grad_norm=args.max_grad_norm_clip)
    samba.from_torch_model_(model)
    inputs = get_inputs(args)
    if args.command == "compile":
        samba.session.compile(model, tuple(inputs.values()), optimizer, name="bert", app_dir=utils.get_file_dir(__file__),
                              config_dict=vars(args), pef_metadata=get_pefmeta(args, model), squeeze_bs_dim=True,
                              io_host_memory=None, is_split_batch=False, graph_transform_hook=None)
        return
    if args.command in ("run", "test"):
        traced_outputs = utils.trace_graph(model, inputs.values(), optimizer, pef=args.pef, mapping=args.mapping,
                                           data_parallel_mode=args.data_parallel_mode, distlearn_config=args.distlearn_config)
        inputs = {k: v for k, v in inputs.items() if v is not None}
        if args.command == "run":
            train(args, model, traced_outputs)
        else:
            gold = model(**inputs)
            outs = samba.session.run(input_tensors=list(inputs.values()), output_tensors=traced_outputs)
            for name, a, b in zip(("loss", "logits"), outs, gold):
                utils.assert_close(a, b, name, threshold=0.05, visualize=args.visualize)
            print("test passed")
    else:
        common_app_driver(args, model, tuple(inputs.values()), optimizer, name="bert")


if __name__ == "__main__":
    main(sys.argv[1:])
