"""BERT for masked-language modelling, and its configuration: plain PyTorch, which `bert_mlm.py` trains on a device.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", arXiv:1810.04805,
without the second task, which guesses whether one sentence follows the other.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NOT_MASKED = -100
"""The label of a place in `masked_lm_ids` that holds no prediction."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The keys of a `config.json` as BERT's have them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    hidden_dropout_prob: float
    max_position_embeddings: int
    initializer_range: float
    layer_norm_eps: float

    @classmethod
    def from_file(cls, path: str | Path) -> "BertConfig":
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


class BertForMaskedLM(nn.Module):
    """`(input_ids, masked_lm_positions, masked_lm_ids)` to `(loss, scores)`.

    input_ids: int64 `[batch, length]`
    masked_lm_positions: int64 `[batch, predictions]`, the places in input_ids where a token was hidden
    masked_lm_ids: int64 `[batch, predictions]`, the tokens that were there, or NOT_MASKED for a place that is not used

    The loss is the mean over the places that are used; scores are `[batch, predictions, vocabulary]`.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, config.layer_norm_eps
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.embeddings_norm = nn.LayerNorm(width, epsilon)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                config.num_attention_heads,
                config.intermediate_size,
                config.hidden_dropout_prob,
                config.hidden_act,
                epsilon,
                batch_first=True,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, epsilon))
        self.decoder = nn.Linear(width, config.vocab_size)
        self.decoder.weight = self.word_embeddings.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, masked_lm_positions: Tensor, masked_lm_ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.word_embeddings(input_ids) + self.position_embeddings(torch.arange(input_ids.shape[1]))
        hidden = self.dropout(self.embeddings_norm(hidden))
        for layer in self.encoder:
            hidden = layer(hidden)
        places = masked_lm_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        scores = self.decoder(self.transform(hidden.gather(1, places)))
        return F.cross_entropy(scores.flatten(0, 1), masked_lm_ids.flatten(), ignore_index=NOT_MASKED), scores
