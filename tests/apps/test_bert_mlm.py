"""The BERT app: the options of the vendor's data parallel example, dropout, and runs that go on from a checkpoint."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tests.apps import plain
from tests.apps.support import App, Example, ExampleTests, differences
from tests.support.whole import whole

CONFIG = Path(__file__).with_name("bert_one_layer.json")
BATCH, LENGTH, PREDICTIONS, STEPS, WARMUP_STEPS, SEED = 8, 32, 6, 20, 5, 42
RATE, DECAY, BETA2, MAX_GRAD_NORM = 0.004, 0.01, 0.98, 2.0


class TestBertMlm(ExampleTests):
    example = Example(
        "bert_mlm",
        batch_size=BATCH,
        every=(
            *("--config_name", str(CONFIG), "--max_seq_length", str(LENGTH)),
            *("--max_predictions_per_seq", str(PREDICTIONS), "--warmup_steps", str(WARMUP_STEPS)),
            *("--weight_decay", str(DECAY), "--learning_rate", str(RATE), "--adam_beta2", str(BETA2)),
            *("--max_grad_norm_clip", str(MAX_GRAD_NORM), "--logging_steps", "10", "--max_steps", str(STEPS)),
        ),
        rounds=STEPS,
        rounds_flag="--steps_this_run",
        train=("--overwrite_output_dir",),
        save=("--output_dir", "trained"),
        saved="trained/checkpoint.pt",
        told=r"step 20: loss [45]\.",  # of 6.2 to begin with
    )
    few_steps = replace(example, rounds=5, told="step 5")

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(SEED)
        config = module.BertConfig.from_file(CONFIG)
        model: nn.Module = module.BertForMaskedLM(config)
        parameters = list(model.parameters())
        text = module.masked_text(config.vocab_size, LENGTH, PREDICTIONS, SEED)
        shards = [_batches(text, replicas, rank) for rank in range(replicas)]
        optimizers = [
            _optimizer([parameter for parameter in parameters if parameter.ndim == 2], DECAY),
            _optimizer([parameter for parameter in parameters if parameter.ndim == 1], 0.0),
        ]
        schedule = Namespace(learning_rate=RATE, warmup_steps=WARMUP_STEPS, max_steps=STEPS)
        norms = []
        for step in range(app.example.rounds):
            of_replicas = []
            for rank, shard in enumerate(shards):
                batch = next(shard)
                torch.manual_seed(SEED + step * replicas + rank)
                of_replicas.append(torch.autograd.grad(model(*batch)[0], parameters))
            averaged = plain.mean(of_replicas)
            norms.append(nn.utils.get_total_norm(averaged).item())
            plain.clip(averaged, MAX_GRAD_NORM)
            gradients = dict(zip(parameters, averaged, strict=True))
            for padded in optimizers:
                padded.optimizer.param_groups[0]["lr"] = module.learning_rate(schedule, step)
                padded.step([gradients[parameter] for parameter in padded.parameters])
        assert not norms or max(norms) > MAX_GRAD_NORM, "some steps clip"
        return dict(model.state_dict())

    @whole
    def test_one_replica_trains_as_a_plain_loop_does(self, app: App) -> None:
        """Also in two runs, of which the second goes on from the checkpoint of the first."""
        flags = ("--output_dir", "parts", "--save_steps", "5")
        first = app.call("run", *flags, "--steps_this_run", "12", way="direct")
        assert _told(first.stdout, "checkpoint") == ["step 5", "step 10", "step 12"]
        second = app.call("run", *flags, way="direct")
        assert _told(second.stdout, "checkpoint") == ["step 15", "step 20"]
        assert _told(first.stdout + second.stdout, "loss") == ["step 10", "step 20"]
        saved = torch.load(app.folder / "parts" / "checkpoint.pt")
        assert saved["step"] == STEPS
        assert differences(saved["model"], self.plainly(app, 1)) == []

    @whole
    def test_a_checkpoint_is_skipped(self, app: App) -> None:
        flags = ("--output_dir", "skipped", "--save_steps", "1", "--steps_this_run", "2", "--skip_checkpoint")
        assert _told(app.call("run", *flags).stdout, "checkpoint") == []
        assert not (app.folder / "skipped").exists()


def _told(text: str, what: str) -> list[str]:
    """The steps of which the app has told this."""
    return [line.partition(":")[0] for line in text.splitlines() if f": {what}" in line]


def _batches(data: Dataset[Any], replicas: int, rank: int) -> Iterator[list[Tensor]]:
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank)
    loader: DataLoader[Any] = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def _optimizer(parameters: list[nn.Parameter], decay: float) -> plain.PaddedOptimizer:
    return plain.PaddedOptimizer(
        parameters, lambda flats: torch.optim.AdamW(flats, betas=(0.9, BETA2), eps=1e-6, weight_decay=decay, fused=True)
    )
