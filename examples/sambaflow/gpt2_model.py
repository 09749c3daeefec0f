"""A small GPT-2 in plain PyTorch, with the names that Hugging Face gives its parameters, and its folder of files there.

The apps `gpt2_train.py` and `gpt2_generate.py` use it. Its text and alphabet are those of `gpt_model.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from gpt_model import ALPHABET
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH, LAYERS, HEADS, WIDTH = 32, 2, 2, 64
CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "vocab_size": len(ALPHABET),
    "n_positions": LENGTH,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""What is in config.json."""

KEPT_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Hugging Face has these as `[in, out]`, and nn.Linear as `[out, in]`."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values of `x`, which is `[batch, length, WIDTH]`: each `[batch, HEADS, length, …]`."""
        batch, length, _ = x.shape
        return [one.view(batch, length, HEADS, -1).transpose(1, 2) for one in self.c_attn(x).split(WIDTH, dim=2)]

    def joined(self, read: Tensor) -> Tensor:
        return self.c_proj(read.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def after_attention(self, x: Tensor) -> Tensor:
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """`(tokens, targets)`, both int64 `[batch, length]`, to `(loss, logits)`: a mean, and `[batch, length, 96]`."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(len(ALPHABET), WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(LAYERS)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        for name in ("wte", "wpe"):
            nn.init.normal_(self.transformer[name].weight, std=0.02)
        self.lm_head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def logits(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            read = F.scaled_dot_product_attention(*block.attn.heads(block.ln_1(x)), is_causal=True)
            x = block.after_attention(x + block.attn.joined(read))
        return self.lm_head(parts["ln_f"](x))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class CachedGPT2(GPT2):
    """The whole text, or one character after those of which the cache has keys and values.

    `(tokens, place, keys, values)`: int64 `[batch, LENGTH]` without a cache, or `[batch, 1]`; int64 `[batch, 1]`, the
    place of the last character; two `[batch, LAYERS, HEADS, LENGTH, WIDTH // HEADS]`, or None; to `(logits, keys,
    values)`: `[batch, 96]` of the last character, and the cache with keys and values of these characters. What is
    behind the last one is read by none, and replaced later.
    """

    def forward(
        self, tokens: Tensor, place: Tensor, keys: Tensor | None = None, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts, places = self.transformer, torch.arange(LENGTH)
        here, so_far = (places == place)[:, None, :, None], (places <= place)[:, None, None, :]
        x = parts["wte"](tokens) + parts["wpe"](places if keys is None else place)
        new_keys, new_values = [], []
        for layer, block in enumerate(parts["h"]):
            query, key, value = block.attn.heads(block.ln_1(x))
            if keys is not None and values is not None:
                key = torch.where(here, key, keys[:, layer])
                value = torch.where(here, value, values[:, layer])
                read = F.scaled_dot_product_attention(query, key, value, attn_mask=so_far)
            else:
                read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = block.after_attention(x + block.attn.joined(read))
            new_keys.append(key)
            new_values.append(value)
        if keys is None:
            x = x.gather(1, place[:, :, None].expand(-1, -1, WIDTH))
        return self.lm_head(parts["ln_f"](x))[:, 0], torch.stack(new_keys, 1), torch.stack(new_values, 1)


def _transposed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (one.T if name.endswith(KEPT_TRANSPOSED) else one).contiguous() for name, one in weights.items()}


def save_pretrained(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes what `transformers.GPT2LMHeadModel.from_pretrained(folder)` reads, of the `state_dict` of a GPT2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    untied = {name: one for name, one in weights.items() if name != "lm_head.weight"}  # it is that of wte
    save_file(_transposed(untied), folder / "model.safetensors", metadata={"format": "pt"})


def load_pretrained(model: GPT2, folder: Path) -> None:
    """Copies the weights of such a folder into `model`."""
    weights = _transposed(load_file(folder / "model.safetensors"))
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
