"""Six entries of the zoo, each of another kind, and six long ones in `make test-whole`; `make zoo` plays all."""

from pathlib import Path

import pytest

from tests.support.whole import whole_case
from tests.zoo import ENTRIES
from tests.zoo.page import PAGE, page
from tests.zoo.play import play

SAMPLE = (
    "DLRM", "MessagePassing", "GradientPenalty", "SpeechCTC", "FourierMixer", "StochasticDepth",
    whole_case("mixtral"), whole_case("wav2vec2"),
    whole_case("llama"),
    whole_case("debertav2"), whole_case("swinv2"), whole_case("bart"),
)  # fmt: skip


def test_the_page_of_supported_models_is_that_of_the_list() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_does_what_the_list_says(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    if entry.package != "own":
        pytest.importorskip(entry.package)
    verdict = play(entry, tmp_path)
    assert verdict.outcome == entry.expected, verdict.detail
