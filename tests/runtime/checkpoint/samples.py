"""A small checkpoint, written by hand, and ways to damage it with all digests right."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sambasim.pef.canonical import canonical_json, manifest_digest
from sambasim.pef.encode import NO_DIGEST
from sambasim.pef.parts import PartDigests
from sambasim.runtime.checkpoint.claim import Claim
from sambasim.runtime.checkpoint.manifest import (
    GroupModel,
    Manifest,
    MemberModel,
    PefModel,
    PositionModel,
    ProgressModel,
    RunModel,
    ShardModel,
    TensorModel,
)
from sambasim.runtime.checkpoint.rules import MANIFEST_FILE
from sambasim.runtime.checkpoint.shards import PARAMETER, buffer_name, part_name
from sambasim.runtime.checkpoint.writer import write
from sambasim.runtime.single_rank import single_rank

Fields = dict[str, Any]

ELEMENTS = 192
REPLICAS = (0, 1)
PARTS = PartDigests(**dict.fromkeys(PartDigests.model_fields, "c" * 64))
SHARD = "shard-00000-of-00001.safetensors"


def manifest(step: int = 50) -> Manifest:
    """Of two replicas of a model with two parameters in a group, a frozen one, and a buffer."""
    members = (
        MemberModel(parameter="net__weight", start=0, numel=100),
        MemberModel(parameter="net__bias", start=128, numel=10),
    )
    group = GroupModel(name="g0", dtype="float32", numel=ELEMENTS, states=("exp_avg", "exp_avg_sq"), members=members)
    return Manifest(
        format="sambasim-checkpoint",
        version="1.0",
        writer="sambasim test",
        digest=NO_DIGEST,
        pef=PefModel(name="net", digest="a" * 64, batch_size=4, parts=PARTS),
        position=PositionModel(step=step, epoch=1, used=16),
        progress=ProgressModel(samples=400, loss_first=2.5, first_nonfinite_step=None),
        run=RunModel(
            world_size=len(REPLICAS),
            samples=384,
            threads=1,
            engine="plain",
            gradient_sync="one order of additions",
            torch=torch.__version__,
            cpu="any",
        ),
        options={
            "data": {"source": "synthetic", "shuffle": True},
            "optimizer": {"name": "adamw", "lr": 0.1},
            "training": {"seed": 0, "epochs": 3, "steps": None, "schedule": {"name": "constant"}},
        },
        groups=(group,),
        buffers=(TensorModel(name="net__steps", dtype="int64", shape=()),),
        untrained=(TensorModel(name="net__frozen", dtype="float32", shape=(3, 2)),),
        shards=(ShardModel(size_bytes=0, sha256=NO_DIGEST, spans=(), replicas=()),),
    )


def tensors() -> dict[str, Tensor]:
    """What its one shard holds."""
    regions = (PARAMETER, "exp_avg", "exp_avg_sq")
    parts = {part_name("g0", name, (0, ELEMENTS)): torch.arange(ELEMENTS) + 0.5 * i for i, name in enumerate(regions)}
    buffers = {buffer_name(replica, "net__steps"): torch.tensor(replica) for replica in REPLICAS}
    return {**parts, **buffers, "net__frozen": torch.ones(3, 2)}


def write_sample(
    folder: Path, step: int = 50, changed: Mapping[str, Tensor] | None = None, held: Claim | None = None
) -> Path:
    """A checkpoint after `step`, in `folder`, which is `held`; `changed` are tensors of its shard that are others."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:010}"
    everything = {**tensors(), **(changed or {})}
    write(path, manifest(step), ((0, ELEMENTS),), REPLICAS, everything, single_rank("here"), held=held)
    return path


def change_fields(path: Path, change: Callable[[Fields], object]) -> None:
    """Change the manifest, and seal it again."""
    fields = json.loads((path / MANIFEST_FILE).read_bytes())
    change(fields)
    (path / MANIFEST_FILE).write_bytes(canonical_json(fields | {"digest": manifest_digest(fields)}))


def change_bytes(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of one file, and nothing else."""
    (path / name).write_bytes(change((path / name).read_bytes()))
