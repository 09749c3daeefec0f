"""The cases of `tests/parity/test_families.py`: some of the zoo, and what it lacks. Those of the package `transformers`
are there if it is installed."""

# Calling a module, or what one holds, gives Any.
# mypy: no-warn-return-any, disable-error-code="operator"

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import ENTRIES
from tests.zoo.case import Batch, Case, by_name, integers, numbers, shares
from tests.zoo.own_data import CLASSES, FEATURES, ITEMS, LENGTH, WIDTH, Model, TwoLayers

PADDING = 0


class Perceptron(TwoLayers):
    """Returns (loss, outputs…) as SambaFlow's models do, with more outputs than one, of different shapes. It holds a
    plain tensor attribute, which is in no state_dict, and a layer that nothing calls."""

    def make(self) -> None:
        super().make()
        self.forgotten = nn.Linear(3, 3)
        self.scale = torch.tensor([0.5, 2.0]).repeat(WIDTH // 2)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.first(x)) * self.scale
        logits = self.second(hidden)
        return F.cross_entropy(logits, label, label_smoothing=0.1), logits, hidden


class Recommender(Model):
    """Bags of items, pooled by their mean, by their maximum, and by their sum: then they lie end to end in one list,
    and offsets say where each begins."""

    def make(self) -> None:
        self.mean, self.largest, self.total = (nn.EmbeddingBag(ITEMS, 8, mode=mode) for mode in ("mean", "max", "sum"))
        self.score = nn.Linear(24, 1)

    def forward(self, history: Tensor) -> Tensor:
        offsets = torch.arange(0, history.numel(), history.shape[1])
        pooled = self.mean(history), self.largest(history), self.total(history.flatten(), offsets)
        return self.score(torch.cat(pooled, dim=1)).squeeze(1)


class Convolutional(Model):
    """Convolutions: depthwise, dilated, transposed and in one dimension. Normalizations with the statistics of one
    sample. What goes down by pooling comes up by bilinear interpolation."""

    def make(self) -> None:
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.transposed = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.along = nn.Conv1d(20, 4, 5, stride=2)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        fine = F.leaky_relu(self.group(self.first(image)), 0.1)
        coarse = self.dilated(F.silu(self.depthwise(fine)) + F.avg_pool2d(fine, 2))
        coarse = F.relu(self.instance(coarse), inplace=True)
        joined = torch.cat((fine, self.up(coarse), F.hardswish(self.transposed(coarse))), dim=1)
        return self.head(F.adaptive_max_pool1d(self.along(joined.flatten(2)), 6).flatten(1))


class LSTMClassifier(Model):
    """Words in, a class out. The dropout lies between the two layers, where a trace can lose it."""

    def make(self) -> None:
        self.embedding = nn.Embedding(ITEMS, 8)
        self.head = nn.Linear(20, CLASSES)
        self.lstm = nn.LSTM(8, 10, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0].mean(dim=1))


class GRUClassifier(nn.Module):
    """Eager adds and squashes the gates in place, in rows as long as the hidden size; the functional graph does it in
    one long row. They round alike except at the end of a row, what is left over after pairs of whole vectors: of a
    hidden size of 64 nothing, on any CPU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, hidden, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[1][-1])


class Encoder(Model):
    """Classifies sentences of different lengths: a mask keeps attention off the padding."""

    def make(self) -> None:
        self.embedding, self.head = nn.Embedding(ITEMS, WIDTH, padding_idx=PADDING), nn.Linear(WIDTH, CLASSES)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == PADDING
        states = self.encoder(self.embedding(words), src_key_padding_mask=padding)
        return self.head(states.masked_fill(padding.unsqueeze(-1), 0.0).sum(dim=1))


class Translator(Model):
    """Encoder and decoder with cross attention, and a causal mask."""

    def make(self) -> None:
        self.embedding, self.head = nn.Embedding(ITEMS, WIDTH), nn.Linear(WIDTH, ITEMS)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        states = self.transformer(self.embedding(source), self.embedding(tokens), tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(states)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def autoencoder() -> nn.Module:
    """A lazy layer takes its shape from the first batch that it sees."""
    encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.LazyLinear(3))
    model = nn.Sequential(encoder, nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, FEATURES), nn.Sigmoid()))
    model(torch.zeros(1, FEATURES))
    return model


def _reconstruction(samples: int, generator: torch.Generator) -> Batch:
    x = shares(FEATURES)(samples, generator)
    return {"input": x, "target": x}


def _translations(samples: int, generator: torch.Generator) -> Batch:
    source, text = (integers(ITEMS, length)(samples, generator) for length in (LENGTH, LENGTH + 1))
    return {"source": source, "tokens": text[:, :-1], "targets": text[:, 1:]}


def _padded_sentences(samples: int, generator: torch.Generator) -> Batch:
    words = torch.randint(1, ITEMS, (samples, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)
    padded = words.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)
    return {"words": padded, "target": integers(CLASSES)(samples, generator)}


def _masked_words(samples: int, generator: torch.Generator) -> Batch:
    """All with padding: a sample without takes another branch of the model."""
    labels = torch.randint(1, ITEMS, (samples, LENGTH), generator=generator)
    hidden = torch.rand(samples, LENGTH, generator=generator) < 0.3
    hidden[:, 1] = True
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH, (samples, 1), generator=generator)
    words = labels.masked_fill(hidden, 0)
    return {"input_ids": words, "attention_mask": mask.long(), "labels": labels.masked_fill(~hidden, -100)}


_CLASS, _ENTROPY = integers(CLASSES), "cross_entropy"
_by_another_order = by_name(label=_CLASS, x=numbers(FEATURES))
_steps = by_name(x=numbers(LENGTH, FEATURES), target=_CLASS)
_bags = by_name(history=integers(ITEMS, 6), target=shares())


_CASES = (
    Case("perceptron", Perceptron, _by_another_order, unused=("forgotten.weight", "forgotten.bias")),
    Case("autoencoder", autoencoder, _reconstruction, "mse"),
    Case("recommender", Recommender, _bags, "mse"),
    Case("convolutional", Convolutional, by_name(image=shares(1, 8, 8), target=_CLASS), _ENTROPY),
    Case("lstm", LSTMClassifier, _padded_sentences, _ENTROPY),
    Case("gru", partial(GRUClassifier, 8), _steps, _ENTROPY, expected="close"),
    Case("wide_gru", partial(GRUClassifier, 64), _steps, _ENTROPY),
    Case("encoder", Encoder, _padded_sentences, _ENTROPY),
    Case("translator", Translator, _translations),
    *(ENTRIES[name] for name in ("NeuralField", "gpt2", "resnet", "vit")),
    replace(ENTRIES["t5"], make_batch=ENTRIES["gpt2"].make_batch),  # a sample without padding takes another branch
    replace(ENTRIES["bert"], make_batch=_masked_words),
)  # fmt: skip
CASES: Mapping[str, Case] = {one.name: one for one in _CASES if one.package != "transformers" or find_spec(one.package)}
