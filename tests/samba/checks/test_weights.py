"""Replicas that train something else, or otherwise."""

from dataclasses import replace

import pytest

from sambasim.samba.checks.weights import Trained, different_course, different_start

SGD = {"lr": 0.1, "momentum": 0.9}
REPLICA = Trained({"a": "1", "b": "2"}, 4, [SGD, {"lr": 0.3}])


def test_replicas_that_are_alike_are_no_finding() -> None:
    replicas = [REPLICA, REPLICA, REPLICA]
    assert different_start(replicas, None) is None
    assert different_course(replicas, "before step 8", None) is None


@pytest.mark.parametrize(
    ("change", "apart"),
    [({"weights": {"a": "1", "b": "3"}}, "b"), ({"steps": 0}, "the number of optimizer steps")],
)
def test_another_start_is_found(change: dict[str, object], apart: str) -> None:
    other = replace(REPLICA, **change)  # type: ignore[arg-type]
    finding = different_start([REPLICA, REPLICA, other], "app.py:1: run()")
    assert finding is not None
    words = f"DP03: replica 2 starts from other weights than replica 0: {apart} differs"
    assert finding.words == f"{words}; it goes on with those of replica 0"
    assert finding.where == "app.py:1: run()"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": {"a": "3", "b": "3"}}, "has other weights than replica 0: a differs"),
        ({"hyperparameters": [SGD, {"lr": 0.2}]}, "trains with lr 0.2, and replica 0 with 0.3"),
    ],
)
def test_another_course_is_found(change: dict[str, object], words: str) -> None:
    other = replace(REPLICA, **change)  # type: ignore[arg-type]
    finding = different_course([REPLICA, other], "at the end", None)
    assert finding is not None
    assert finding.words == f"DP07: at the end replica 1 {words}"


def test_weights_that_are_left_out_are_no_finding_and_hyperparameters_still_are() -> None:
    trained = replace(REPLICA, weights={"a": "3", "b": "3"})
    replaced = replace(REPLICA, weights={}, hyperparameters=[SGD, {"lr": 0.2}])
    assert different_course([REPLICA, replace(REPLICA, weights={})], "at the end", None) is None
    finding = different_course([REPLICA, replaced, trained], "at the end", None)
    assert finding is not None
    assert finding.words == "DP07: at the end replica 1 trains with lr 0.2, and replica 0 with 0.3"
