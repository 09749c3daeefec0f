"""`sambasim demo`: the commands that it runs, and its verdict on their results."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from sambasim.records.metrics import SummaryRecord
from tests.cli.typed import invoked
from tests.support.summaries import summary


class Shell:
    """Replaces `subprocess.run`: records the commands, and writes a summary where `--metrics` says."""

    def __init__(self, device: SummaryRecord, host: SummaryRecord) -> None:
        self.commands: list[str] = []
        self._summaries = {True: device, False: host}

    def __call__(self, command: Sequence[str], **_: object) -> None:
        self.commands.append(" ".join(command))
        if "--metrics" in command:
            metrics = Path(command[list(command).index("--metrics") + 1])
            metrics.parent.mkdir(parents=True, exist_ok=True)
            record = self._summaries["--reduce-on-rdu" in command].model_dump_json()
            metrics.write_text(f'{{"kind": "step"}}\n{record}\n')


def demo(monkeypatch: pytest.MonkeyPatch, shell: Shell, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(subprocess, "run", shell)
    result = invoked("demo", *arguments)
    return result.exit_code, result.stdout


def test_the_commands_are_those_of_a_user_and_the_verdict_is_equality(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(summary("device"), summary("host"))
    exit_code, output = demo(monkeypatch, shell)
    assert shell.commands == [
        "sambasim compile --data-parallel -ws 2 --pef-name digits-demo --output-folder out",
        "mpirun -np 2 sambasim run --data-parallel --reduce-on-rdu --pef out/digits-demo/digits-demo.pef "
        "--metrics out/digits-demo/device.jsonl",
        "mpirun -np 2 sambasim run --data-parallel --pef out/digits-demo/digits-demo.pef "
        "--metrics out/digits-demo/host.jsonl",
    ]
    assert [line[2:] for line in output.splitlines() if line.startswith("$ ")] == shell.commands
    assert "PASSED device sync and host sync gave the same weights, bit for bit." in output
    assert output.count("98.00%") == 2
    assert exit_code == 0


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        (summary("host", weights="c" * 64), "the weights differ between device sync and host sync"),
        (summary("host", state="c" * 64), "buffers or optimizer state differ between device sync and host sync"),
        (summary("host", accuracy=0.969), "accuracy with host sync is 96.90%, and should be at least 97%"),
    ],
)
def test_a_difference_or_a_low_accuracy_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: SummaryRecord, complaint: str
) -> None:
    exit_code, output = demo(monkeypatch, Shell(summary("device"), host), "--output-folder", str(tmp_path))
    assert f"FAILED {complaint}" in output
    assert output.count("FAILED") == 1
    assert "PASSED" not in output
    assert exit_code == 1


def test_smoke_trains_three_steps_and_asks_for_no_accuracy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shell = Shell(summary("device", accuracy=None), summary("host", accuracy=None))
    exit_code, _ = demo(monkeypatch, shell, "--smoke", "--output-folder", str(tmp_path))
    assert [line.endswith("--steps 3") for line in shell.commands] == [False, True, True]
    assert exit_code == 0
