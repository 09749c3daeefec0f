"""Families of the `transformers` package, built from a configuration: nothing is downloaded.

The package is an extra of the tests; without it this module has no cases, and nothing else needs to know.
"""

# Calling a module gives Any.
# mypy: no-warn-return-any

import importlib.util

import torch
from torch import nn

from tests.models.case import Batch, Case

WORDS, LENGTH, WIDTH = 40, 8, 16


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    tokens = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM", **tokens, **sizes))


def _masked_words(batch_size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(1, WORDS, (batch_size, LENGTH), generator=generator)
    hidden = torch.rand(batch_size, LENGTH, generator=generator) < 0.3
    hidden[:, 1] = True
    lengths = torch.randint(2, LENGTH + 1, (batch_size, 1), generator=generator)
    return {
        "input_ids": labels.masked_fill(hidden, 0),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "labels": labels.masked_fill(~hidden, -100),
    }


def _text(batch_size: int, generator: torch.Generator) -> Batch:
    text = torch.randint(WORDS, (batch_size, LENGTH), generator=generator)
    return {"input_ids": text, "labels": text}


CASES: tuple[Case, ...] = ()
if importlib.util.find_spec("transformers"):
    CASES = (
        Case(
            "bert", bert, _masked_words, None, "tied weights, an attention mask, labels of -100",
            zero_gradients=tuple(f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(2)),
        ),
        Case("gpt2", gpt2, _text, None, "one tensor as two inputs, tied weights, Conv1D layers"),
    )  # fmt: skip
