"""Models of many kinds, as people write them by hand: what no package has."""

import torch
from torch import Tensor, nn

from tests.zoo import own_data as data
from tests.zoo import own_others as others
from tests.zoo.case import Case, Make, Outcome, by_name, integers, numbers, shares
from tests.zoo.own_data import CLASSES, FEATURES, ITEMS, LENGTH


def _entry(kind: type[nn.Module], loss: str | None = None, expected: Outcome = "exact", **inputs: Make) -> Case:
    note = kind.__doc__ or ""
    return Case(kind.__name__, kind, by_name(**inputs), loss, note, expected=expected, package="own")


def _spoken(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, CLASSES, (samples, 3), generator=generator)


_X, _CLASS, _ITEMS = numbers(FEATURES), integers(CLASSES), integers(ITEMS, LENGTH)
_SEQUENCE, _EDGES = numbers(LENGTH, FEATURES), integers(2, 6, 6)

OWN = (
    _entry(data.WideAndDeep, "mse", items=_ITEMS, target=numbers()),
    _entry(data.DLRM, "bce_with_logits", dense=_X, items=_ITEMS, target=shares()),
    _entry(data.FactorizationMachine, "mse", items=_ITEMS, target=numbers()),
    _entry(data.TwoTowers, history=_ITEMS, item=integers(ITEMS)),
    _entry(data.SparseTable, "cross_entropy", "close", items=_ITEMS, target=_CLASS),
    _entry(data.GraphConvolution, "cross_entropy", nodes=numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(data.GraphAttention, "cross_entropy", nodes=numbers(6, FEATURES), edges=_EDGES, target=_CLASS),
    _entry(data.MessagePassing, "cross_entropy", nodes=numbers(6, FEATURES), pairs=integers(6, 2, 9), target=_CLASS),
    _entry(data.Diffusion, image=numbers(1, 8, 8)),
    _entry(data.VariationalAutoencoder, x=_X),
    _entry(data.VectorQuantizer, x=_X),
    _entry(data.BinaryNetwork, "cross_entropy", x=_X, target=_CLASS),
    _entry(data.LoRA, "cross_entropy", x=_X, target=_CLASS),
    _entry(data.GeneratorLoss, noise=numbers(4)),
    _entry(data.CriticLoss, real=numbers(8), fake=numbers(8)),
    _entry(data.GradientPenalty, real=numbers(8), fake=numbers(8)),
    _entry(others.LSTMTagger, words=_ITEMS, tags=integers(CLASSES, LENGTH)),
    _entry(others.UnrolledCell, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(others.TemporalConvolution, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(others.SpeechCTC, x=_SEQUENCE, words=_spoken),
    _entry(others.FourierMixer, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(others.GaussianProcess, x=_X, y=numbers()),
    _entry(others.OrthogonalLayer, x=_X, target=_CLASS),
    _entry(others.MixtureOfExperts, "cross_entropy", x=_X, target=_CLASS),
    _entry(others.RoutedExperts, "cross_entropy", "refused", x=_X, target=_CLASS),
    _entry(others.Capsules, "cross_entropy", x=_X, target=_CLASS),
    _entry(others.SpatialTransformer, "cross_entropy", image=numbers(1, 8, 8), target=_CLASS),
    _entry(others.SelfSupervised, x=_X),
    _entry(others.StochasticDepth, "cross_entropy", "refused", x=_X, target=_CLASS),
    _entry(others.PolicyGradient, state=_X, action=_CLASS, old=numbers(), advantage=numbers()),
    _entry(others.NeuralField, "mse", position=numbers(2), target=numbers(3)),
    _entry(others.OrdinaryDifferentialEquation, "mse", x=_X, target=_X),
    _entry(others.StateSpace, "cross_entropy", x=_SEQUENCE, target=_CLASS),
    _entry(others.DataclassResult, x=_X, label=_CLASS),
    _entry(others.MixedPrecision, "cross_entropy", x=_X, target=_CLASS),
)
