"""Text in which words are hidden, as BERT learns from it.

The text is that of Python's own `help("topics")`, which every Python carries in `pydoc_data.topics`: nothing is
downloaded. Tokens are its words, in small letters, and its other characters.
"""

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from bert_model import NOT_MASKED
from torch import Tensor
from torch.utils.data import TensorDataset

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, START, END, MASK = range(len(SPECIAL))
HIDDEN_SHARE = 0.15
"""Of the tokens of a sequence, those that are to be predicted."""


def masked_text(vocabulary: int, length: int, predictions: int, seed: int) -> TensorDataset:
    """The text in sequences of `length` tokens, 15 % of which are masked, and at most `predictions`.

    Sample i is `(input_ids, masked_lm_positions, masked_lm_ids)`, int64 `[length]` and twice `[predictions]`; what is
    hidden is the same for the same seed. Of 10 hidden tokens 8 are [MASK] in input_ids, one is another, one is itself.
    """
    tokens = _tokens(vocabulary).unfold(0, length - 2, length - 2)
    inputs = torch.full((len(tokens), length), START)
    inputs[:, 1:-1], inputs[:, -1] = tokens, END
    generator = torch.Generator().manual_seed(seed)
    hidden = min(predictions, int(HIDDEN_SHARE * length))
    order = torch.rand(tokens.shape, generator=generator).argsort(1)
    places = order[:, :hidden].sort(1).values + 1
    positions = torch.zeros(len(tokens), predictions, dtype=torch.int64)
    labels = torch.full((len(tokens), predictions), NOT_MASKED)
    positions[:, :hidden], labels[:, :hidden] = places, inputs.gather(1, places)
    inputs.scatter_(1, places, _disguised(labels[:, :hidden], vocabulary, generator))
    return TensorDataset(inputs, positions, labels)


def _tokens(vocabulary: int) -> Tensor:
    """The whole text; tokens beyond the `vocabulary` most frequent are UNKNOWN."""
    words = [word for name in sorted(topics) for word in re.findall(r"\w+|[^\w\s]", topics[name].lower())]
    frequent = [word for word, _ in Counter(words).most_common(vocabulary - len(SPECIAL))]
    numbers = {word: number for number, word in enumerate(frequent, start=len(SPECIAL))}
    return torch.tensor([numbers.get(word, UNKNOWN) for word in words])


def _disguised(hidden: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """What stands in the text instead of the hidden tokens."""
    chance = torch.rand(hidden.shape, generator=generator)
    others = torch.randint(len(SPECIAL), vocabulary, hidden.shape, generator=generator)
    return torch.where(chance < 0.8, MASK, torch.where(chance < 0.9, others, hidden))
