"""What a run prints of its steps and its end: as lines, and as one output of a notebook."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sambasim.records.metrics import EvaluationRecord
from sambasim.report.tables import sparkline
from sambasim.terminal.progress import RunProgress
from tests.runtime.test_reports import START, STEP
from tests.support.summaries import summary

EVALUATED = EvaluationRecord(step=4, epoch=1, samples=9, loss=0.5, accuracy=0.75, evaluation_s=0.1)
TOLD = "after step 4, epoch 1: held out 9 samples: loss 0.5000, accuracy 75.00%"
LAST = "step 4/4  loss 0.5000  lr 0.1  grad norm 0.125  400 samples/s"


def show_a_run(placement: str = "") -> None:
    progress = RunProgress()
    progress.started(replace(START, placement=placement))
    for step in range(1, 5):
        progress.stepped(replace(STEP, step=step, loss=2.0 / step, grad_norm=None if step < 4 else 0.125))
    progress.evaluated(EVALUATED)
    progress.ended(summary("none").model_copy(update={"peak_memory_bytes": (3 << 20, 5 << 20, 4 << 20)}))


@pytest.mark.parametrize("placement", ["", "2 replicas on node 0, RDUs 0-1"])
def test_a_run_speaks_of_devices_where_one_was_asked_for(placement: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_a_run(placement)
    lines = capsys.readouterr().out.splitlines()
    memory = "memory at the peak (measured): 5.0 MiB on rank 1, 3.0 MiB on rank 0"
    assert {"step 1/4  loss 2.0000  lr 0.1  400 samples/s", LAST, TOLD, memory} <= set(lines)
    asked = [line.split()[0] for line in lines if line.startswith(("simulated: ", "weights_sha", "state_sha"))]
    assert asked == (["simulated:", "weights_sha256", "state_sha256"] if placement else [])


def test_a_notebook_has_one_output_which_is_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    made: list[object] = []

    def display(curve: object, *, display_id: bool) -> SimpleNamespace:
        made.append(curve)
        return SimpleNamespace(update=lambda curve: shown.append(str(curve)))

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    show_a_run()
    assert len(made) == 1
    assert shown[-1].splitlines() == [LAST, f"loss {sparkline([2.0, 1.0, 2 / 3, 0.5])}", TOLD]
    assert "step 4/4" not in capsys.readouterr().out
