"""What a script can give wrong to the Python API, and the curve of losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sambasim as ss
from sambasim.report.tables import sparkline
from tests.api.conftest import BATCH, LABELS, POINTS, TRAIN, compiled, net, trained

PARAMETERS = [*net().parameters()]
SPECTRA = (torch.fft.fft(BATCH[0]), BATCH[1])
GROUPS = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ss.compile(3, BATCH), "the model is of type int"),  # type: ignore[arg-type]  # the mistake
        (lambda: ss.compile(net(), (POINTS[:3], LABELS[:2])), "value 0 has 3, value 1 has 2"),
        (lambda: ss.compile(net(), {"x": "text"}), "x of the example is of type str"),
        (lambda: ss.compile(net(), BATCH, loss="mce"), "loss.name"),
        (lambda: ss.compile(net(), BATCH, loss=nn.CrossEntropyLoss), "which is no loss function"),
        (lambda: ss.compile(net(), BATCH, loss="mse", optimizer="adamv"), "did you mean adam"),
        (lambda: ss.compile(net(), BATCH, optimizer=torch.optim.SGD(GROUPS)), "SGD does not update 0.weight"),
        (lambda: ss.compile(net(), BATCH, optimizer=torch.optim.SGD(PARAMETERS)), "does not update 0.w"),
        (lambda: ss.compile(net(), BATCH, loss="mse", batch_size=64), "the example has 32 samples"),
        (lambda: ss.compile(net(), BATCH, loss=nn.MSELoss(reduction="sum")), "a loss is a mean"),
        (lambda: ss.compile(nn.ReLU, BATCH), "an instance: ReLU"),  # type: ignore[arg-type]  # the mistake
        (lambda: ss.compile(net().double(), BATCH, loss="mse"), "same dtype"),
        (lambda: ss.compile(net(), BATCH, loss="mse", world_size=2), "add data_parallel=True"),
        (lambda: ss.compile(net(), BATCH, loss="mse", micro_batches=2), "add pipeline_stages=2"),
        (lambda: ss.compile(net(), BATCH, loss="mse", schedule="cosine"), 'try:   lr_schedule="cosine"'),
        (lambda: ss.compile(net(), BATCH, mean_over="elements"), 'try:   set={"loss.mean_over": …}'),
        (lambda: ss.compile(net(), BATCH), 'loss="cross_entropy"'),
        (lambda: ss.compile(net(), BATCH, loss="mse", pef_name="a.pef"), 'pef_name="a"'),
        (lambda: ss.compile(net(), SPECTRA, loss="cross_entropy"), "is complex64, which a PEF cannot hold"),
        (lambda: ss.compile(torch.jit.trace(net(), POINTS), BATCH), "one of TorchScript"),  # type: ignore[no-untyped-call]  # torch's
        (lambda: ss.compile(net(), BATCH, loss=lambda x, y: x.sum(1) - y), "let the function return the mean"),
        (lambda: ss.load("nothing"), "there is no PEF 'nothing'"),
    ],
)
def test_what_is_wrong_with_a_compile_is_said_in_python(call: Callable[[], object], message: str) -> None:
    _check_refusal(call, message)


@pytest.mark.parametrize(
    ("use", "data", "options", "message"),
    [
        (ss.run, {"x": POINTS, "target": LABELS[:5]}, {}, "x has 400, target has 5"),
        (ss.run, TensorDataset, {}, "data is the class TensorDataset"),
        (ss.run, None, {}, "names no data"),
        (ss.run, TRAIN, {"emulate_replicas": 2}, "it is replicas=N"),
        (ss.run, TRAIN, {"stepz": 1}, "stepz: is not a flag"),
        (ss.run, TRAIN, {"total_steps": 1}, 'try:   set={"training.schedule.total_steps": …}'),
        (ss.run, TRAIN, {"steps": 0}, "training.steps = 0: must be at least 1"),
        (ss.run, TRAIN, {"replicas": 0}, "replicas is 0"),
        (ss.run, TRAIN, {"replicas": 1}, "replicas is 1, and net is for at least 2\n  try:   replicas=2"),
        (ss.run, TRAIN, {"learning_rate": 1}, "learning_rate"),
        (ss.run, TRAIN, {"set": {"loss.name": "mse"}}, 'set={"loss.name": "mse"}'),
        (ss.run, TRAIN, {"trace_steps": 2}, "add trace=FILE"),
        (ss.run, TRAIN, {"exact": True}, "leave out exact=True"),
        (ss.run, TRAIN, {"threads": 0}, "must be at least 1\n  try:   threads=1"),
        (ss.predict, TRAIN, {"metrics": "m.jsonl"}, "leave out metrics, or call sambasim.run"),
        (ss.predict, TRAIN, {"epochs": 3}, "is for training"),
        (ss.predict, TRAIN, {"json": True}, "it is the record of the result"),
    ],
)
def test_what_is_wrong_with_a_run_or_a_prediction_is_said_in_python(
    pef: ss.Pef, use: Callable[..., object], data: object, options: dict[str, Any], message: str
) -> None:
    _check_refusal(lambda: use(pef, data, **options), message)


def _check_refusal(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ss.SambasimError) as error:
        call()
    assert message in str(error.value)
    assert " --" not in str(error.value)
    assert str(error.value.args[0]) == error.value.what


def test_a_pef_for_one_replica_says_how_several_are_compiled(folder: Path) -> None:
    _check_refusal(lambda: trained(compiled(folder, net(), loss="cross_entropy"), replicas=2), "data_parallel=True")


def test_the_run_after_a_refused_one_works(pef: ss.Pef) -> None:
    _check_refusal(lambda: trained(pef, (POINTS, LABELS[:5])), "value 0 has 400, value 1 has 5")
    assert len(trained(pef).losses) == 4


def test_a_sparkline_shows_the_course_of_numbers() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([]) == ""
    assert sparkline([float("nan"), 1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(one) for one in range(1000)])) == 40
