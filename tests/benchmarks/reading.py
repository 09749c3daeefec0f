"""Data as people have it: samples of several lengths, and a DataLoader object, against what they are in place of."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

from torch.utils.data import DataLoader, WeightedRandomSampler

from sambasim.data.buckets import Shapes
from sambasim.data.datasets import WatchedDataset
from sambasim.options.grammar import parse_input
from sambasim.options.training import DataOptions
from sambasim.runtime.run.replica import Shard
from tests.benchmarks import workloads
from tests.benchmarks.measure import Figure, in_turns
from tests.benchmarks.workloads import LENGTHS, Pictures
from tests.cli.typed import each
from tests.support.installation import THIS

_ROUNDS, _STEPS, _BATCH = 4, 256, 32


def lengths(folder: Path) -> Iterator[Figure]:
    """Seconds of a step on 1024 texts of three lengths, with a graph for each, against all padded to the longest, by
    the ratio of their elements."""
    where = workloads.__name__
    buckets = {"buckets": f"data.buckets={[*LENGTHS]}", "padded": "data.buckets=[]"}
    for name, field in buckets.items():
        source = f"data.source={where}:{'texts_of_lengths' if name == 'buckets' else 'padded_texts'}"
        fields = each("--set", (source, field, "optimizer.name=adamw"))
        THIS.call(
            "compile", f"{where}:two_layers", *fields, "-b", "4", "--pef-name", name, "--check", "0", folder=folder
        )

    def seconds(name: str) -> list[float]:
        run = ("run", "--pef", name, "--steps", str(_STEPS), "--threads", "1", "--no-evaluate", "--json")
        summary = json.loads(THIS.call(*run, folder=folder))
        return [summary["training_s"] / summary["steps"]]

    medians = in_turns({name: partial(seconds, name) for name in buckets}, _ROUNDS)
    share = sum(LENGTHS) / len(LENGTHS) / LENGTHS[-1]
    medians["elements"] = medians["padded"] * share
    yield Figure("step on texts of three lengths", "buckets", "elements", "ratio at most 1.1", medians)


def reading(folder: Path) -> Iterator[Figure]:
    """Seconds of an epoch through a DataLoader object with a sampler, against a loop over it."""
    pictures = Pictures()
    count = len(pictures) // _BATCH
    for workers in (0, 2):
        often = WeightedRandomSampler([1.0] * len(pictures), len(pictures))
        loader = DataLoader(pictures, _BATCH, sampler=often, num_workers=workers)
        shapes = Shapes([[parse_input("x", "float32[3, 32, 32]"), parse_input("target", "int64[]")]], {})
        dataset = WatchedDataset(loader, "pictures")
        options = DataOptions(source="digits", workers=workers)
        shard = Shard(dataset, 0, 1, _BATCH, 1, options=options, shapes=shapes, seed=0)

        def ours(shard: Shard = shard) -> list[float]:
            began_s = perf_counter()
            shard.begin_epoch(0, 0)
            for _ in range(count):
                shard.next_batch()
            shard.close()  # as the loop over a DataLoader ends its workers
            return [perf_counter() - began_s]

        def torchs(loader: DataLoader[object] = loader) -> list[float]:
            began_s = perf_counter()
            for _ in loader:
                pass
            return [perf_counter() - began_s]

        medians = in_turns({"sambasim": ours, "DataLoader": torchs}, 5 * _ROUNDS, warm=True)
        yield Figure(f"an epoch read, {workers} workers", "sambasim", "DataLoader", "ratio at most 1", medians)
