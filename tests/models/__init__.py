"""The model zoo: one small case for each family that compiles and trains.

`CASES` is what tests run over, and `case(name)` gives one of them. The cases from the package `transformers` are there
if it is installed; nothing is downloaded.
"""

# Calling a module gives Any.
# mypy: no-warn-return-any

import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.char_gpt import CharGPT
from tests.models.case import CLASSES, Batch, Case, by_name, evaluate_loss, in_order, integers, numbers, shares
from tests.models.convolutions import Convolutional, Separable, UNet, images, masks, normalized, pictures, resnet

__all__ = ["CASES", "CLASSES", "Batch", "Case", "case", "evaluate_loss"]

FEATURES, ITEMS, BAG = 12, 40, 6
WORDS, LENGTH, WIDTH, HEADS = 30, 8, 16, 2
PADDING = 0


class LogisticRegression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_layer(x)


class Perceptron(nn.Module):
    """Holds a plain tensor attribute, which is in no state_dict, and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, CLASSES)
        self.forgotten = nn.Linear(3, 3)
        self.scale = torch.tensor([0.5, 2.0]).repeat(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) * self.scale)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, FEATURES), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Recommender(nn.Module):
    """The score of an item for a user who is known by a bag of items; subclasses choose how bags are pooled."""

    mode = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ITEMS, 8, mode=self.mode)
        self.item = nn.Embedding(ITEMS, 8)
        self.score = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        user = self.pool(history)
        return self.score(torch.cat((user, self.item(item)), dim=1)).squeeze(1)

    def pool(self, history: Tensor) -> Tensor:
        return self.bag(history)


class SumRecommender(Recommender):
    """Bags lie end to end in one list of items, and offsets say where each begins."""

    mode = "sum"

    def pool(self, history: Tensor) -> Tensor:
        offsets = torch.arange(0, history.numel(), history.shape[1])
        return self.bag(history.flatten(), offsets)


class MaxRecommender(Recommender):
    mode = "max"


class OwnLoss(nn.Module):
    """Returns (loss, outputs…) as SambaFlow's models do, with more outputs than one, of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.hidden(x))
        logits = self.head(hidden)
        return F.cross_entropy(logits, label, label_smoothing=0.1), logits, hidden


_classification = in_order(numbers(FEATURES), integers(CLASSES))
_classification_by_name = by_name(label=integers(CLASSES), x=numbers(FEATURES))
_sequences = in_order(numbers(LENGTH, FEATURES), integers(CLASSES))
_ratings = in_order(integers(ITEMS, BAG), integers(ITEMS), shares())


def _reconstruction(batch_size: int, generator: torch.Generator) -> Batch:
    x = torch.rand(batch_size, FEATURES, generator=generator)
    return x, x


class LSTMClassifier(nn.Module):
    """Words in, a class out. The dropout lies between the two layers, where a trace can lose it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(words))
        return self.head(states[:, -1])


class BidirectionalLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0].mean(dim=1))


class GRUClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(x)
        return self.head(last[-1])


class Encoder(nn.Module):
    """Classifies sentences of different lengths: a mask keeps attention off the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == PADDING
        states = self.encoder(self.embedding(words), src_key_padding_mask=padding)
        return self.head(states.masked_fill(padding.unsqueeze(-1), 0.0).sum(dim=1))


class TiedLanguageModel(nn.Module):
    """The matrix that reads words also writes them: one parameter, two names, one summed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        y, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)
        logits = self.head(x + y)
        return F.cross_entropy(logits.transpose(1, 2), targets), logits


class Translator(nn.Module):
    """Encoder and decoder: `nn.Transformer` with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        states = self.transformer(self.embedding(source), self.embedding(tokens), tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(states)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class VisionTransformer(nn.Module):
    """Patches of a picture as words, and a class token in front."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.1, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.layer(x)[:, 0])


def gpt() -> nn.Module:
    return CharGPT(layers=2, heads=HEADS, width=WIDTH, length=LENGTH)


def _padded_sentences(batch_size: int, generator: torch.Generator) -> Batch:
    words = torch.randint(1, WORDS, (batch_size, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (batch_size, 1), generator=generator)
    return words.masked_fill(torch.arange(LENGTH) >= lengths, PADDING), integers(CLASSES)(batch_size, generator)


def _next_tokens(batch_size: int, generator: torch.Generator) -> Batch:
    text = torch.randint(WORDS, (batch_size, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def _translations(batch_size: int, generator: torch.Generator) -> Batch:
    source = torch.randint(WORDS, (batch_size, LENGTH), generator=generator)
    return source, *_next_tokens(batch_size, generator)


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


CASES: tuple[Case, ...] = (
    Case("logistic_regression", LogisticRegression, _classification, "cross_entropy", "the smallest model"),
    Case(
        "mlp", Perceptron, _classification, "cross_entropy", "a plain tensor attribute and an unused layer",
        unused=("forgotten.weight", "forgotten.bias"),
    ),
    Case("autoencoder", Autoencoder, _reconstruction, "mse", "regression on a tensor as large as the input"),
    Case("embedding_bag_mean", Recommender, _ratings, "mse", "two inputs, both of integers; bags pooled by their mean"),
    Case("embedding_bag_sum", SumRecommender, _ratings, "mse", "bags given by offsets"),
    Case("embedding_bag_max", MaxRecommender, _ratings, "mse", "bags pooled by their maximum"),
    Case("own_loss", OwnLoss, _classification_by_name, None, "(loss, outputs…), inputs bound by name in another order"),
    Case(
        "cnn", Convolutional, images, "cross_entropy", "BatchNorm buffers, dropout, max pooling",
        zero_gradients=("conv.bias",),
    ),
    Case("resnet", resnet, images, "cross_entropy", "shortcuts, strides"),
    Case("unet", UNet, masks, "mse", "bilinear upsampling, concatenation, an in-place ReLU"),
    Case("separable", Separable, pictures, "mse", "depthwise, dilated and transposed convolutions"),
    Case(
        "normalized", normalized, images, "cross_entropy",
        "GroupNorm, InstanceNorm, a lazy layer; a function builds it",
        zero_gradients=("conv2.bias",),
    ),
    Case("lstm", LSTMClassifier, _padded_sentences, "cross_entropy", "dropout between layers must survive capture"),
    Case("lstm_bidirectional", BidirectionalLSTM, _sequences, "cross_entropy", "an LSTM on raw float input"),
    Case(
        "gru", GRUClassifier, _sequences, "cross_entropy", "unrolled over time, and so off by about 1e-8",
        expected="close",
    ),
    Case("transformer_encoder", Encoder, _padded_sentences, "cross_entropy", "a padding mask; the fused layer in eval"),
    Case("gpt", gpt, _next_tokens, None, "causal attention; returns (loss, logits)"),
    Case("tied_language_model", TiedLanguageModel, _next_tokens, None, "tied weights; a buffer in no state_dict"),
    Case("encoder_decoder", Translator, _translations, None, "nn.Transformer: three inputs, cross attention"),
    Case("vit", VisionTransformer, images, "cross_entropy", "bare parameters, a strided convolution as embedding"),
)  # fmt: skip
if importlib.util.find_spec("transformers"):
    CASES += (
        Case(
            "bert", bert, _masked_words, None, "tied weights, an attention mask, labels of -100",
            zero_gradients=tuple(f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(2)),
        ),
        Case("gpt2", gpt2, _text, None, "one tensor as two inputs, tied weights, Conv1D layers"),
    )  # fmt: skip


def case(name: str) -> Case:
    return {one.name: one for one in CASES}[name]
