"""An app that predicts with each of `PEFS` and `SYNCS`, one after another: `predicting.py FOLDER`. Called by
test_predicting.py. `predicting.py FOLDER same` has a mistake: every replica predicts the same batches."""

import sys
from itertools import product
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sambasim import samba as ours
from sambasim.errors import LaunchError
from tests.samba.harness import BATCH, LogReg, OnlyOut, Plainly, batch_of, equal, plain, seeded

samba: Any = ours

PEFS: dict[str, tuple[Any, int]] = {"forward": (OnlyOut, 1), "step": (LogReg, 2)}
"""By name: the model, and the number of its inputs."""
SYNCS: tuple[list[str], ...] = ([], ["--data-parallel"], ["--data-parallel", "--reduce-on-rdu"])
STEPS = 5


def predict(folder: str, pef: str, flags: list[str], mistake: str) -> str:
    args = samba.utils.argparser.parse_app_args(
        argv=["run", "--inference", "--pef", f"{folder}/{pef}/{pef}.pef", *flags]
    )
    kind, takes = PEFS[pef]
    model = samba.from_torch_model_(seeded(kind))
    plainly: Any = Plainly(model).model.eval()
    parallel = {"data_parallel": args.data_parallel, "reduce_on_rdu": args.reduce_on_rdu}
    traced = samba.utils.trace_graph(model, batch_of()[:takes], None, pef=args.pef)
    rank, replicas = samba.utils.get_rank(), samba.utils.get_world_size()

    def check(batch: list[Any]) -> None:
        results = samba.session.run(batch, traced, **parallel)
        assert all(map(equal, results, plainly(*map(plain, batch))))

    try:
        for step in range(STEPS + rank):  # replicas that predict wait for nobody: one has more batches
            check(batch_of(step if mistake == "same" else replicas * step + rank)[:takes])
        if mistake == "":
            dataset = TensorDataset(*map(plain, batch_of(9, 6 * BATCH)[:takes]))
            sampler: Any = DistributedSampler(dataset, max(replicas, 1), rank, shuffle=True)
            for _ in range(2):  # of the same order, which is no mistake here
                for batch in DataLoader(dataset, BATCH, sampler=sampler, drop_last=True):
                    check(batch)
        if pef == "forward" and flags:
            throughput, latency = samba.utils.measure_performance(
                model, batch_of()[:takes], BATCH, 1, True, n_iterations=2, **parallel
            )
            assert abs(throughput - replicas * BATCH / latency) < 1e-6 * throughput
    except LaunchError as error:
        return f"refused: {error.what}"
    return "predicted"


def main(folder: str, *mistake: str) -> None:
    torch.set_num_threads(1)
    jobs = [("forward", ["--data-parallel"])] if mistake else list(product(PEFS, SYNCS))
    for pef, flags in jobs:
        told = predict(folder, pef, flags, "".join(mistake))
        sys.stdout.write(f"{pef} {len(flags)} {samba.utils.get_rank()}: {told}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
