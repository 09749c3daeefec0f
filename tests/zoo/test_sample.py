"""Twelve entries of the zoo, one of each kind; `make zoo` plays all of them."""

from pathlib import Path

import pytest

from tests.zoo import ENTRIES
from tests.zoo.page import PAGE, page
from tests.zoo.play import play

SAMPLE = (
    "llama", "debertav2", "mixtral", "wav2vec2", "swinv2", "bart",
    "DLRM", "MessagePassing", "GradientPenalty", "SpeechCTC", "FourierMixer", "StochasticDepth",
)  # fmt: skip


def test_the_page_of_supported_models_is_that_of_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_does_what_the_list_says(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    if entry.package != "own":
        pytest.importorskip(entry.package)
    verdict = play(entry, tmp_path, in_process=True)
    assert verdict.outcome == entry.expected, verdict.detail
