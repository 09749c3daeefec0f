"""A SambaFlow app: text from a Hugging Face folder of `gpt2_convert.py`, a character a run, with a cache.

    python -m sambasim examples/sambaflow/gpt2_generate.py compile --inference --pef-name gpt2_generate
    python -m sambasim examples/sambaflow/gpt2_generate.py run --inference --model gpt2_hf --prompt "The " \\
        --pef gpt2_generate

Keys and values of the characters so far are outputs of one run and inputs of the next: each run computes one character
alone. They go through the host, as a PEF holds one graph.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

import torch
from gpt2_model import HEADS, LAYERS, LENGTH, WIDTH, CachedGPT2, load_pretrained
from gpt_model import ALPHABET
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.utils.argparser import parse_app_args

NAMES = ("token", "place", "keys", "values")


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="A Hugging Face folder.")
    parser.add_argument("--prompt", default="The ")


def step_inputs(*tensors: torch.Tensor) -> list[samba.SambaTensor]:
    """The inputs of a run, in the order of NAMES."""
    named = zip(NAMES, tensors, strict=True)
    return [samba.from_torch_tensor(tensor, name=name, batch_dim=0) for name, tensor in named]


def generate(prompt: str) -> str:
    """The prompt and what follows it, up to LENGTH characters: always the most likely one."""
    tokens = [ALPHABET.index(character) for character in prompt]
    keys = values = torch.zeros(1, LAYERS, HEADS, LENGTH, WIDTH // HEADS)
    for place in range(LENGTH - 1):
        here = step_inputs(torch.tensor([[tokens[place]]]), torch.tensor([[place]]), keys, values)
        logits, keys, values = map(samba.to_torch, samba.session.run(here, section_types=["FWD"]))
        if place + 1 == len(tokens):
            tokens.append(int(logits.argmax()))
    return "".join(ALPHABET[token] for token in tokens)


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, run_parser_fn=add_run_args)
    utils.set_seed(256)
    model = CachedGPT2()
    if args.command == "run":
        load_pretrained(model, Path(args.model))
    samba.from_torch_model_(model)
    nothing, cache = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, LAYERS, HEADS, LENGTH, WIDTH // HEADS)
    inputs = step_inputs(nothing, nothing, cache, cache)
    if args.command == "run":
        utils.trace_graph(model, inputs, pef=args.pef, mapping=args.mapping)
        print(f"text: {generate(args.prompt)!r}")
    else:
        samba.session.compile(model, inputs, name="gpt2_generate", config_dict=vars(args), inference=True)


if __name__ == "__main__":
    main(sys.argv[1:])
