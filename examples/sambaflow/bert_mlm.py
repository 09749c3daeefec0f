"""A SambaFlow app: a small BERT for masked-language modelling, with the options of the vendor's data parallel example.

    python -m sambasim examples/sambaflow/bert_mlm.py compile --max_seq_length 64 -b 16 --max_predictions_per_seq 12 \\
        --data-parallel -ws 2 --pef-name bert_mlm
    mpirun -np 2 python -m sambasim examples/sambaflow/bert_mlm.py run --max_seq_length 64 -b 16 \\
        --max_predictions_per_seq 12 --warmup_steps 20 --learning_rate 0.002 --logging_steps 20 --save_steps 100 \\
        --max_steps 400 --steps_this_run 200 --data-parallel --reduce-on-rdu -p out/bert_mlm/bert_mlm.pef

The first run takes 200 steps and leaves a checkpoint in --output_dir; the same command once more takes the other 200
from there. The loss falls from 6.9 to 4.1 nats a hidden token. The model is in `bert_model.py`, the text in
`bert_data.py`.
"""

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from bert_data import masked_text
from bert_model import BertConfig, BertForMaskedLM
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

INPUTS = ["input_ids", "masked_lm_positions", "masked_lm_ids"]
Inputs = Sequence[samba.SambaTensor]
Optimizers = list[samba.optim.AdamW]


def add_user_args(parser: ArgumentParser) -> None:
    """Compile takes the options of run too, so that one list of them does for both."""
    folder = Path(utils.get_file_dir(__file__))
    parser.add_argument("--config_name", default=str(folder / "bert_tiny.json"), help="The model, a config.json.")
    parser.add_argument("--max_seq_length", type=int, default=64)
    parser.add_argument("-b", "--batch_size", "--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--max_predictions_per_seq", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--adam_beta2", type=float, default=0.98)
    parser.add_argument("--max_grad_norm_clip", type=float, default=1.0)
    parser.add_argument("--max_steps", type=int, default=200, help="Steps of the whole training.")
    parser.add_argument("--steps_this_run", type=int, default=-1, help="Steps until this run ends; -1 for all.")
    parser.add_argument("--logging_steps", type=int, default=20)
    parser.add_argument("--save_steps", type=int, default=-1, help="Steps between checkpoints; -1 for one at the end.")
    parser.add_argument("--skip_checkpoint", action="store_true", help="Write no checkpoint.")
    parser.add_argument("--output_dir", default="bert_output", help="Folder of the checkpoint, read and written.")
    parser.add_argument("--overwrite_output_dir", action="store_true", help="Ignore a checkpoint that is there.")
    parser.add_argument("--seed", type=int, default=42)


def get_optimizers(args: Namespace, model: BertForMaskedLM) -> Optimizers:
    """One with weight decay, and one without for biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [
        samba.optim.AdamW(
            parameters,
            lr=args.learning_rate,
            betas=(0.9, args.adam_beta2),
            eps=1e-6,
            weight_decay=decay,
            max_grad_norm=args.max_grad_norm_clip,
        )
        for parameters, decay in ((matrices, args.weight_decay), (vectors, 0.0))
    ]


def learning_rate(args: Namespace, step: int) -> float:
    """Of step `step`, which counts from 0: up for --warmup_steps, then down to nothing after --max_steps."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    return args.learning_rate * (args.max_steps - step) / (args.max_steps - args.warmup_steps)


def batches(args: Namespace, config: BertConfig, rank: int, replicas: int, taken: int) -> Iterator[Inputs]:
    """This replica's share of the text, epoch after epoch, without the first `taken` batches."""
    text = masked_text(config.vocab_size, args.max_seq_length, args.max_predictions_per_seq, args.seed)
    sampler = DistributedSampler(text, replicas, rank)
    loader = DataLoader(text, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    epochs, rest = divmod(taken, len(loader))
    for epoch in count(epochs):
        sampler.set_epoch(epoch)
        yield from islice(samba.SambaLoader(loader, INPUTS), rest, None)
        rest = 0


def checkpoint_file(args: Namespace) -> Path:
    return Path(args.output_dir, "checkpoint.pt")


def save_checkpoint(args: Namespace, model: BertForMaskedLM, optimizers: Optimizers, step: int) -> None:
    samba.session.to_cpu(model)
    state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers], "step": step}
    checkpoint_file(args).parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, checkpoint_file(args))


def load_checkpoint(args: Namespace, model: BertForMaskedLM, optimizers: Optimizers) -> int:
    """The steps that earlier runs have taken."""
    if args.overwrite_output_dir or not checkpoint_file(args).exists():
        return 0
    state = torch.load(checkpoint_file(args))
    model.load_state_dict(state["model"])
    for optimizer, of_optimizer in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(of_optimizer)
    return state["step"]


def train(args: Namespace, config: BertConfig, model: BertForMaskedLM, optimizers: Optimizers, done: int) -> None:
    rank, replicas = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = batches(args, config, rank, replicas, done)
    last = args.max_steps if args.steps_this_run < 0 else min(args.max_steps, done + args.steps_this_run)
    losses = []
    for step, batch in zip(range(done, last), data, strict=False):
        # For dropout: a run that goes on from a checkpoint draws what one long run would.
        torch.manual_seed(args.seed + step * replicas + rank)
        loss, _ = samba.session.run(
            input_tensors=batch,
            output_tensors=model.output_tensors,
            hyperparam_dict={"lr": learning_rate(args, step)},
            data_parallel=args.data_parallel,
            reduce_on_rdu=args.reduce_on_rdu,
        )
        losses.append(loss.mean().item())
        if rank > 0:
            continue
        if (step + 1) % args.logging_steps == 0:
            recent = losses[-args.logging_steps :]
            print(f"step {step + 1}: loss {math.fsum(recent) / len(recent):.4f}", flush=True)
        due = step + 1 == last or (args.save_steps > 0 and (step + 1) % args.save_steps == 0)
        if due and not args.skip_checkpoint:
            save_checkpoint(args, model, optimizers, step + 1)
            print(f"step {step + 1}: checkpoint in {args.output_dir}", flush=True)


def test(args: Namespace, model: BertForMaskedLM, inputs: Inputs) -> None:
    """What the device computes, against what PyTorch does on the host."""
    torch.manual_seed(args.seed)  # both draw the same dropout
    loss, scores = samba.session.run(inputs, model.output_tensors, section_types=["FWD", "BCKWD"])
    torch.manual_seed(args.seed)
    gold_loss, gold_scores = model(*map(samba.to_torch, inputs))
    gold_loss.backward()
    utils.assert_close(loss, gold_loss, "loss", threshold=3e-3)
    near = 1e-2 if scores.dtype is torch.bfloat16 else 3e-3  # in bf16, layers round one after another
    utils.assert_close(scores, gold_scores, "scores", threshold=near)
    for name, parameter in model.named_parameters():
        (gradient,) = samba.session.get_tensors_by_name([f"{parameter.sn_name}__grad"])
        utils.assert_close(gradient, parameter.grad, f"gradient of {name}", threshold=3e-3)
    print("device and host agree")


def get_inputs(args: Namespace, config: BertConfig) -> Inputs:
    length, predictions = args.max_seq_length, args.max_predictions_per_seq
    shapes = [(config.vocab_size, length), (length, predictions), (config.vocab_size, predictions)]
    return tuple(
        samba.randint(high, (args.batch_size, places), name=name, batch_dim=0)
        for name, (high, places) in zip(INPUTS, shapes, strict=True)
    )


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, common_parser_fn=add_user_args)
    utils.set_seed(args.seed)
    config = BertConfig.from_file(args.config_name)
    model = BertForMaskedLM(config)
    samba.from_torch_model_(model)
    inputs, optimizers = get_inputs(args, config), get_optimizers(args, model)
    if args.command == "run":
        done = load_checkpoint(args, model, optimizers)
        utils.trace_graph(model, inputs, optimizers, pef=args.pef, mapping=args.mapping)
        train(args, config, model, optimizers, done)
    elif args.command == "test":
        utils.trace_graph(model, inputs, optimizers, pef=args.pef, mapping=args.mapping)
        test(args, model, inputs)
    else:
        common_app_driver(args, model, inputs, optimizers, name="bert_mlm", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main(sys.argv[1:])
