"""The example apps: each trains, on one to four replicas and by either sync, as a plain PyTorch loop does.

Beside that: SGD in the smallest app, Adam with weight decay, dropout and clipping in an LSTM, checkpoints and inference
of LeNet, three optimizers and sections run apart in GPT, and the options of the vendor's example for BERT.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.apps import plain
from tests.apps.support import DATA_PARALLEL, DEVICE, HOST, SCRIPTS, App, Example, ExampleTests, differences
from tests.support.whole import whole


def trained(
    app: App,
    replicas: int,
    make: Callable[[Any], tuple[nn.Module, Any]],
    optimizer: plain.MakeOptimizer,
    **options: Any,
) -> dict[str, Tensor]:
    """The weights of the model, trained with the data, that `make` makes of the app's module."""
    torch.manual_seed(256)
    model, data = make(app.module())
    long: dict[str, Any] = {"batch_size": app.example.batch_size, "epochs": app.example.rounds}
    return plain.train(model, [optimizer(list(model.parameters()))], data, replicas, **long, **options)


@whole
class TestFeedForward(ExampleTests):
    example = Example("feed_forward", r"held out: accuracy [89]\d")  # of 10 % at the start

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        return trained(
            app, replicas, lambda module: (module.FeedForward(64, 128, 10), module.datasets()[0]),
            lambda flats: torch.optim.Adam(flats, lr=0.001, weight_decay=1e-4, fused=True),
        )  # fmt: skip


class TestLogisticRegression(ExampleTests):
    example = Example("logistic_regression", r"held out: accuracy [89]\d")

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        return trained(
            app, replicas, lambda module: (module.LogReg(), module.FlatDigits(module.digits()[0])),
            lambda flats: torch.optim.SGD(flats, lr=0.1, momentum=0.9, fused=True),
        )  # fmt: skip

    @whole
    def test_in_bf16_either_sync_has_the_same_bits_near_those_of_fp32(self, in_bf16: App) -> None:
        host, in_fp32 = in_bf16.weights(2, *HOST), self.plainly(in_bf16, 2)
        assert differences(in_bf16.weights(2, *DEVICE), host) == []
        assert differences(host, in_fp32) == list(host)
        module = in_bf16.module()
        images, labels = next(iter(DataLoader(module.FlatDigits(module.digits()[1]), batch_size=10_000)))
        outputs = [nn.functional.linear(images, *weights.values()) for weights in (host, in_fp32)]
        first, second = (nn.functional.cross_entropy(output, labels) for output in outputs)
        assert abs(first - second) < 0.02

    @whole
    @pytest.mark.parametrize("np", [2, 4])
    def test_stochastic_rounding_has_the_same_bits_by_either_sync(self, np: int, in_bf16: App) -> None:
        in_bf16.compile(*DATA_PARALLEL, "--dtype", "bf16", "--enable-stoc-rounding", pef="rounding")
        rounding = ("--pef", "rounding")
        host = in_bf16.weights(np, *HOST, *rounding)
        assert differences(host, in_bf16.weights(np, *DEVICE, *rounding)) == []
        assert differences(host, in_bf16.weights(np, *DEVICE)) == list(host)

    @whole
    def test_a_check_finds_nothing(self, app: App) -> None:
        """It shortens epochs, and ends before the app saves."""
        result = app.call("run", "--checkpoint", "end.pt", "--data-parallel", np=2, way="check")
        *printed, last = result.stdout.splitlines()
        assert last.startswith(f"check of {SCRIPTS}/logistic_regression.py, 2 replicas, ")
        assert last.endswith(" steps with shortened epochs, so the scores differ from those of a run: no finding")
        assert any("epoch 1: loss" in line for line in printed), "half of the steps are an epoch"
        assert not (app.folder / "end.pt").exists()

    @whole
    def test_replicas_are_measured_together(self, app: App) -> None:
        result = app.call("measure-performance", "--data-parallel", "--num-iterations", "5", "--json", np=2)
        assert result.stdout.count("\n") == 1
        assert '"replicas": 2, "batch_size": 32, "steps": 5' in result.stdout

    @whole
    def test_chips_share_the_batch_of_a_replica(self, app: App) -> None:
        """`mpirun -np` counts replicas; without -b, the batch of a run is that of all chips of one."""
        flags, pef = ("--tensor-parallel", "batch", "--n-chips", "2"), "on_chips"
        app.compile(*flags, *DATA_PARALLEL, pef=pef)
        app.call("run", *app.example.training, "--checkpoint", "on_chips.pt", "--data-parallel", np=2, pef=pef)
        torch.testing.assert_close(torch.load(app.folder / "on_chips.pt"), self.plainly(app, 2), rtol=1e-4, atol=1e-6)

    def test_another_batch_size_is_another_graph(self, app: App) -> None:
        result = app.call("run", "-b", "16", check=False)
        words = "the PEF logistic_regression was compiled from another graph: image is input float32[32, 64]"
        assert (result.returncode, f"error[pef]: {words}" in result.stderr) == (3, True)
        assert "  try:   run it with -b 32, or compile again with -b 16\n" in result.stderr


@whole
class TestLstm(ExampleTests):
    example = Example("lstm", r"held out: accuracy [4-7]\d")  # of 10 % at the start

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        return trained(
            app, replicas,
            lambda module: (module.LSTMClassifier(hidden=64, layers=2, dropout=0.2), module.datasets()[0]),
            lambda flats: torch.optim.AdamW(flats, lr=0.005, fused=True),
            max_grad_norm=1.0, begin=lambda rank: torch.manual_seed(256 + rank),
        )  # fmt: skip


@pytest.fixture(scope="class")
def printed(app: App) -> list[str]:
    """Trained on two replicas, with a checkpoint of each epoch in `trained`: the lines that it printed."""
    flags = ("--data-parallel", *app.example.training, "--save-folder", "trained")
    return app.call("run", *flags, np=2).stdout.splitlines()


@whole
class TestLeNet(ExampleTests):
    example = Example(
        "lenet", r"held out: \d+ of 360 right",
        batch_size=36, save=("--save-folder", "checkpoints"), saved="checkpoints/epoch_2.pt",
    )  # fmt: skip

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        return trained(
            app, replicas, lambda module: (module.LeNet(), module.enlarged(module.digits()[0])),
            lambda flats: torch.optim.SGD(flats, lr=0.05, momentum=0.9, fused=True),
        )  # fmt: skip

    def test_training_resumes_from_a_checkpoint_with_the_same_bits(self, app: App, printed: list[str]) -> None:
        flags = ("--data-parallel", "--reduce-on-rdu", "--resume", "trained/epoch_1.pt", "--save-folder", "resumed")
        assert app.call("run", *self.example.training, *flags, np=2).stdout.splitlines() == printed[1:]
        resumed, straight = (torch.load(app.folder / name / "epoch_2.pt") for name in ("resumed", "trained"))
        assert differences(resumed["model"], straight["model"]) == []
        states = [checkpoint["optimizer"]["state"] for checkpoint in (resumed, straight)]
        torch.testing.assert_close(*states, rtol=0, atol=0)

    def test_an_inference_pef_reads_what_training_learned(self, app: App, printed: list[str]) -> None:
        app.compile("--inference", pef="lenet_inference")
        flags = ("--inference", "--resume", "trained/epoch_2.pt")
        assert app.call("run", *flags, pef="lenet_inference").stdout == f"{printed[-1]}\n"
        first, last = (float(line.split()[-1]) for line in printed[:-1])
        assert last < first, "the loss of the epochs"
        assert app.call("test", "--inference", pef="lenet_inference").stdout == "device and host agree\n"


GPT_BATCH, GPT_LENGTH, GPT_LAYERS, GPT_MICRO_STEPS, GPT_WARMUP_STEPS = 4, 32, 1, 2, 4
GPT_RATE, GPT_DECAY, GPT_MAX_GRAD_NORM = 0.003, 0.1, 1.5


@whole
class TestGpt(ExampleTests):
    example = Example(
        "gpt",
        r"step 20: loss 3\.",  # of 4.6 at the start
        batch_size=GPT_BATCH,
        every=(
            *("--length", str(GPT_LENGTH), "--layers", str(GPT_LAYERS), "--learning-rate", str(GPT_RATE)),
            *("--weight-decay", str(GPT_DECAY), "--max-grad-norm", str(GPT_MAX_GRAD_NORM)),
            *("--grad-accumulation-steps", str(GPT_MICRO_STEPS)),
        ),
        rounds=20,
        rounds_flag="--steps",
        train=("--warmup-steps", str(GPT_WARMUP_STEPS), "--log-every", "10"),
    )

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(256)
        model: nn.Module = module.GPT(GPT_LENGTH, GPT_LAYERS)
        names = dict(model.named_parameters())
        tables = [names.pop("tokens.weight"), names.pop("positions.weight")]
        optimizers = [
            torch.optim.Adam(tables, betas=(0.9, 0.99), fused=True),
            _adamw([one for one in names.values() if one.ndim == 2], GPT_DECAY, 0.95),
            _adamw([one for one in names.values() if one.ndim == 1], 0.0, 0.95),
        ]
        schedule = Namespace(learning_rate=GPT_RATE, warmup_steps=GPT_WARMUP_STEPS, steps=app.example.rounds)
        return plain.train(
            model, optimizers, module.windows(GPT_LENGTH), replicas,
            batch_size=GPT_BATCH, steps=app.example.rounds, micro_steps=GPT_MICRO_STEPS,
            rate=partial(module.learning_rate, schedule), max_grad_norm=GPT_MAX_GRAD_NORM,
        )  # fmt: skip


def _adamw(parameters: list[nn.Parameter], decay: float, beta2: float, eps: float = 1e-8) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, betas=(0.9, beta2), eps=eps, weight_decay=decay, fused=True)


BERT_CONFIG = Path(__file__).with_name("bert_one_layer.json")
BERT_BATCH, BERT_LENGTH, BERT_PREDICTIONS, BERT_STEPS, BERT_WARMUP_STEPS, BERT_SEED = 8, 32, 6, 20, 5, 42
BERT_RATE, BERT_DECAY, BERT_BETA2, BERT_MAX_GRAD_NORM = 0.004, 0.01, 0.98, 2.0


@whole
class TestBertMlm(ExampleTests):
    example = Example(
        "bert_mlm",
        r"step 20: loss [45]\.",  # of 6.2 at the start
        batch_size=BERT_BATCH,
        every=(
            *("--config_name", str(BERT_CONFIG), "--max_seq_length", str(BERT_LENGTH)),
            *("--max_predictions_per_seq", str(BERT_PREDICTIONS), "--warmup_steps", str(BERT_WARMUP_STEPS)),
            *("--weight_decay", str(BERT_DECAY), "--learning_rate", str(BERT_RATE), "--adam_beta2", str(BERT_BETA2)),
            *("--max_grad_norm_clip", str(BERT_MAX_GRAD_NORM), "--logging_steps", "10", "--max_steps", str(BERT_STEPS)),
        ),
        rounds=BERT_STEPS,
        rounds_flag="--steps_this_run",
        train=("--overwrite_output_dir",),
        save=("--output_dir", "trained"),
        saved="trained/checkpoint.pt",
    )

    def plainly(self, app: App, replicas: int) -> dict[str, Tensor]:
        module = app.module()
        torch.manual_seed(BERT_SEED)
        config = module.BertConfig.from_file(BERT_CONFIG)
        model: nn.Module = module.BertForMaskedLM(config)
        parameters = list(model.parameters())
        text = module.masked_text(config.vocab_size, BERT_LENGTH, BERT_PREDICTIONS, BERT_SEED)
        optimizers = [
            _adamw([one for one in parameters if one.ndim == 2], BERT_DECAY, BERT_BETA2, eps=1e-6),
            _adamw([one for one in parameters if one.ndim == 1], 0.0, BERT_BETA2, eps=1e-6),
        ]
        schedule = Namespace(learning_rate=BERT_RATE, warmup_steps=BERT_WARMUP_STEPS, max_steps=BERT_STEPS)
        return plain.train(
            model, optimizers, text, replicas, batch_size=BERT_BATCH, steps=app.example.rounds,
            before=lambda step, rank: torch.manual_seed(BERT_SEED + step * replicas + rank),
            rate=partial(module.learning_rate, schedule), max_grad_norm=BERT_MAX_GRAD_NORM,
        )  # fmt: skip

    @whole
    def test_one_replica_trains_as_a_plain_loop_does(self, app: App) -> None:
        """Also in two runs, of which the second resumes from the checkpoint of the first."""
        flags = ("--output_dir", "parts", "--save_steps", "5")
        first = app.call("run", *flags, "--steps_this_run", "12", way="direct")
        assert _steps(first.stdout, "checkpoint") == ["step 5", "step 10", "step 12"]
        second = app.call("run", *flags, way="direct")
        assert _steps(second.stdout, "checkpoint") == ["step 15", "step 20"]
        assert _steps(first.stdout + second.stdout, "loss") == ["step 10", "step 20"]
        saved = torch.load(app.folder / "parts" / "checkpoint.pt")
        assert saved["step"] == BERT_STEPS
        assert differences(saved["model"], self.plainly(app, 1)) == []


def _steps(text: str, what: str) -> list[str]:
    return [line.partition(":")[0] for line in text.splitlines() if f": {what}" in line]
