"""Keywords that a function of the library does not have."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.errors import OptionError
from sambasim.samba import functional
from sambasim.samba.checks.findings import KeywordError
from sambasim.samba.checks.keywords import checks_keywords, nearest
from sambasim.samba.session import session
from sambasim.samba.utils.common import common_app_driver

PLAIN = nn.Parameter(torch.ones(2))


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


def test_one_that_is_like_no_other_is_left_out_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert function(1, verbose=True, data_parallel=True) == 2  # type: ignore[call-arg]  # the mistake
    notice, where = capsys.readouterr().err.splitlines()
    assert notice == ("notice: function(verbose=…) has no effect: sambasim does not know this keyword")
    assert where.startswith(f"  where: {__file__}:")
    assert "function(1, verbose=True, data_parallel=True)" in where


@pytest.mark.parametrize(
    ("mistake", "words", "remedy"),
    [
        (
            lambda: function(1, True, 3),  # type: ignore[call-arg]  # the mistake
            "function got wrong arguments: too many positional arguments",
            "its arguments are first, data_parallel",
        ),
        (lambda: function(), "function got wrong arguments: missing a required argument: 'first'", "its arguments"),  # type: ignore[call-arg]  # the mistake
        (
            lambda: session.get_tensors_by_name(["x"], 1),  # type: ignore[call-arg]  # the mistake
            "session.get_tensors_by_name got wrong arguments: too many positional arguments",
            "its arguments are names",
        ),
        (
            lambda: session.start_samba_profile(1),  # type: ignore[call-arg]  # the mistake
            "session.start_samba_profile got wrong arguments: too many positional arguments",
            "it takes no arguments",
        ),
    ],
)
def test_positional_arguments_that_do_not_fit_are_refused(
    mistake: Callable[[], object], words: str, remedy: str
) -> None:
    with pytest.raises(KeywordError) as caught:
        mistake()
    assert caught.value.what == f"AP04: {words}"
    assert str(caught.value.where).startswith(f"{__file__}:")
    assert str(caught.value.remedy).startswith(remedy)


def test_a_type_error_of_the_function_itself_stays_one() -> None:
    with pytest.raises(TypeError, match="can only concatenate str"):
        function("word")  # type: ignore[arg-type]  # the mistake


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


@pytest.mark.parametrize(
    ("mistake", "words", "remedy"),
    [
        (lambda: samba.randn(2, 3, batchdim=0), "samba.randn takes no batchdim", "did you mean batch_dim=?"),
        (lambda: samba.zeros(2, 3, nam="x"), "samba.zeros takes no nam", "did you mean name=?"),
        (lambda: samba.randint(9, (2,), dtyp=torch.int32), "samba.randint takes no dtyp", "did you mean dtype=?"),
        (lambda: samba.SambaTensor(PLAIN, nam="x"), "samba.SambaTensor takes no nam", "did you mean name=?"),  # type: ignore[call-arg]  # the mistake
        (lambda: samba.from_torch_tensor(PLAIN, nam="x"), "samba.from_torch_tensor takes no nam", "name="),  # type: ignore[call-arg]
        (lambda: samba.optim.AdamW([PLAIN], beta=1), "samba.optim.AdamW takes no beta", "did you mean betas=?"),
        (
            lambda: samba.optim.SGD([PLAIN], learning_rate=1),
            "samba.optim.SGD takes no learning_rate",
            "did you mean lr=?",
        ),
    ],
    ids=[
        "randn",
        "zeros",
        "randint",
        "SambaTensor",
        "from_torch_tensor",
        "AdamW",
        "SGD-far",
    ],
)
def test_what_makes_tensors_and_optimizers_is_checked(mistake: Callable[[], object], words: str, remedy: str) -> None:
    with pytest.raises(KeywordError, match=f"AP04: {words}") as caught:
        mistake()
    assert remedy in str(caught.value.remedy)


def test_far_keywords_of_what_makes_tensors_and_optimizers_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch.equal(samba.zeros(2, steps=3), torch.zeros(2))
    assert samba.eye(2, layers=3).shape == (2, 2)
    assert torch.equal(samba.SambaTensor(PLAIN, rows=1), PLAIN)  # type: ignore[call-arg]  # the mistake
    notices = capsys.readouterr().err.splitlines()[::2]
    called = (
        "samba.zeros(steps=…)",
        "samba.eye(layers=…)",
        "samba.SambaTensor(rows=…)",
    )
    assert [notice.removeprefix("notice: ").partition(" has no effect")[0] for notice in notices] == [*called]


@pytest.mark.parametrize("maker", [*functional._MAKERS, "randn", "randint"])
def test_every_maker_takes_the_keywords_of_torch(maker: str) -> None:
    packet = getattr(torch.ops.aten, maker)
    named = {one.name for overload in packet.overloads() for one in getattr(packet, overload)._schema.arguments}
    of_torch = {"input" if name == "self" else name for name in named}
    of_torch -= {"input"} if maker == "normal" else {"out"} if "_like" in maker else set()  # Tensor's own, and none's
    beside = {"randn": ("size", "generator", "out"), "randint": ("low", "high", "size", "generator", "out")}
    known = {*(functional._MAKERS.get(maker) or beside[maker]), *functional._OF_EVERY_MAKER}
    assert known - {"requires_grad"} == of_torch - {"requires_grad"}


@pytest.mark.parametrize(
    ("optimizer", "mistakes"),
    [(samba.optim.SGD, ["maximise"]), (samba.optim.Adam, ["maximise", "amsgrd"]), (samba.optim.AdamW, ["amsgrd"])],
)
def test_no_remedy_offers_what_a_pef_does_not_have(
    optimizer: Callable[..., samba.optim.SGD], mistakes: list[str]
) -> None:
    for mistake in mistakes:
        with pytest.raises(KeywordError) as caught:
            optimizer([PLAIN], **{mistake: True})
        assert not {"maximize=?", "amsgrad=?"}.intersection(str(caught.value.remedy).split())
        assert not {"maximize", "amsgrad", "capturable"}.intersection(str(caught.value.remedy).split(", "))
    assert not optimizer([PLAIN], maximize=False).defaults["maximize"]
    with pytest.raises(OptionError, match="the optimizer of a PEF does not have maximize"):
        optimizer([PLAIN], maximize=True)


def test_what_torch_takes_is_passed_on_to_it() -> None:
    assert samba.ones(size=(2, 3), dtype=torch.float64, name="x").dtype is torch.float64
    assert samba.optim.SGD([PLAIN], lr=0.1, foreach=True).defaults["foreach"]


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
