"""What the benchmarks train. Nothing here imports sambasim: any version of it can compile these models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad
from torch.utils.data import Dataset, TensorDataset

from examples.char_gpt import ALPHABET, CharGPT

SAMPLES = 4096
GPT2_BATCH, GPT2_LENGTH = 2, 128


class Way(StrEnum):
    PLAIN = "sambasim"
    HOST = "sambasim, host sync"
    WIRE = "sambasim, wire bf16"
    INDUCTOR = "sambasim, inductor"
    DDP = "DDP"
    """Without it where there is one replica: eager PyTorch."""

    DDP_COMPILED = "DDP, compiled and fused"
    DDP_FUSED = "DDP, fused"
    DDP_BF16 = "DDP, fused, gradients in bf16"
    ALONE = "forward and backward alone"
    """In eager PyTorch, with nothing to sync and no optimizer."""

    BFLOAT16 = "model.bfloat16()"
    AUTOCAST = "autocast"
    """Both in eager PyTorch, with its fused optimizer."""


class ParallelWay(StrEnum):
    OURS = "sambasim"
    PIPELINING = "torch.distributed.pipelining"
    DTENSOR = "DTensor"
    FSDP2 = "FSDP2"
    GLOO = "gloo"
    """Nothing but the communications of a PEF, by gloo."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model that returns its loss first, its samples, and how it is trained: in `ways`, `steps` in each round."""

    name: str
    model: Callable[[], nn.Module]
    samples: Callable[[], Dataset[tuple[Tensor, ...]]]
    batch_size: int
    optimizer: Literal["sgd", "adamw"]
    learning_rate: float
    steps: int
    ways: Sequence[Way] = (Way.PLAIN, Way.DDP)


class Classifier(nn.Module):
    """Layers, and the loss of what they give."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(x)
        return F.cross_entropy(logits, target), logits


def wide_mlp() -> nn.Module:
    """Four layers of 2048: 16.8 million parameters, of which a batch of 8 makes little work and much to sync."""
    return Classifier(*(layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())))


def logistic_regression() -> nn.Module:
    return Classifier(nn.Linear(784, 10))


class SplitBlock(nn.Module):
    """A block of GPT with layers of their own for query, key and value, as DTensor can cut them. `heads`: of a rank."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.size))
        changed: Tensor = x + self.mlp(self.norm2(x))
        return changed


class Embeddings(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(ALPHABET), width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return embedded


class SplitGPT(nn.Module):
    """6 layers of width 384 over 128 characters, whose head is not tied: every kind of parallelism here can cut it."""

    def __init__(self, layers: int = 6, heads: int = 6, width: int = 384, length: int = 128) -> None:
        super().__init__()
        self.first = Embeddings(length, width)
        self.layers = [SplitBlock(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(self.layers)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET), bias=False))

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.last(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class Gpt2Small(nn.Module):
    """GPT-2 small, 124 million parameters: `(input_ids, labels) -> (loss, logits)`."""

    def __init__(self, words: int = 50257) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # slow to import

        self.gpt = GPT2LMHeadModel(GPT2Config(use_cache=False, vocab_size=words))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = self.gpt(input_ids=input_ids, labels=labels)
        return result.loss, result.logits


def gpt2_of_64_words() -> nn.Module:
    """GPT-2 small with its vocabulary padded to a multiple of 64, as Megatron-LM does to cut it."""
    return Gpt2Small(50304)


def eight_layers() -> nn.Module:
    """As many layers on each of four stages: the idle shares of schedules are for equal stages."""
    return SplitGPT(layers=8)


def two_layers() -> nn.Module:
    return SplitGPT(layers=2)


def gpt() -> nn.Module:
    """6 layers of width 384 over 128 characters: 10.7 million parameters."""
    return CharGPT(layers=6, heads=6, width=384, length=128)


def small_gpt() -> nn.Module:
    """The same in width 192: 2.7 million parameters."""
    return CharGPT(layers=6, heads=6, width=192, length=128)


def text() -> Dataset[tuple[Tensor, ...]]:
    """Random characters `[128]`, and those that come next."""
    tokens = torch.randint(len(ALPHABET), (SAMPLES, 129), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


LENGTHS = 32, 64, 128


def texts_of_lengths() -> Dataset[tuple[Tensor, ...]]:
    """As many texts of each of `LENGTHS`."""
    return _Texts()


def padded_texts() -> Dataset[tuple[Tensor, ...]]:
    """The same, padded to the longest."""
    texts, longest = _Texts(), LENGTHS[-1]
    rows = [[pad(part, (0, longest - len(part))) for part in texts[index]] for index in range(len(texts))]
    return TensorDataset(*(torch.stack(column) for column in zip(*rows, strict=True)))


class _Texts(Dataset[tuple[Tensor, ...]]):
    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        size = LENGTHS[index % len(LENGTHS)] + 1
        text = torch.randint(len(ALPHABET), (size,), generator=torch.Generator().manual_seed(index))
        return text[:-1], text[1:]


class Pictures(Dataset[tuple[Tensor, int]]):
    """Each is changed at random when it is read."""

    def __init__(self) -> None:
        self._pictures = torch.rand(2048, 3, 32, 32, generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self._pictures[index]
        return picture.flip(2) if torch.rand(()) < 0.5 else picture + 0.1 * torch.randn(()), index % 10


def vectors(features: int, classes: int) -> Dataset[tuple[Tensor, ...]]:
    """Random `[features]`, with a random class each."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, features, generator=generator)
    return TensorDataset(x, torch.randint(classes, (SAMPLES,), generator=generator))


def wide_vectors() -> Dataset[tuple[Tensor, ...]]:
    return vectors(2048, 2048)


def images() -> Dataset[tuple[Tensor, ...]]:
    return vectors(784, 10)


def tokens() -> Dataset[tuple[Tensor, ...]]:
    """Random tokens for GPT-2, twice: they are their own labels."""
    sequences = torch.randint(50257, (64, GPT2_LENGTH), generator=torch.Generator().manual_seed(3))
    return TensorDataset(sequences, sequences)


_IN_FLOAT32 = (Way.PLAIN, Way.INDUCTOR, Way.DDP, Way.DDP_COMPILED, Way.ALONE)
WORKLOADS = (
    Workload("gpt", gpt, text, 2, "adamw", 1e-4, 20, _IN_FLOAT32),
    Workload("mlp", wide_mlp, wide_vectors, 8, "adamw", 1e-4, 20),
    Workload("logistic_regression", logistic_regression, images, 1, "sgd", 0.01, 2000),
)
SMALL_GPT = Workload("small_gpt", small_gpt, text, 2, "adamw", 1e-4, 20)
GPT2_PADDED = Workload("gpt2_padded", gpt2_of_64_words, tokens, 1, "adamw", 1e-4, 3)
EIGHT_LAYERS = Workload("eight_layers", eight_layers, text, 2, "adamw", 1e-4, 10)
SPLIT_GPT = Workload("split_gpt", SplitGPT, text, 2, "adamw", 1e-4, 10)
PIPELINED_MICRO_BATCHES = 8
GPT2_SMALL = Workload("gpt2_small", Gpt2Small, tokens, GPT2_BATCH, "adamw", 1e-4, 3)
