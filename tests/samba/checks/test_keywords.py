"""Keywords that a function of the library does not have."""

import inspect
from collections.abc import Callable

import pytest

from sambasim import samba
from sambasim.samba.checks.findings import KeywordError
from sambasim.samba.checks.keywords import checks_keywords, nearest
from sambasim.samba.utils.common import common_app_driver


@checks_keywords
def function(first: int, data_parallel: bool = False) -> int:
    """Something of a library."""
    return first + data_parallel


def test_a_keyword_that_is_known_is_passed_on() -> None:
    assert function(1, data_parallel=True) == 2
    assert function(first=1) == 1
    assert list(inspect.signature(function).parameters) == ["first", "data_parallel"]
    assert function.__doc__ == "Something of a library."


def test_one_that_is_not_is_refused_with_the_nearest_and_the_line() -> None:
    with pytest.raises(KeywordError, match="AP04: function takes no data_paralel") as caught:
        function(1, data_paralel=True)  # type: ignore[call-arg]  # the mistake
    assert caught.value.remedy == "did you mean data_parallel=?"
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"{__file__}:")
    assert "function(1, data_paralel=True)" in caught.value.where
    with pytest.raises(TypeError, match="it takes first, data_parallel"):
        function(1, verbose=True)  # type: ignore[call-arg]  # as where an app asks whether there is such a keyword


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (samba.session.run, "data_paralel", "session.run takes no data_paralel"),
        (samba.session.compile, "optimizer", "session.compile takes no optimizer"),
        (samba.utils.trace_graph, "optimiser", "trace_graph takes no optimiser"),
    ],
)
def test_the_calls_of_apps_are_checked(function: Callable[..., object], name: str, words: str) -> None:
    with pytest.raises(KeywordError, match=f"AP04: {words}"):
        function(**{name: None})


@checks_keywords
def taker(optim: str = "", reduce_on_rdu: bool = False, **others: object) -> str:
    """What takes the vendor's keywords too."""
    return optim


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("reduce_on_rud", "reduce_on_rdu="), ("optimizer", "optim="), ("optims", "optim=")],
)
def test_what_takes_any_keyword_refuses_one_that_is_nearly_its_own(name: str, remedy: str) -> None:
    with pytest.raises(KeywordError, match=f"AP04: taker takes no {name}") as caught:
        taker(**{name: True})  # type: ignore[arg-type]
    assert caught.value.remedy == f"did you mean {remedy}?"
    assert taker("sgd", others=1, num_copies=2, optim_level_of_compiler=3) == "sgd"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (samba.utils.measure_performance, "reduce_on_rud"),
        (samba.utils.measure_sections, "data_paralel"),
        (common_app_driver, "optimizer"),
    ],
)
def test_a_slip_in_a_call_that_takes_any_keyword_is_told(function: Callable[..., object], name: str) -> None:
    with pytest.raises(KeywordError, match=f"AP04: {function.__name__} takes no {name}"):
        function(None, None, 4, **{name: True})


def test_what_has_nothing_near_is_told_all() -> None:
    assert nearest("learning_rat", ["lr", "learning_rate"]) == "did you mean learning_rate?"
    assert nearest("decay", ["lr", "momentum"]) == "it takes lr, momentum"
