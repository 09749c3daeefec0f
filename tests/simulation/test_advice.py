"""Advice: each change is what predicting the changed program gives, and what it asks for can be done."""

import re
from functools import cache
from inspect import getsourcelines
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.costs.cut import Level
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.ir.program import Program
from sambasim.simulation.advice import LEAST_GAIN, Advice, Change, advise, fetched_outputs
from sambasim.simulation.prediction import Prediction, predict
from sambasim.simulation.sync import SyncPath
from tests.simulation.test_laws import compiled
from tests.support.compiled import Made

BATCH, WIDTH, CLASSES = 512, 256, 40_000


def _wide(net: Any, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    logits = net.head(torch.relu(net.hidden(x)))
    loss = logits.float().square().mean()
    return (loss, logits.unsqueeze(0)) if net.gives_logits else loss


HEAD_LINE = getsourcelines(_wide)[1] + 1


@cache
def wide(gives_logits: bool = True, max_grad_norm: float | None = None, *, inference: bool = False) -> Program:
    """Its logits take longer to fetch than all else."""

    def made() -> nn.Module:
        layers = {"hidden": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, CLASSES)}
        return Made(_wide, gives_logits=gives_logits, **layers)

    return compiled(made, BATCH, WIDTH, inference=inference, max_grad_norm=max_grad_norm)


def predicted(
    program: Program,
    tiles: int | None = 4,
    level: Level = "o3",
    replicas: tuple[int, ...] | None = (1,),
    arch: str = "sn30",
    batch_size: int | None = None,
) -> Prediction:
    device = load_device(arch)
    return predict(program, device, tiles, level, load_cluster(device.cluster), replicas, batch_size=batch_size)


def change(advice: Advice, start: str) -> Change:
    return next(each for each in advice.changes if each.what.startswith(start))


def whats(prediction: Prediction) -> str:
    return ", ".join(each.what for each in advise(prediction).changes)


def test_to_return_only_the_loss_gives_the_step_of_the_model_that_does() -> None:
    first, (fetched,) = advise(predicted(wide())).changes[0], fetched_outputs(wide())
    assert (first.what, first.where) == ("return only the loss", f"tests/simulation/test_advice.py:{HEAD_LINE}")
    assert fetched.bytes_per_sample == 2 * CLASSES
    assert f"do not return {fetched.name}: 39.1 MiB go to the host" in first.how
    without = predicted(wide(False)).alone
    after = (first.after.predicted_s, first.after.samples_per_s)
    assert after == pytest.approx((without.predicted_s, without.samples_per_s))
    assert fetched_outputs(wide(False)) == []
    assert "return only the loss" not in whats(predicted(wide(False)))
    words = whats(predicted(wide(inference=True)))
    assert all(word not in words for word in ("loss", "micro-steps", "sync", "clipping")), "which is for training"


def test_each_change_is_predicted_again_and_the_best_is_first() -> None:
    advice = advise(predicted(wide(), level="o0", replicas=(1, 8, 32)))
    factors = [each.factor for each in advice.changes]
    assert factors == sorted(factors, reverse=True)
    assert min(factors) > 1 + LEAST_GAIN
    larger = change(advice, f"batch {2 * BATCH} instead")
    again = predicted(wide(), level="o0", batch_size=2 * BATCH).alone
    assert larger.after.predicted_s == pytest.approx(again.predicted_s)
    assert larger.after.samples == 2 * BATCH
    assert larger.compared == "one replica on 4 of 8 tiles of SN30"
    assert change(advice, "level o3").after.predicted_s == pytest.approx(predicted(wide()).alone.predicted_s)
    assert change(advice, "sync between RDUs").compared.startswith("8 replicas"), "as many as fit on a node"


def test_fewer_updates_gain_where_updates_take_long() -> None:
    few = predicted(wide(False, 1.0), replicas=(8,), batch_size=8)
    advice = advise(few)
    unclipped, twice = change(advice, "no clipping"), change(advice, "2 micro-steps an update instead of 1")
    assert unclipped.after.predicted_s == pytest.approx(predicted(wide(False), batch_size=8).alone.predicted_s)
    assert twice.after.samples == 2 * 8 * 8
    assert twice.compared.startswith("8 replicas")
    again = predict(few.program, few.device, 4, "o3", few.cluster, (8,), batch_size=8, micro_steps=2)
    assert twice.after.predicted_s == pytest.approx(again.steps[SyncPath.RDU][0].predicted_s)


def test_tiles_are_compared_on_a_full_rdu() -> None:
    tiles = change(advise(predicted(wide(False), tiles=8, batch_size=8)), "1 tile a replica instead of 8")
    assert tiles.compared == "replicas on one SN30"
    assert (tiles.before.samples, tiles.after.samples) == (8, 64)
    assert "--num-tiles 1: 8 replicas on an RDU, global batch 64" in tiles.how
    again = predicted(wide(False), tiles=1, replicas=(8,), batch_size=8)
    assert tiles.after.samples_per_s == pytest.approx(max(again.steps[path][0].samples_per_s for path in SyncPath))


def test_devices_are_facts_and_not_advice() -> None:
    whole = predicted(wide(), tiles=None, arch="sn40")
    advice = advise(whole)
    assert [device for device, _ in advice.devices] == ["SN10", "SN30", "SN40L"]
    step = advice.devices[2][1]
    assert step is not None
    assert step.predicted_s == pytest.approx(whole.alone.predicted_s)
    assert not re.search("SN10|tile", whats(whole)), "an SN40L has no tiles"
