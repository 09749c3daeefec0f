"""The published rows: sound data, and predictions near what was measured. `sambasim validate` runs them all."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from sambasim.cli.main import sambasim
from sambasim.errors import OptionError
from sambasim.hardware.budget import load_calibration
from tests.support.whole import whole

MOST_OF_ONE, MOST_IN_THE_MEAN, MOST_SECTIONS = 0.15, 0.06, 0.5


def validated(*arguments: str) -> Any:
    result = CliRunner().invoke(sambasim, ["validate", "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    for row in record["rows"]:
        assert abs(row["error"]) <= MOST_OF_ONE
        assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
        if row["published_sections"] is not None:
            assert row["predicted_sections"] == pytest.approx(row["published_sections"], rel=MOST_SECTIONS)
    return record


def test_rows_of_one_layer_are_near() -> None:
    rows = validated("--only", "1 layer")["rows"]
    assert [row["level"] for row in rows] == ["o3", "o0", "o3"]
    assert rows[0]["published_sections"] is not None


@whole
def test_all_rows_are_near() -> None:
    record, fit = validated(), load_calibration().fit
    rows, mean = record["rows"], record["mean_error"]
    assert len(rows) == 12
    assert mean <= MOST_IN_THE_MEAN
    assert mean == pytest.approx(fit.mean_error, abs=0.0005)
    assert max(abs(row["error"]) for row in rows) == pytest.approx(fit.worst_error, abs=0.0005)
    host = [row["predicted_host_s"] / row["published_host_s"] - 1 for row in rows if row["published_host_s"]]
    assert len(host) == 10
    assert max(map(abs, host)) == pytest.approx(fit.worst_host_error, abs=0.0005)
    assert record["mean_host_error"] == pytest.approx(sum(map(abs, host)) / 10)


def test_a_row_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match="no published row has 'llama' in its name") as refused:
        validated("--only", "llama")
    assert "GPT-13B, sequence 2048" in str(refused.value)
