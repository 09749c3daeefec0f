"""What a checkpoint says of the run that writes it, but for its shards."""

import math

import torch

from sambasim import __version__
from sambasim.pef.encode import NO_DIGEST
from sambasim.pef.parts import part_digests
from sambasim.runtime.checkpoint.manifest import (
    FORMAT_NAME,
    FORMAT_VERSION,
    Manifest,
    Number,
    PefModel,
    PositionModel,
    ProgressModel,
    RunModel,
    ShardModel,
)
from sambasim.runtime.checkpoint.snapshot import buffer_models, group_models, untrained_models
from sambasim.runtime.plan import Position
from sambasim.runtime.setup import Setup
from sambasim.runtime.training import Totals

_NO_SHARD = ShardModel(size_bytes=0, sha256=NO_DIGEST, spans=(), replicas=())


def describe(setup: Setup, samples: int) -> Manifest:
    """The manifest of a checkpoint at the beginning, with one shard that stands for those to come; `samples` are those
    of the data."""
    program, resolved = setup.program, setup.resolved
    return Manifest(
        format=FORMAT_NAME,
        version=".".join(map(str, FORMAT_VERSION)),
        writer=f"sambasim {__version__}",
        digest=NO_DIGEST,
        pef=PefModel(
            name=program.name,
            digest=setup.document.digest,
            batch_size=program.batch_size,
            parts=part_digests(setup.document),
        ),
        position=PositionModel(step=0, epoch=0, used=0),
        progress=ProgressModel(samples=0, loss_first=None, first_nonfinite_step=None),
        run=RunModel(
            world_size=setup.world_size,
            samples=samples,
            threads=setup.threads,
            engine=setup.options.engine,
            gradient_sync="gloo" if setup.host_sync == "gloo" and setup.world_size > 1 else "one order of additions",
            torch=torch.__version__,
            cpu=setup.instructions,
        ),
        options={
            "data": resolved.data.model_dump(mode="json"),
            "loss": resolved.loss.model_dump(mode="json") if resolved.loss else None,
            "optimizer": resolved.optimizer.model_dump(mode="json") if resolved.optimizer else None,
            "training": resolved.training.model_dump(mode="json"),
            "on_nonfinite": setup.options.on_nonfinite,
        },
        groups=group_models(program),
        buffers=buffer_models(program),
        untrained=untrained_models(program),
        shards=(_NO_SHARD,),
    )


def at(manifest: Manifest, position: Position, totals: Totals) -> Manifest:
    """The same of the same run, further on."""
    progress = ProgressModel(
        samples=totals.samples,
        loss_first=_number(totals.loss_first) if position.step else None,
        first_nonfinite_step=totals.first_nonfinite_step,
        skipped_steps=totals.skipped_steps,
    )
    place = PositionModel(step=position.step, epoch=position.epoch, used=position.used)
    return manifest.model_copy(update={"position": place, "progress": progress})


def _number(value: float) -> Number:
    if math.isfinite(value):
        return value
    return "=nan" if math.isnan(value) else "=inf" if value > 0 else "=-inf"
