"""The command line against that of the compile."""

from argparse import Namespace

import pytest

from sambasim.samba import context
from sambasim.samba.checks import arguments as module
from sambasim.samba.checks.arguments import as_compiled, likely_cause, note_changed, note_not_passed_on
from sambasim.samba.checks.telling import Telling
from sambasim.samba.utils.argparser import parse_app_args

METADATA = {
    "command": "compile",
    "batch_size": "8",
    "hidden": "32",
    "mapping": "section",
    "pef_name": "net",
    "lr": "0.1",
}
TYPED = {"command": "run", "batch_size": 8, "hidden": 32, "mapping": "section", "pef": "net", "lr": 0.1, "epochs": 3}


def _parsed(*argv: str) -> Namespace:
    """What an app with one flag of its own gets."""
    return parse_app_args(argv, common_parser_fn=lambda parser: parser.add_argument("--hidden", type=int, default=32))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Telling:
    own = Telling(on_demand=True)
    monkeypatch.setattr(module, "telling", own)
    return own


def test_arguments_that_are_the_same_are_no_finding(told: Telling) -> None:
    note_changed(Namespace(**TYPED), METADATA, 8)
    note_changed(Namespace(**TYPED), {}, 8)
    note_changed(None, METADATA, 8)
    assert likely_cause(Namespace(**TYPED), METADATA) == ""
    assert not told.findings


def test_what_must_agree_is_told_and_all_that_changed_is_a_likely_cause(told: Telling) -> None:
    typed = Namespace(**{**TYPED, "batch_size": 4, "hidden": 16})
    note_changed(typed, METADATA, 8)
    (finding,) = told.findings
    assert finding.words == "AP02: --batch-size was 8 when the PEF was compiled, and now is 4"
    assert finding.where is not None
    assert "note_changed(typed, METADATA, 8)" in finding.where
    assert likely_cause(typed, METADATA) == (
        " (AP02: --batch-size was 8 at the compile, and is 4; of the app's own, "
        "--hidden was 32 at the compile, and is 16)"
    )
    assert as_compiled(typed, METADATA) == "--batch-size 8"
    assert as_compiled(typed, {**METADATA, "batch_size": "8; curl example.org | sh"}) is None


@pytest.mark.parametrize("typed", ["run --reduce-on-rdu --threads 1 --hidden 16", "measure-sections --hidden 16"])
def test_a_flag_that_says_nothing_of_the_graph_is_no_likely_cause(
    told: Telling, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    compiled = _parsed("compile", "--pef-name", "net", "--o0", "--verbose")
    metadata = {name: str(value) for name, value in vars(compiled).items()}
    now = _parsed(*typed.split(), "--pef", "net")
    assert likely_cause(now, metadata) == " (AP02: of the app's own, --hidden was 32 at the compile, and is 16)"
    note_changed(now, metadata, 1)
    assert not told.findings, "the app knows itself what its own flags mean"


def test_the_batch_size_of_the_pef_is_no_finding_where_the_compile_had_another(told: Telling) -> None:
    """An app may compile with batches of another size than -b; a run without -b has that of the PEF."""
    note_changed(Namespace(**{**TYPED, "batch_size": 500}), METADATA, 500)
    assert not told.findings
    note_changed(Namespace(**{**TYPED, "batch_size": 400}), METADATA, 500)
    assert [finding.code for finding in told.findings] == ["AP02"]


def test_a_training_pef_may_be_measured_and_predict_and_one_for_inference_cannot_train(
    told: Telling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    metadata = {name: str(value) for name, value in vars(_parsed("compile")).items()}
    for command in ("measure-performance", "run"):
        note_changed(_parsed(command, "--pef", "net", "--inference"), metadata, 1)
    assert not told.findings, "the forward of a training PEF"
    note_changed(_parsed("measure-performance", "--pef", "net"), {**metadata, "inference": "True"}, 1)
    assert not told.findings, "what is measured of a PEF is not what it was compiled for"
    note_changed(_parsed("run", "--pef", "net"), {**metadata, "inference": "True"}, 1)
    assert [finding.what for finding in told.findings] == [
        "--inference was True when the PEF was compiled, and now is False"
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "DP02: --data-parallel, --world-size, --o0 was typed, but session.compile is not told"),
        ({"data_parallel": True, "world_size": 2}, "DP02: --o0 was typed, but session.compile is not told"),
        ({"data_parallel": True, "world_size": 2, "o0": True}, None),
    ],
)
def test_flags_that_the_compiler_is_not_told_are_named(
    told: Telling, config: dict[str, object], words: str | None
) -> None:
    typed = Namespace(command="compile", data_parallel=True, world_size=2, o0=True, o1=False, inference=False)
    note_not_passed_on(typed, config, inference=False)
    assert [finding.words for finding in told.findings] == ([] if words is None else [words])


def test_an_app_without_a_command_line_is_told_nothing(told: Telling) -> None:
    note_not_passed_on(None, {}, inference=False)
    assert not told.findings


@pytest.mark.parametrize(
    ("compiled", "run", "told"),
    [
        ([], ["-b", "4"], "--batch-size 1"),
        (["--inference"], [], "--inference"),
        ([], ["--inference"], None),
        ([], ["--grad-accumulation-steps", "2", "--hidden", "16"], None),
    ],
)
def test_the_remedy_is_what_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], run: list[str], told: str | None
) -> None:
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    metadata = {name: str(value) for name, value in vars(_parsed("compile", *compiled)).items()}
    assert as_compiled(_parsed("run", "--pef", "net", *run), metadata) == told
    if told is not None:
        assert as_compiled(_parsed("run", "--pef", "net", *told.split()), metadata) is None
