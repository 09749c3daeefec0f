"""The command line against that of the compile."""

from argparse import Namespace

import pytest

from sambasim.samba.checks import arguments as module
from sambasim.samba.checks.arguments import likely_cause, note_changed, note_not_passed_on
from sambasim.samba.checks.telling import Telling

METADATA = {
    "command": "compile",
    "batch_size": "8",
    "hidden": "32",
    "mapping": "section",
    "pef_name": "net",
    "lr": "0.1",
}
TYPED = {"command": "run", "batch_size": 8, "hidden": 32, "mapping": "section", "pef": "net", "lr": 0.1, "epochs": 3}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Telling:
    own = Telling(on_demand=True)
    monkeypatch.setattr(module, "telling", own)
    return own


def test_arguments_that_are_the_same_are_no_finding(told: Telling) -> None:
    note_changed(Namespace(**TYPED), METADATA)
    note_changed(Namespace(**TYPED), {})
    note_changed(None, METADATA)
    assert likely_cause(Namespace(**TYPED), METADATA) == ""
    assert not told.findings


def test_what_must_agree_is_told_and_all_that_changed_is_a_likely_cause(told: Telling) -> None:
    typed = Namespace(**{**TYPED, "batch_size": 4, "hidden": 16})
    note_changed(typed, METADATA)
    (finding,) = told.findings
    assert finding.words == "AP02: --batch-size was 8 when the PEF was compiled, and now is 4"
    assert finding.where is not None
    assert "note_changed(typed, METADATA)" in finding.where
    assert likely_cause(typed, METADATA) == " (AP02: since then --batch-size was 8 and is 4, --hidden was 32 and is 16)"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "DP02: --data-parallel, --world-size, --o0 was typed, but session.compile is not told"),
        ({"data_parallel": True, "world_size": 2}, "DP02: --o0 was typed, but session.compile is not told"),
        ({"data_parallel": True, "world_size": 2, "o0": True}, None),
    ],
)
def test_flags_that_the_compiler_is_not_told_are_named(
    told: Telling, config: dict[str, object], words: str | None
) -> None:
    typed = Namespace(command="compile", data_parallel=True, world_size=2, o0=True, o1=False, inference=False)
    note_not_passed_on(typed, config, inference=False)
    assert [finding.words for finding in told.findings] == ([] if words is None else [words])


def test_an_app_without_a_command_line_is_told_nothing(told: Telling) -> None:
    note_not_passed_on(None, {}, inference=False)
    assert not told.findings
