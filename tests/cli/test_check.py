"""`sambasim app --check` of scripts that end early: the report, and the exit code."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from sambasim.errors import OptionError
from sambasim.samba import process
from tests.cli.typed import invoked

FOUND = "from sambasim.samba.process import Finding, report\nreport(Finding('DP06', 'so', None, 'do'))\n"
STEP = "from sambasim.samba.checks import job; job.current_check().steps += 1\n"
DRAWN = "def draw():\n    while True:\n        yield next(iter(()))\nnext(draw())\n"


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without any earlier check."""
    process.reset()
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


def _check(folder: Path, script: str, *flags: str) -> Result:
    (folder / "app.py").write_text(script)
    return invoked("app", *flags, str(folder / "app.py"))


@pytest.mark.parametrize(
    ("script", "code"),
    [(STEP, 0), (STEP + "raise SystemExit(0)", 0), (STEP + DRAWN, 0), (STEP + FOUND, 1), (FOUND, 1)],
    ids=["end", "exit", "data-end", "found", "found-without-a-step"],
)
def test_the_exit_code_says_whether_there_are_findings(tmp_path: Path, script: str, code: int) -> None:
    result = _check(tmp_path, script, "--check", "--json")
    record = json.loads(result.stdout)
    assert (result.exit_code, len(record["findings"]), record["error"]) == (code, code, None)


@pytest.mark.parametrize(
    ("script", "exit_code", "code", "what"),
    [
        ("print('nothing')", 2, "option", "took no step, so there is nothing to check"),
        (STEP + "raise ValueError('of the app')", 1, "app", "ValueError: of the app"),
        (STEP + "raise RuntimeError('of the app')", 1, "app", "RuntimeError: of the app"),
        (STEP + "raise SystemExit(7)", 7, "app", "SystemExit: 7"),
    ],
)
def test_an_app_that_fails_has_its_error_in_the_report(
    tmp_path: Path, script: str, exit_code: int, code: str, what: str
) -> None:
    result = _check(tmp_path, script, "--check", "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["code"]) == (exit_code, code)
    assert error["what"].endswith(what)


@pytest.mark.parametrize("flags", [("--check-steps", "4"), ("--json",)])
def test_flags_of_a_check_are_refused_without_one(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = _check(tmp_path, "", *flags)
    assert result.exit_code == 2
    assert f"{flags[0]} needs --check" in result.stderr


def test_a_compile_is_not_checked_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("open('written', 'w')")
    result = invoked("app", "--check", str(tmp_path / "app.py"), "compile", "--pef-name", "net")
    assert result.exit_code == OptionError.exit_code
    assert "app.py compile takes no step" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]
