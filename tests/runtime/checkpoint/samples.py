"""A small checkpoint, and ways to damage it with right digests."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.pef import digests
from sambasim.runtime.checkpoint import content
from sambasim.runtime.checkpoint.content import Manifest, buffer_name, piece_key
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.checkpoint.saver import write
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.run.plan import Position
from sambasim.runtime.run.training import Progress

Fields = dict[str, Any]

REPLICAS = (0, 1)
PARTS = dict.fromkeys(digests.PARTS, "c" * 64)
SHARD = "shard-00000-of-00001.safetensors"


def manifest(step: int = 50) -> Manifest:
    """Of two replicas of a model with two trained parameters, a frozen one, and a buffer."""
    kinds: dict[str, SymbolKind] = {"": SymbolKind.PARAMETER}
    kinds |= dict.fromkeys(("__adamw0__exp_avg", "__adamw0__exp_avg_sq"), SymbolKind.OPTIMIZER_STATE)
    tensors = {
        name + suffix: Symbol(name + suffix, kind, TensorType("float32", shape))
        for name, shape in {"net__weight": (10, 10), "net__bias": (10,)}.items()
        for suffix, kind in kinds.items()
    }
    tensors["net__frozen"] = Symbol("net__frozen", SymbolKind.PARAMETER, TensorType("float32", (3, 2)))
    tensors["net__steps"] = Symbol("net__steps", SymbolKind.BUFFER, TensorType("int64", ()))
    digests: Fields = {"digest": "a" * 64, "operators_sha256": "e" * 64, "integers_sha256": "d" * 64}
    of_pef: Fields = {"name": "net", "batch_size": 4, "parts": PARTS, "compile_options": {"dtype": "fp32"}}
    of_run: Fields = {"threads": 1, "engine": "plain", "torch": torch.__version__, "cpu": "any", "data": "content 0"}
    return Manifest(
        pef=content.PefModel(**of_pef, **digests),
        position=Position(step=step, epoch=1, used=16),
        progress=Progress(samples=400, loss_first=math.inf),
        run=content.RunModel(replicas=len(REPLICAS), chips=1, samples=384, gradient_sync=content.EXACT_SYNC, **of_run),
        options={
            "data": {"source": "synthetic", "shuffle": True},
            "optimizer": {"name": "adamw", "lr": 0.1},
            "training": {"seed": 0, "epochs": 3, "steps": None, "schedule": {"name": "constant"}},
        },
        tensors=tensors,
        shards={},
    )


def tensors() -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for number, (name, symbol) in enumerate(manifest().tensors.items()):
        if symbol.kind is SymbolKind.BUFFER:
            values |= {buffer_name(replica, 0, name): torch.tensor([replica]) for replica in REPLICAS}
        else:
            values[name] = torch.arange(symbol.type.numel) + 0.5 * number
    return values


def pieces(changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the one shard holds: one tensor in two pieces, the others whole."""
    whole = tensors() | {name: tensor.view(-1) for name, tensor in changed.items()}
    weight = whole.pop("net__weight")
    cut = {piece_key("net__weight", 0, 64): weight[:64], piece_key("net__weight", 64, 100): weight[64:]}
    return cut | {piece_key(name, 0, tensor.numel()): tensor for name, tensor in whole.items()}


def write_sample(folder: Path, step: int = 50, changed: Mapping[str, Tensor] | None = None) -> Path:
    """A checkpoint after `step`, in `folder`; `changed` are tensors with other values."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:010}"
    write(path, manifest(step), pieces(changed or {}), single_rank("here"))
    return path


def change_fields(path: Path, change: Callable[[Fields], object]) -> None:
    """Change the manifest, and correct its digest where it still is one."""
    fields = json.loads((path / MANIFEST_FILE).read_bytes())
    change(fields)
    with suppress(ValueError, TypeError, RecursionError):
        fields |= {"digest": Manifest.model_validate_json(json.dumps(fields)).right_digest()}
    (path / MANIFEST_FILE).write_text(json.dumps(fields))


def change_bytes(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    (path / name).write_bytes(change((path / name).read_bytes()))


def flip_a_bit(path: Path) -> None:
    change_bytes(path, SHARD, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
