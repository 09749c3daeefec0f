"""The zoo is what it says: reproducible, and true in what each case claims about its gradients."""

import pytest
import torch

from tests.models import CASES, Batch, Case, evaluate_loss

EVERY_CASE = pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)


def in_float64(batch: Batch) -> Batch:
    if isinstance(batch, dict):
        return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def test_the_families_are_all_there() -> None:
    families = {
        "mlp", "logistic_regression", "cnn", "resnet", "unet", "lstm", "gru", "transformer_encoder", "gpt",
        "encoder_decoder", "vit", "autoencoder", "embedding_bag_mean", "tied_language_model",
    }  # fmt: skip
    assert families <= {one.name for one in CASES}


@EVERY_CASE
def test_claims_about_gradients_hold(one: Case) -> None:
    """In float64, where rounding is far below any gradient that is not zero in exact arithmetic."""
    module = one.module().double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.autograd.backward(evaluate_loss(one, module, in_float64(one.batch(4))))
    norms = {name: None if p.grad is None else float(p.grad.norm()) for name, p in module.named_parameters()}
    largest = max(norm for norm in norms.values() if norm is not None)
    assert tuple(name for name, norm in norms.items() if norm is None) == one.unused
    zero = tuple(name for name, norm in norms.items() if norm is not None and norm < 1e-12 * largest)
    assert zero == one.zero_gradients
