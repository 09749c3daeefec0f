"""Families made of attention."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.case import Batch, Case

WORDS, LENGTH, WIDTH, HEADS, CLASSES = 30, 8, 16, 2, 5
PADDING = 0


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


class CausalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(samples, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A GPT: predicts every next token and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(CausalBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


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


def _padded_sentences(batch_size: int, generator: torch.Generator) -> Batch:
    words = torch.randint(1, WORDS, (batch_size, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (batch_size, 1), generator=generator)
    return (
        words.masked_fill(torch.arange(LENGTH) >= lengths, PADDING),
        torch.randint(CLASSES, (batch_size,), generator=generator),
    )


def _next_tokens(batch_size: int, generator: torch.Generator) -> Batch:
    text = torch.randint(WORDS, (batch_size, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def _translations(batch_size: int, generator: torch.Generator) -> Batch:
    source = torch.randint(WORDS, (batch_size, LENGTH), generator=generator)
    return source, *_next_tokens(batch_size, generator)


def _images(batch_size: int, generator: torch.Generator) -> Batch:
    return (
        torch.rand(batch_size, 1, 8, 8, generator=generator),
        torch.randint(CLASSES, (batch_size,), generator=generator),
    )


CASES = (
    Case("transformer_encoder", Encoder, _padded_sentences, "cross_entropy", "a padding mask; the fused layer in eval"),
    Case("gpt", Decoder, _next_tokens, None, "causal attention; returns (loss, logits)"),
    Case("tied_language_model", TiedLanguageModel, _next_tokens, None, "tied weights; a buffer in no state_dict"),
    Case("encoder_decoder", Translator, _translations, None, "nn.Transformer: three inputs, cross attention"),
    Case("vit", VisionTransformer, _images, "cross_entropy", "bare parameters, a strided convolution as embedding"),
)
