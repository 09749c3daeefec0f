"""The zoo is what it says: reproducible, and true in what each case claims about its gradients."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.models import CASES, Batch, Case, case, dataset, evaluate_loss

EVERY_CASE = pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)


def tensors(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(batch.values()) if isinstance(batch, dict) else batch


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))


def in_float64(batch: Batch) -> Batch:
    if isinstance(batch, dict):
        return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def test_names_are_unique_and_find_their_case() -> None:
    assert [case(one.name) for one in CASES] == list(CASES)


def test_the_families_are_all_there() -> None:
    families = {
        "mlp", "logistic_regression", "cnn", "resnet", "unet", "lstm", "gru", "transformer_encoder", "gpt",
        "encoder_decoder", "vit", "autoencoder", "embedding_bag_mean", "tied_language_model",
    }  # fmt: skip
    assert families <= {one.name for one in CASES}


@EVERY_CASE
def test_weights_and_batches_follow_their_seeds(one: Case) -> None:
    state = torch.get_rng_state()
    first, again, other = one.module(), one.module(), one.module(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert same(one.batch(4), one.batch(4))
    assert not same(one.batch(4), one.batch(4, seed=1))
    assert torch.equal(state, torch.get_rng_state())


@EVERY_CASE
def test_samples_collate_to_the_batch(one: Case) -> None:
    collated = default_collate(one.samples(4))
    assert same(tuple(collated) if isinstance(collated, list) else collated, one.batch(4))
    assert len(dataset(one.name, count=6)) == 6


@EVERY_CASE
def test_the_target_names_the_model(one: Case) -> None:
    module, name = one.target.split(":")
    assert getattr(importlib.import_module(module), name) is one.build
    assert isinstance(one.module(), nn.Module)


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


@EVERY_CASE
def test_a_few_steps_lower_the_loss(one: Case) -> None:
    module, batch = one.module(), one.batch(8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = evaluate_loss(one, module, batch)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_lstm_draws_dropout_between_its_layers() -> None:
    """Without that, the tests that dropout survives capture would pass for nothing."""
    one = case("lstm")
    module, batch = one.module(), one.batch(4)
    with torch.random.fork_rng(devices=[]):
        losses = [evaluate_loss(one, module, batch).item() for _ in range(2)]
    assert losses[0] != losses[1]
    module.eval()
    assert evaluate_loss(one, module, batch) == evaluate_loss(one, module, batch)
