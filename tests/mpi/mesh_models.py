"""Models and data of `layouts`, beside the examples."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from examples.char_gpt import CharGPT
from examples.sambaflow.bert_model import NOT_MASKED, BertConfig, BertForMaskedLM

WORDS, LENGTH, PREDICTIONS, SAMPLES = 64, 16, 4, 256


def gpt() -> nn.Module:
    """4 layers, with tied embeddings and a fused product for query, key and value."""
    return CharGPT(layers=4, heads=4, width=32, length=32)


def bert(words: int = WORDS) -> nn.Module:
    """4 layers, with tied embeddings and a loss over masked places; no dropout, which draws by stage."""
    return BertForMaskedLM(BertConfig(words, 32, 4, 4, 64, "gelu", 0.0, LENGTH, 0.02, 1e-12))


def bert_of_many_words() -> nn.Module:
    """As `bert`, but its embeddings are as large as all layers: a pipeline updates them on its last rank."""
    return bert(1024)


def masked() -> TensorDataset:
    """Random tokens, the places of those that are hidden, and what they are; the last place is not used."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    places = torch.rand(SAMPLES, LENGTH, generator=generator).argsort(1)[:, :PREDICTIONS]
    hidden = tokens.gather(1, places)
    hidden[:, -1] = NOT_MASKED
    return TensorDataset(tokens, places, hidden)


def mlp() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
    return nn.Sequential(nn.Flatten(), nn.Sequential(*layers, nn.Linear(64, 10)))


class Transposed(nn.Module):
    """Sums a transposed value over the ranks, and multiplies it: a product has other bits for other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 200, bias=False)
        self.rows, self.classes = nn.Linear(8, 51), nn.Linear(51, 10)

    def forward(self, image: Tensor) -> Tensor:
        by_row = self.down(functional.gelu(self.up(image.flatten(0, 1))))
        features = torch.sin(self.rows(functional.gelu(by_row.transpose(1, 2))))
        logits: Tensor = self.classes(features.mean(1))
        return logits
