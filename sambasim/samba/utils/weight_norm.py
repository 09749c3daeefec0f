"""Weight normalisation of a whole model, in place."""

from torch import nn
from torch.nn.utils import parametrizations

from sambasim.errors import ModelError
from sambasim.samba.checks.place import app_line


def weight_norm_(module: nn.Module) -> nn.Module:
    """Replace each weight in `module`, itself included, by a trained magnitude for each output and a trained direction.

    A weight is a parameter called `weight` with two dimensions or more: of Linear, of a convolution, of an embedding.
    What the model computes does not change. Returns `module`. Call it before the optimizer is made, because the
    parameters are new ones.
    Source: Salimans & Kingma, Weight Normalization, NeurIPS 2016, arXiv:1602.07868.

    Raises ModelError if `module` is no module or has no weight, or if two modules in it share one.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"weight_norm_ was given an object of type {type(module).__name__}, and takes a torch.nn.Module",
            where=app_line(),
            remedy="weight_norm_(model.layer)",
        )
    found = [(path, inner, inner._parameters.get("weight")) for path, inner in module.named_modules()]
    weights = [(path, inner, weight) for path, inner, weight in found if weight is not None and weight.dim() > 1]
    if not weights:
        raise ModelError(
            f"{type(module).__name__} has no weight that could be normalised",
            where=app_line(),
            remedy="give weight_norm_ a module with Linear or convolution layers, once",
        )
    owners: dict[int, str] = {}
    for path, _, weight in weights:
        other = owners.setdefault(id(weight), path)
        if other != path:
            raise ModelError(
                f"{other} and {path} share one weight, and normalised they would have two",
                where=app_line(),
                remedy="call weight_norm_ on the parts of the model that share nothing",
            )
    for _, inner, _ in weights:
        parametrizations.weight_norm(inner)
    return module
