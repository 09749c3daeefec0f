"""AP04: arguments that a function of the library does not have."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.samba.notices import KeywordError, checks_keywords, nearest
from sambasim.samba.session import session
from sambasim.samba.utils.common import common_app_driver
from tests.samba.harness import refused

PLAIN = nn.Parameter(torch.ones(2))


@checks_keywords()
def function(first: int, data_parallel: bool = False) -> int:
    """Something of a library."""
    return first + data_parallel


@checks_keywords()
def takes_any(optim: str = "", reduce_on_rdu: bool = False, **others: object) -> str:
    return optim


def test_known_keywords_are_passed_on() -> None:
    assert function(1, data_parallel=True) == 2
    assert function(first=1) == 1
    assert list(inspect.signature(function).parameters) == ["first", "data_parallel"]
    assert function.__doc__ == "Something of a library."
    assert takes_any("sgd", others=1, num_copies=2, optim_level_of_compiler=3) == "sgd"
    with pytest.raises(TypeError, match="can only concatenate str"):  # of the function itself
        function("word")  # type: ignore[arg-type]  # the mistake


def test_another_unknown_keyword_is_ignored_with_one_notice(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert function(1, verbose=True, data_parallel=True) == 2  # type: ignore[call-arg]  # the mistake
    notice, where = capsys.readouterr().err.splitlines()
    assert notice == "notice: function(verbose=…) has no effect: sambasim does not know this keyword"
    assert where.startswith(f"  where: {__file__}:")
    assert torch.equal(samba.zeros(2, rows=3), torch.zeros(2))
    assert torch.equal(samba.SambaTensor(PLAIN, rows=1), PLAIN)  # type: ignore[call-arg]  # the mistake
    notices = capsys.readouterr().err.splitlines()[::2]
    assert [line.split()[1] for line in notices] == ["samba.zeros(rows=…)", "samba.SambaTensor(rows=…)"]


TAKES_TWO = "function got wrong arguments: function() takes from 1 to 2 positional arguments but 3 were given"
TAKES_ONE = "session.start_samba_profile got wrong arguments: Session.start_samba_profile() takes 1 "


@pytest.mark.parametrize(
    ("mistake", "words", "remedy"),
    [
        (lambda: function(1, True, 3), TAKES_TWO, "its arguments are first, data_parallel"),  # type: ignore[call-arg]  # the mistake
        (lambda: function(), "function got wrong arguments: function() missing 1 required", "its arguments"),  # type: ignore[call-arg]  # the mistake
        (lambda: session.start_samba_profile(1), TAKES_ONE, "it takes no arguments"),  # type: ignore[call-arg]  # the mistake
        (lambda: function(1, data_paralel=True), "function takes no data_paralel", "did you mean data_parallel=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: samba.randn(2, 3, batchdim=0), "samba.randn takes no batchdim", "did you mean batch_dim=?"),
        (lambda: samba.SambaTensor(PLAIN, nam="x"), "samba.SambaTensor takes no nam", "did you mean name=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: samba.from_torch_tensor(PLAIN, nam="x"), "samba.from_torch_tensor takes no nam", "name="),  # type: ignore[call-arg]  # the mistake
        (lambda: samba.optim.AdamW([PLAIN], beta=1), "samba.optim.AdamW takes no beta", "did you mean betas=?"),
        (lambda: samba.optim.SGD([PLAIN], learning_rate=1), "samba.optim.SGD takes no learning_rate", "lr=?"),
        (lambda: session.run(data_paralel=None), "session.run takes no data_paralel", "data_parallel=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: session.compile(optimizer=None), "session.compile takes no optimizer", "optimizers=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: samba.utils.trace_graph(optimiser=None), "trace_graph takes no optimiser", "optim"),
        (lambda: samba.utils.measure_performance(reduce_on_rud=1), "measure_performance takes no", "reduce_on_rdu=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: samba.utils.measure_sections(data_paralel=1), "measure_sections takes no", "data_parallel=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: common_app_driver(optimizer=1), "common_app_driver takes no optimizer", "optim=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: takes_any(optims=1), "takes_any takes no optims", "did you mean optim=?"),
    ],
)
def test_wrong_arguments_are_an_error_with_the_nearest_and_the_line(
    mistake: Callable[[], object], words: str, remedy: str
) -> None:
    with refused(KeywordError, f"AP04: {re.escape(words)}", re.escape(remedy)):
        mistake()


def test_no_remedy_offers_what_a_pef_does_not_have() -> None:
    mistakes: dict[str, Callable[..., Any]] = {"diferentiable": samba.optim.SGD, "differentiabel": samba.optim.AdamW}
    for mistake, optimizer in mistakes.items():
        with pytest.raises(KeywordError) as caught:
            optimizer([PLAIN], **{mistake: True})
        assert not re.search(r"\bdifferentiable\b", str(caught.value.remedy))
        assert not optimizer([PLAIN], differentiable=False, foreach=True).defaults["differentiable"]


def test_without_a_similar_name_the_remedy_lists_all() -> None:
    assert nearest("learning_rat", ["lr", "learning_rate"]) == "did you mean learning_rate?"
    assert nearest("decay", ["lr", "momentum"]) == "it takes lr, momentum"
