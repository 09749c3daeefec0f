"""Replicas that take different numbers of steps."""

import pytest

from sambasim.samba.checks.meeting import Point, different_steps, together

END = Point(4, ended=True)


@pytest.mark.parametrize("points", [[Point(5), Point(5)], [END, END], [END, Point(3, ended=True)]])
def test_replicas_that_are_together_are_no_finding(points: list[Point]) -> None:
    assert together(points)
    assert different_steps(points, None) is None


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([Point(5), Point(5), END], "replica 0 takes step 5, and replica 2 came to its end after 4 steps"),
        ([Point(1, ended=True), Point(2)], "replica 0 came to its end after 1 step, and replica 1 takes step 2"),
        ([Point(8), Point(2)], "replica 0 takes step 8, and replica 1 takes step 2"),
    ],
)
def test_replicas_that_are_not_are(points: list[Point], words: str) -> None:
    assert not together(points)
    finding = different_steps(points, "app.py:1: run()")
    assert finding is not None
    assert finding.words == f"DP09: {words}"
    assert finding.where == "app.py:1: run()"
    assert "drop_last=True" in finding.remedy
