"""What a script can give wrong to the Python API, and the curve of losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sambasim as ss
from sambasim.errors import DataError, ModelError, OptionError
from sambasim.report.tables import sparkline
from tests.api.live import BATCH, LABELS, POINTS, TRAIN, compiled, net, trained

PARAMETERS = [*net().parameters()]
GROUPS = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ss.compile(3, BATCH), ModelError, "the model is of type int"),  # type: ignore[arg-type]
        (lambda: ss.compile(net(), (POINTS[:3], LABELS[:2])), DataError, "value 0 has 3, value 1 has 2"),
        (lambda: ss.compile(net(), {"x": "text"}), DataError, "x of the example is of type str"),
        (lambda: ss.compile(net(), BATCH, loss="mce"), OptionError, "loss.name"),
        (lambda: ss.compile(net(), BATCH, loss=nn.CrossEntropyLoss), OptionError, "which is no loss function"),
        (lambda: ss.compile(net(), BATCH, loss="mse", optimizer="adamv"), OptionError, "did you mean adam"),
        (lambda: ss.compile(net(), BATCH, optimizer=torch.optim.Rprop(PARAMETERS)), OptionError, "no optimizer Rprop"),
        (lambda: ss.compile(net(), BATCH, optimizer=torch.optim.SGD(GROUPS)), OptionError, "2 parameter groups"),
        (lambda: ss.compile(net(), BATCH, optimizer=torch.optim.SGD(PARAMETERS)), ModelError, "does not update 0.w"),
        (lambda: ss.compile(net(), BATCH, loss="mse", word_size=2), OptionError, "did you mean world_size"),
        (lambda: ss.compile(net(), BATCH, loss="mse", batch_size=64), OptionError, "the example has 32 samples"),
        (lambda: ss.compile(net(), BATCH, loss=nn.MSELoss(reduction="sum")), OptionError, "a loss is a mean"),
        (lambda: ss.compile(nn.ReLU, BATCH), ModelError, "an instance: ReLU"),  # type: ignore[arg-type]
        (lambda: ss.compile(net().double(), BATCH, loss="mse"), ModelError, "same dtype"),
        (lambda: ss.load("nothing"), OptionError, "there is no PEF 'nothing'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DataLoader(TensorDataset(POINTS)), {}, "data is a DataLoader"),
        ((POINTS, LABELS[:5]), {}, "value 0 has 400, value 1 has 5"),
        (TRAIN, {"emulate_replicas": 2}, "it is replicas=N"),
        (TRAIN, {"replicas": 1}, "for at least 2"),
        (TRAIN, {"stepz": 1}, "stepz: is not a flag"),
        ({"x": POINTS, "target": LABELS[:5]}, {}, "x has 400, target has 5"),
        (TensorDataset, {}, "data is the class TensorDataset"),
        (TRAIN, {"replicas": 0}, "replicas is 0"),
        (TRAIN, {"learning_rate": 1}, "learning_rate"),
        (None, {}, "names no data"),
    ],
)
def test_what_is_wrong_with_a_run_is_said(pef: ss.Pef, data: object, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ss.SambasimError, match=message):
        ss.run(pef, data, quiet=True, **options)
    assert len(trained(pef).losses) == 4, "the next run works"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda pef: ss.run(pef, TRAIN, quiet=True, replicas=1),
            "replicas is 1, and net is for at least 2\n  try:   replicas=2",
        ),
        (lambda pef: ss.run(pef, TRAIN, quiet=True, set={"loss.name": "mse"}), 'set={"loss.name": "mse"}'),
        (lambda pef: ss.run(pef, TRAIN, quiet=True, trace_steps=2), "add trace=FILE"),
        (lambda pef: ss.run(pef, TRAIN, quiet=True, exact=True), "leave out exact=True"),
        (lambda pef: ss.predict(pef, TRAIN, metrics="m.jsonl"), "leave out metrics, or call sambasim.run"),
        (lambda pef: ss.predict(pef, TRAIN, epochs=3), "is for training"),
        (lambda pef: ss.predict(pef, TRAIN, json=True), "it is the record of the result"),
        (lambda pef: ss.run(pef, TRAIN, threads=0), "must be at least 1\n  try:   threads=1"),
        (lambda pef: ss.compile(net(), BATCH, loss="mse", world_size=2), "add data_parallel=True"),
        (lambda pef: ss.compile(net(), BATCH, loss="mse", micro_batches=2), "add pipeline_stages=2"),
        (lambda pef: ss.compile(net(), BATCH), 'loss="cross_entropy"'),
        (lambda pef: ss.compile(net(), BATCH, loss="mse", pef_name="a.pef"), 'pef_name="a"'),
    ],
)
def test_errors_of_the_python_api_speak_python(pef: ss.Pef, call: Callable[[ss.Pef], object], told: str) -> None:
    with pytest.raises(ss.SambasimError) as error:
        call(pef)
    assert told in str(error.value)
    assert " --" not in str(error.value)
    assert str(error.value.args[0]) == error.value.what


def test_a_sparkline_shows_the_course_of_numbers() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([]) == ""
    assert sparkline([float("nan"), 1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(one) for one in range(1000)])) == 40


def test_complex_inputs_and_torchscript_are_refused(folder: Path) -> None:
    spectra = torch.fft.fft(POINTS[:8])
    with pytest.raises(ss.SambasimError, match="is complex64, which a PEF cannot hold"):
        compiled(folder, net(), (spectra, LABELS[:8]), loss="cross_entropy")
    with pytest.raises(ss.SambasimError, match="one of TorchScript"):
        compiled(folder, torch.jit.trace(net(), POINTS[:8]), loss="cross_entropy")  # type: ignore[no-untyped-call]  # torch's


def test_the_loss_of_each_sample_is_refused_as_that_of_the_function(folder: Path) -> None:
    with pytest.raises(ss.SambasimError, match=r"the loss function has shape \(32,\)") as caught:
        compiled(folder, net(), loss=lambda outputs, target: outputs.sum(1) - target)
    assert "let the function return the mean" in str(caught.value.remedy)
