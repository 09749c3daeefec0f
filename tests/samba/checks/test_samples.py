"""Batches of replicas against each other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sambasim.samba.checks.samples import Alike, alike, digests, sample_digests, shared_samples


def _fed(samples: list[int], batch_size: int = 4) -> list[tuple[str, ...]]:
    return [tuple(map(str, samples[start : start + batch_size])) for start in range(0, len(samples), batch_size)]


def test_a_sample_has_one_digest_whatever_batch_it_is_in() -> None:
    x, label = torch.arange(12.0).view(4, 3), torch.tensor([1, 2, 1, 2])
    whole = sample_digests({"x": x, "label": label})
    assert len(set(whole)) == 4
    order = [2, 0]
    assert sample_digests({"x": x[order], "label": label[order]}) == (whole[2], whole[0])
    assert sample_digests({"x": x[order], "label": label[[1, 1]]}) != (whole[2], whole[0])


def test_replicas_that_are_fed_alike_are_named() -> None:
    batches = [digests({"x": torch.tensor([value, 0.0])}) for value in (1.0, 2.0, 3.0, 2.0)]
    assert list(alike(batches)) == [(1, 3)]
    assert list(alike(batches[:3])) == []
    assert list(alike(batches[1:2] * 3)) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("look", [digests, sample_digests])
def test_a_batch_to_warm_up_with_is_not_looked_at(look: Callable[[dict[str, Tensor]], tuple[str, ...]]) -> None:
    for batch in (
        {"x": torch.zeros(4, 3), "label": torch.zeros(4, dtype=torch.long)},
        {"x": torch.ones(4, 3), "label": torch.full((4,), 2)},
        {"x": torch.zeros(1, 3), "label": torch.tensor([5])},
    ):
        assert look(batch) == ()
    for batch in (
        {"x": torch.arange(12.0).view(4, 3), "label": torch.zeros(4, dtype=torch.long)},
        {"x": torch.zeros(4, 3), "label": torch.tensor([0, 0, 0, 1])},
        {"x": torch.tensor([[0.5]]), "label": torch.tensor([1])},
    ):
        assert look(batch) != ()


def test_two_replicas_that_are_fed_alike_twice_are_found() -> None:
    noted = Alike()
    a, b, c = (("a",), ("b",), ("c",))
    assert noted.note([a, a, b], 1, None) is None
    assert noted.note([a, b, b], 2, None) is None, "once these, once those: a chance"
    finding = noted.note([c, a, a], 8, "app.py:1: run()")
    assert finding is not None
    assert finding.words == "DP04: replicas 1 and 2 are fed the same samples, again in step 8"
    assert finding.where == "app.py:1: run()"


def test_one_batch_that_every_replica_repeats_is_a_finding() -> None:
    noted = Alike()
    assert noted.note([("a",), ("a",)], 1, None) is None
    finding = noted.note([("a",), ("a",)], 2, None)
    assert finding is not None
    assert finding.words == "DP04: replicas 0 and 1 are fed the same samples, again in step 2"


def test_replicas_that_share_samples_are_found() -> None:
    data = list(range(64))
    apart = [_fed(data[rank::2]) for rank in range(2)]
    assert shared_samples(apart, None) is None
    whole = [_fed(data), _fed(data[::-1])]
    finding = shared_samples(whole, "app.py:1: run()")
    assert finding is not None
    assert finding.words == "DP05: 64 of the 64 samples of the first 16 steps are fed to several replicas"


def test_a_second_epoch_in_another_order_is_no_finding() -> None:
    generator = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(48, generator=generator).tolist() for _ in range(3)]
    fed = [_fed([sample for epoch in epochs for sample in epoch[rank::2]]) for rank in range(2)]
    assert shared_samples(fed, None) is None


def test_drawing_with_replacement_is_no_finding() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randint(500, (400,), generator=generator).tolist() for _ in range(3)]
        assert shared_samples([_fed(drawn) for drawn in draws], None) is None


def test_the_padding_of_a_sampler_is_no_finding() -> None:
    fed = [_fed([*range(rank, 13, 4), 0]) for rank in range(4)]
    assert shared_samples(fed, None) is None
