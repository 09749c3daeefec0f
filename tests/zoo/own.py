"""Models of many kinds, as people write them by hand: what no package has."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo import own_data as data
from tests.zoo import own_others as others
from tests.zoo import own_sequences as sequences
from tests.zoo.entry import Batch, Entry, Outcome

FEATURES, CLASSES, ITEMS, LENGTH, WIDTH = 12, 5, 40, 8, 16

Make = Callable[[int, torch.Generator], Tensor]


def _numbers(*shape: int) -> Make:
    return lambda samples, generator: torch.randn(samples, *shape, generator=generator)


def _integers(below: int, *shape: int) -> Make:
    return lambda samples, generator: torch.randint(below, (samples, *shape), generator=generator)


def _entry(kind: type[nn.Module], loss: str | None = None, expected: Outcome = "exact", **inputs: Make) -> Entry:
    def make_batch(samples: int, generator: torch.Generator) -> Batch:
        return {name: make(samples, generator) for name, make in inputs.items()}

    return Entry(kind.__name__, "own", kind, make_batch, loss, expected, note=kind.__doc__ or "")


def _share(samples: int, generator: torch.Generator) -> Tensor:
    return torch.rand(samples, generator=generator)


def _spoken(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, CLASSES, (samples, 3), generator=generator)


_X, _CLASS, _ITEMS = _numbers(FEATURES), _integers(CLASSES), _integers(ITEMS, LENGTH)
_SEQUENCE, _EDGES = _numbers(LENGTH, FEATURES), _integers(2, 6, 6)

OWN = (
    _entry(data.WideAndDeep, "mse_loss", items=_ITEMS, target=_numbers()),
    _entry(
        data.DLRM,
        "binary_cross_entropy_with_logits",
        dense=_X,
        items=_ITEMS,
        target=lambda n, g: torch.rand(n, generator=g),
    ),
    _entry(data.FactorizationMachine, "mse_loss", items=_ITEMS, target=_numbers()),
    _entry(data.TwoTowers, history=_ITEMS, item=_integers(ITEMS)),
    _entry(data.SparseTable, "cross_entropy", "close", items=_ITEMS, target=_CLASS),
    _entry(data.GraphConvolution, "cross_entropy", nodes=_numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(data.GraphAttention, "cross_entropy", nodes=_numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(data.MessagePassing, "cross_entropy", nodes=_numbers(6, FEATURES), pairs=_integers(6, 2, 9), target=_CLASS),
    _entry(data.Diffusion, image=_numbers(1, 8, 8)),
    _entry(data.VariationalAutoencoder, x=_X),
    _entry(data.VectorQuantizer, x=_X),
    _entry(data.BinaryNetwork, "cross_entropy", x=_X, target=_CLASS),
    _entry(data.LoRA, "cross_entropy", x=_X, target=_CLASS),
    _entry(data.GeneratorLoss, noise=_numbers(4)),
    _entry(data.CriticLoss, real=_numbers(8), fake=_numbers(8)),
    _entry(data.GradientPenalty, real=_numbers(8), fake=_numbers(8)),
    _entry(sequences.LSTMTagger, words=_ITEMS, tags=_integers(CLASSES, LENGTH)),
    _entry(sequences.UnrolledCell, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(sequences.TemporalConvolution, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(sequences.SpeechCTC, x=_SEQUENCE, words=_spoken),
    _entry(sequences.FourierMixer, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(sequences.GaussianProcess, x=_X, y=_numbers()),
    _entry(sequences.OrthogonalLayer, x=_X, target=_CLASS),
    _entry(sequences.MixtureOfExperts, "cross_entropy", x=_X, target=_CLASS),
    _entry(sequences.RoutedExperts, "cross_entropy", "refused", x=_X, target=_CLASS),
    _entry(others.Capsules, "cross_entropy", x=_X, target=_CLASS),
    _entry(others.SpatialTransformer, "cross_entropy", image=_numbers(1, 8, 8), target=_CLASS),
    _entry(others.SelfSupervised, x=_X),
    _entry(others.StochasticDepth, "cross_entropy", "refused", x=_X, target=_CLASS),
    _entry(others.PolicyGradient, state=_X, action=_CLASS, old=_numbers(), advantage=_numbers()),
    _entry(others.NeuralField, "mse_loss", position=_numbers(2), target=_numbers(3)),
    _entry(others.OrdinaryDifferentialEquation, "mse_loss", x=_X, target=_X),
    _entry(others.StateSpace, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(others.DataclassResult, x=_X, label=_CLASS),
    _entry(others.MixedPrecision, "cross_entropy", x=_X, target=_CLASS),
)
