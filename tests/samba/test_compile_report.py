"""The last line of an app's compile: a command that can be typed as it stands."""

import shlex
from pathlib import Path

import pytest

from sambasim.samba.compile_report import run_command


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("", ""),
        ("-b 32 --pef-name net --hidden 8", "-b 32 --hidden 8"),
        ("--pef_name=net --output-folder=there --inference", "--inference"),
        ("--data-parallel -ws 4 --dtype bf16", "--data-parallel --dtype bf16"),
        ("--o0 --arch sn10 positional", "positional"),
        ("--o1 -ws 2 'two words'", "'two words'"),
    ],
)
def test_what_only_a_compile_has_is_left_out(typed: str, kept: str) -> None:
    path = str(Path.cwd() / "out/net/net.pef")
    found = run_command(["python", "app.py"], shlex.split(typed), path, 1)
    assert found == " ".join(f"python app.py run {kept} --pef out/net/net.pef".split())


def test_replicas_are_started_by_mpirun() -> None:
    found = run_command(["sambasim", "app", "a.py"], ["--data-parallel"], "/elsewhere/n.pef", 4)
    assert found == "mpirun -np 4 sambasim app a.py run --data-parallel --pef /elsewhere/n.pef --reduce-on-rdu"
