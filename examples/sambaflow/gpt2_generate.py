"""A SambaFlow app: text from a Hugging Face folder of `gpt2_convert.py`, by two graphs that share a cache.

    python -m sambasim examples/sambaflow/gpt2_generate.py compile --inference --pef-name gpt2_generate
    python -m sambasim examples/sambaflow/gpt2_generate.py run --inference --model gpt2_hf --prompt "The " \\
        --pef gpt2_generate

The graph `prompt` reads the whole prompt, and the graph `token` one character at a time. Both are in one PEF, with one
set of weights. Keys and values of the characters so far are in two regions of the device, which both graphs write.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

import torch
from gpt2_model import HEADS, LAYERS, LENGTH, WIDTH, CachedGPT2, load_pretrained
from gpt_model import ALPHABET
from sambaflow import samba
from sambaflow.samba import utils
from sambaflow.samba.graph import FwdGraph
from sambaflow.samba.utils.argparser import parse_app_args

CACHE = ("keys", "values")


def add_run_args(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="A Hugging Face folder.")
    parser.add_argument("--prompt", default="The ")


def inputs_of(tokens: list[int], place: int) -> list[samba.SambaTensor]:
    """The inputs of a run but the cache: tokens, and the place of the last one in the text."""
    named = {"tokens": torch.tensor([tokens]), "place": torch.tensor([[place]])}
    return [samba.from_torch_tensor(tensor, name=name, batch_dim=0) for name, tensor in named.items()]


def add_graphs(model: CachedGPT2) -> None:
    """Adds both graphs to the session. An output has the region of the input that it is in the next run."""
    shape = 1, LAYERS, HEADS, LENGTH, WIDTH // HEADS
    cache = [samba.zeros(*shape, name=name, batch_dim=0, region_name=name) for name in CACHE]
    for name, length in (("prompt", LENGTH), ("token", 1)):
        inputs = inputs_of([*range(length)], length - 1) + (cache if name == "token" else [])
        logits, *written = model(*inputs)
        for output, region in zip(written, CACHE, strict=True):
            output.sn_region_name = region
        samba.session.add_graph(FwdGraph(inputs, (logits, *written), name))


def generate(prompt: str) -> str:
    """The prompt and what follows it, up to LENGTH characters: always the most likely one."""
    tokens = [ALPHABET.index(character) for character in prompt]
    filled = tokens + [0] * (LENGTH - len(tokens))
    logits, *_ = samba.session.run(input_tensors=inputs_of(filled, len(tokens) - 1), graph_name="prompt")
    while len(tokens) < LENGTH:
        tokens.append(int(samba.to_torch(logits).argmax()))
        here = inputs_of(tokens[-1:], len(tokens) - 1)
        logits, *_ = samba.session.run(input_tensors=here, graph_name="token")
    return "".join(ALPHABET[token] for token in tokens)


def main(argv: list[str]) -> None:
    args = parse_app_args(argv=argv, run_parser_fn=add_run_args)
    if args.command == "run" and not (0 < len(args.prompt) <= LENGTH and set(args.prompt) <= set(ALPHABET)):
        sys.exit(f"--prompt takes 1 to {LENGTH} characters of {ALPHABET!r}")
    utils.set_seed(256)
    model = CachedGPT2()
    if args.command == "run":
        load_pretrained(model, Path(args.model))
    samba.from_torch_model_(model)
    add_graphs(model)
    if args.command == "run":
        samba.session.init_multigraph_runtime(args.pef)
        print(f"text: {generate(args.prompt)!r}")
    else:
        samba.session.compile_multigraph(name="gpt2_generate", config_dict=vars(args), inference=True)


if __name__ == "__main__":
    main(sys.argv[1:])
