"""The best evaluation of a run: its weights are kept, and the run ends where none is better any more."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sambasim as ss
from sambasim.api.jobs import Run
from sambasim.api.pef import Pef
from sambasim.errors import OptionError

BATCH = 4
DATA = ((torch.zeros(40, 1), torch.zeros(40, 1)), (torch.zeros(6, 1), torch.full((6, 1), 4.0)))


class Constant(nn.Module):
    """Gives its parameter, whatever `x` is."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x), 1) + 0 * x


def falling(outputs: Tensor, target: Tensor) -> Tensor:
    return (target - outputs).mean()


def distance(outputs: Tensor, targets: Tensor) -> float:
    """From 4: the least after step 4, and as good after step 6; not a number after step 2."""
    value = float(outputs.mean())
    return {2: float("nan"), 6: 0.0}.get(int(value), abs(value - 4))


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Pef:
    """Of a parameter that is s after step s."""
    how: dict[str, Any] = {"optimizer": "sgd", "lr": 1.0, "check": 0, "data_parallel": True, "quiet": True}
    example, folder = (torch.zeros(BATCH, 1), torch.zeros(BATCH, 1)), tmp_path_factory.mktemp("falling")
    return ss.compile(Constant(), example, loss=falling, name="falling", output_folder=folder, **how)


def run(pef: Pef, **options: Any) -> Run:
    how = {"evaluation_metrics": distance, "keep_best": "distance", "best_mode": "min", "evaluate_every": "1"}
    return ss.run(pef, DATA, threads=1, **{"quiet": True, **how, **options})


def facts(of: Run) -> tuple[int, int | None, float]:
    """The last step, that of the best evaluation, and the weight."""
    return of.summary.steps, of.best.step if of.best else None, float(of.weights["value"])


pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_weights_are_the_last_ones_or_the_best(pef: Pef, tmp_path: Path) -> None:
    assert facts(run(pef)) == (10, 4, 10.0)
    for replicas in (1, 2):
        for where in ({}, {"checkpoint_dir": tmp_path / str(replicas)}):
            best = run(pef, replicas=replicas, steps=5, load_best=True, save=tmp_path / "w.safetensors", **where)
            assert facts(best) == (5, 4, 4.0)
            assert best.summary.weights_of_step == 4
            assert best.evaluations[-1].step == 5, "that of the end stays"
            saved = ss.predict(pef, DATA[1], weights=tmp_path / "w.safetensors", threads=1)
            assert set(saved.outputs[0].flatten().tolist()) == {4.0}


def test_a_run_ends_after_evaluations_without_a_better_one(pef: Pef, tmp_path: Path) -> None:
    stopped = run(pef, stop_after=3, metrics=tmp_path / "m.jsonl", checkpoint_dir=tmp_path / "saved")
    assert facts(stopped) == (7, 4, 7.0)
    assert stopped.summary.stopped_early is not None
    assert stopped.summary.stopped_early.startswith("stopped after step 7: 3 evaluations without a better distance")
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [*range(1, 8)]
    assert lines[-1]["best"]["step"] == 4
    again = run(pef, stop_after=3, checkpoint_dir=tmp_path / "saved", resume="newest")
    assert (again.losses, again.summary.stopped_early) == ([], stopped.summary.stopped_early)
    assert facts(run(pef, stop_after=5, checkpoint_dir=tmp_path / "saved", resume="newest")) == (9, 4, 9.0)
    of_loss = run(pef, evaluation_metrics=None, keep_best=None, best_mode=None, stop_after=2)
    assert facts(of_loss) == (10, 10, 10.0), "the loss falls"


def test_a_resumed_run_knows_the_best_before_and_its_checkpoint_stays(pef: Pef, tmp_path: Path) -> None:
    how: dict[str, Any] = {"checkpoint_dir": tmp_path / "saved", "checkpoint_every": "1", "keep": 1}
    run(pef, steps=6, **how)
    assert sorted(path.name for path in (tmp_path / "saved").glob("[bs]*")) == ["best", *_names(4, 6)]
    assert (tmp_path / "saved" / "best").resolve().name == _names(4)[0]
    resumed = run(pef, steps=8, resume="newest", load_best=True, **how)
    assert facts(resumed) == (8, 4, 4.0)
    assert [one.step for one in resumed.evaluations] == [7, 8]
    run(pef, steps=3, checkpoint_dir=tmp_path / "other", evaluate_every="2epochs")
    missed = run(pef, steps=6, checkpoint_dir=tmp_path / "other", resume="newest", evaluate_every="3")
    assert [one.step for one in missed.evaluations] == [6], "that of the end of a run is not repeated"


def _names(*steps: int) -> list[str]:
    return [f"step-{step:010}" for step in steps]


def test_evaluations_are_as_often_as_asked_and_printed_once(pef: Pef, capfd: pytest.CaptureFixture[str]) -> None:
    for every, steps in {"4": [4, 8, 10, 12, 15], "1epoch": [10, 15], "2epochs": [15]}.items():
        plain = {"evaluation_metrics": None, "keep_best": None, "best_mode": None, "quiet": False}
        found = run(pef, steps=15, evaluate_every=every, **plain)
        printed = [line for line in capfd.readouterr().out.splitlines() if "held out 6 samples" in line]
        expected = [step for step in steps if every != "4" or step != 10]
        assert [one.step for one in found.evaluations] == expected
        assert [int(line.split()[2].strip(",")) for line in printed if line.startswith("after")] == expected


def _called(name: str) -> Any:
    def metric(outputs: Tensor, targets: Tensor) -> float:
        return 0.0

    metric.__name__ = name
    return metric


TYPO = {"best_mode": None, "evaluation_metrics": None}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep_best": "accuracyy", **TYPO}, "is no metric that has a name here\n  try:   did you mean accuracy?"),
        ({"keep_best": "los", **TYPO}, "did you mean loss? For one that has, by the model or a function: best_mode"),
        ({"keep_best": "largest", **TYPO}, "it is not known whether the largest largest is best"),
        ({"keep_best": "distanc", "best_mode": None, "evaluation_metrics": "a.py:distance"}, "did you mean distance?"),
        ({"evaluation_metrics": _called("loss")}, "a function called loss, and evaluations have another number"),
        ({"evaluation_metrics": ["mae", _called("mae")]}, "a function called mae, and evaluations have another"),
        ({"keep_best": "f1", "evaluation_metrics": None}, "evaluations have no f1"),
        ({"best_mode": None}, "it is not known whether the largest distance is best"),
        ({"keep_best": None, "best_mode": None, "load_best": True}, "needs a metric that says which"),
        ({"evaluate_every": "10min"}, "must be a number of steps, or one of epochs"),
        ({"evaluation_metrics": "f2", "keep_best": "loss"}, "must be accuracy, precision"),
        (
            {"evaluation_metrics": "perplexity", "keep_best": "loss"},
            "cannot measure perplexity of outputs float32[4, 1]",
        ),
        ({"evaluation_metrics": lambda outputs, targets: outputs, "keep_best": "loss"}, "gives 6 numbers"),
        ({"evaluation_metrics": lambda outputs: 0, "keep_best": "loss"}, "takes 1 positional argument"),
        ({"evaluate": False}, "needs evaluations, which are turned off"),
        ({"keep_best": "accuracy", "best_mode": None, "evaluation_metrics": None}, "evaluations have no accuracy"),
    ],
)
def test_what_cannot_be_is_refused(pef: Pef, options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError) as caught:
        run(pef, **options)
    assert told in str(caught.value)
