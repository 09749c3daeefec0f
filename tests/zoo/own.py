"""Models of many kinds, as people write them by hand: what no package has."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.zoo.entry import Batch, Entry, Outcome
from tests.zoo.own_data import (
    DLRM,
    BinaryNetwork,
    CriticLoss,
    Diffusion,
    FactorizationMachine,
    GeneratorLoss,
    GradientPenalty,
    GraphAttention,
    GraphConvolution,
    LoRA,
    MessagePassing,
    SparseTable,
    TwoTowers,
    VariationalAutoencoder,
    VectorQuantizer,
    WideAndDeep,
)
from tests.zoo.own_others import (
    Capsules,
    DataclassResult,
    MixedPrecision,
    NeuralField,
    OrdinaryDifferentialEquation,
    PolicyGradient,
    SelfSupervised,
    SpatialTransformer,
    StateSpace,
    StochasticDepth,
)
from tests.zoo.own_sequences import (
    FourierMixer,
    GaussianProcess,
    LSTMTagger,
    MixtureOfExperts,
    OrthogonalLayer,
    RoutedExperts,
    SpeechCTC,
    TemporalConvolution,
    UnrolledCell,
)

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
    _entry(WideAndDeep, "mse_loss", items=_ITEMS, target=_numbers()),
    _entry(
        DLRM, "binary_cross_entropy_with_logits", dense=_X, items=_ITEMS, target=lambda n, g: torch.rand(n, generator=g)
    ),
    _entry(FactorizationMachine, "mse_loss", items=_ITEMS, target=_numbers()),
    _entry(TwoTowers, history=_ITEMS, item=_integers(ITEMS)),
    _entry(
        SparseTable,
        "cross_entropy",
        "close",
        items=_ITEMS,
        target=_CLASS,
    ),
    _entry(GraphConvolution, "cross_entropy", nodes=_numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(GraphAttention, "cross_entropy", nodes=_numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(MessagePassing, "cross_entropy", nodes=_numbers(6, FEATURES), pairs=_integers(6, 2, 9), target=_CLASS),
    _entry(Diffusion, image=_numbers(1, 8, 8)),
    _entry(VariationalAutoencoder, x=_X),
    _entry(VectorQuantizer, x=_X),
    _entry(BinaryNetwork, "cross_entropy", x=_X, target=_CLASS),
    _entry(LoRA, "cross_entropy", x=_X, target=_CLASS),
    _entry(GeneratorLoss, noise=_numbers(4)),
    _entry(CriticLoss, real=_numbers(8), fake=_numbers(8)),
    _entry(GradientPenalty, real=_numbers(8), fake=_numbers(8)),
    _entry(LSTMTagger, words=_ITEMS, tags=_integers(CLASSES, LENGTH)),
    _entry(UnrolledCell, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(TemporalConvolution, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(SpeechCTC, x=_SEQUENCE, words=_spoken),
    _entry(FourierMixer, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(GaussianProcess, x=_X, y=_numbers()),
    _entry(OrthogonalLayer, x=_X, target=_CLASS),
    _entry(MixtureOfExperts, "cross_entropy", x=_X, target=_CLASS),
    _entry(
        RoutedExperts,
        "cross_entropy",
        "refused",
        x=_X,
        target=_CLASS,
    ),
    _entry(Capsules, "cross_entropy", x=_X, target=_CLASS),
    _entry(SpatialTransformer, "cross_entropy", image=_numbers(1, 8, 8), target=_CLASS),
    _entry(SelfSupervised, x=_X),
    _entry(
        StochasticDepth,
        "cross_entropy",
        "refused",
        x=_X,
        target=_CLASS,
    ),
    _entry(PolicyGradient, state=_X, action=_CLASS, old=_numbers(), advantage=_numbers()),
    _entry(NeuralField, "mse_loss", position=_numbers(2), target=_numbers(3)),
    _entry(OrdinaryDifferentialEquation, "mse_loss", x=_X, target=_X),
    _entry(StateSpace, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(DataclassResult, x=_X, label=_CLASS),
    _entry(MixedPrecision, "cross_entropy", x=_X, target=_CLASS),
)
