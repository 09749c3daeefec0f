"""The command line against the compile, and against what is passed to the session."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from sambasim.errors import LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.runtime.stepwise import Mode
from sambasim.samba import context
from sambasim.samba.checks.arguments import (
    Accumulation,
    as_compiled,
    likely_cause,
    mode_of,
    note_changed,
    note_not_passed_on,
)
from sambasim.samba.checks.findings import Reporter
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


def test_arguments_that_are_the_same_are_no_finding(reporter: Reporter) -> None:
    note_changed(Namespace(**TYPED), METADATA, 8)
    note_changed(Namespace(**TYPED), {}, 8)
    note_changed(None, METADATA, 8)
    assert likely_cause(Namespace(**TYPED), METADATA) == ""
    assert not reporter.findings


def test_what_must_agree_is_told_and_all_that_changed_is_a_likely_cause(reporter: Reporter) -> None:
    typed = Namespace(**{**TYPED, "batch_size": 4, "hidden": 16})
    note_changed(typed, METADATA, 8)
    (finding,) = reporter.findings
    assert finding.words == "AP02: --batch-size was 8 when the PEF was compiled, and is 4 now"
    assert finding.where is not None
    assert "note_changed(typed, METADATA, 8)" in finding.where
    assert likely_cause(typed, METADATA) == (
        " (AP02: --batch-size was 8 at the compile, and is 4 now; of the app's own flags, "
        "--hidden was 32 at the compile, and is 16 now)"
    )
    assert as_compiled(typed, METADATA) == "--batch-size 8"
    assert as_compiled(typed, {**METADATA, "batch_size": "8; curl example.org | sh"}) is None


@pytest.mark.parametrize("typed", ["run --reduce-on-rdu --threads 1 --hidden 16", "measure-sections --hidden 16"])
def test_a_flag_that_says_nothing_of_the_graph_is_no_likely_cause(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    compiled = _parsed("compile", "--pef-name", "net", "--o0", "--verbose")
    metadata = {name: str(value) for name, value in vars(compiled).items()}
    now = _parsed(*typed.split(), "--pef", "net")
    assert (
        likely_cause(now, metadata) == " (AP02: of the app's own flags, --hidden was 32 at the compile, and is 16 now)"
    )
    note_changed(now, metadata, 1)
    assert not reporter.findings, "the app knows itself what its own flags mean"


def test_the_batch_size_of_the_pef_is_no_finding_where_the_compile_had_another(reporter: Reporter) -> None:
    """An app may compile with batches of another size than -b; a run without -b has that of the PEF."""
    note_changed(Namespace(**{**TYPED, "batch_size": 500}), METADATA, 500)
    assert not reporter.findings
    note_changed(Namespace(**{**TYPED, "batch_size": 400}), METADATA, 500)
    assert [finding.code for finding in reporter.findings] == ["AP02"]


def test_a_training_pef_may_be_measured_and_predict_and_one_for_inference_cannot_train(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    metadata = {name: str(value) for name, value in vars(_parsed("compile")).items()}
    for command in ("measure-performance", "run"):
        note_changed(_parsed(command, "--pef", "net", "--inference"), metadata, 1)
    assert not reporter.findings, "the forward of a training PEF"
    note_changed(_parsed("measure-performance", "--pef", "net"), {**metadata, "inference": "True"}, 1)
    assert not reporter.findings, "what is measured of a PEF is not what it was compiled for"
    note_changed(_parsed("run", "--pef", "net"), {**metadata, "inference": "True"}, 1)
    assert [finding.what for finding in reporter.findings] == [
        "--inference was True when the PEF was compiled, and is False now"
    ]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "DP02: --data-parallel, --world-size, --o0 is on the command line, but not passed"),
        (
            {"data_parallel": True, "world_size": 2},
            "DP02: --o0 is on the command line, but not passed",
        ),
        ({"data_parallel": True, "world_size": 2, "o0": True}, None),
    ],
)
def test_flags_that_the_compiler_is_not_told_are_named(
    reporter: Reporter, config: dict[str, object], words: str | None
) -> None:
    typed = Namespace(command="compile", data_parallel=True, world_size=2, o0=True, o1=False, inference=False)
    note_not_passed_on(typed, config, inference=False)
    assert [finding.words for finding in reporter.findings] == (
        [] if words is None else [f"{words} to session.compile"]
    )


def test_an_app_without_a_command_line_is_told_nothing(reporter: Reporter) -> None:
    note_not_passed_on(None, {}, inference=False)
    assert not reporter.findings


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


BACKWARD = {SectionKind.FWD, SectionKind.BCKWD}


@pytest.mark.parametrize(
    ("typed", "backwards", "words"),
    [
        (1, 4, None),
        (4, 4, None),
        (4, 1, "--grad-accumulation-steps is 4, but the optimizer step follows 1 backward"),
        (4, 3, "--grad-accumulation-steps is 4, but the optimizer step follows 3 backwards"),
        (4, 5, "--grad-accumulation-steps is 4, but the optimizer step follows 5 backwards"),
    ],
)
def test_another_number_of_backwards_than_was_typed_is_found(
    reporter: Reporter, typed: int, backwards: int, words: str | None
) -> None:
    accumulation = Accumulation(Namespace(grad_accumulation_steps=typed))
    for _ in range(backwards):
        accumulation.note({SectionKind.FWD})
        accumulation.note(BACKWARD)
    accumulation.note({SectionKind.OPT})
    accumulation.note({*BACKWARD, SectionKind.OPT})
    assert [finding.what for finding in reporter.findings] == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("typed", "words", "remedy"),
    [
        (False, "--data-parallel is not on the command line", "mpirun -np 2 python app.py run --data-parallel"),
        (True, "session.run has no data_parallel=", "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu="),
    ],
)
def test_who_forgot_to_sync_is_told(reporter: Reporter, typed: bool, words: str, remedy: str) -> None:
    program: Any = SimpleNamespace(data_parallel=object(), world_size=2)
    arguments = Namespace(data_parallel=typed)
    command = ["python", "app.py", "run"]
    assert mode_of(program, 2, arguments, command, data_parallel=False, reduce_on_rdu=False) is Mode.HOST
    (finding,) = reporter.findings
    assert finding.code == "DP01"
    assert finding.what.endswith(words)
    assert finding.remedy.startswith(remedy)


def test_a_pef_that_cannot_sync_is_not_told_to() -> None:
    program: Any = SimpleNamespace(data_parallel=None, world_size=1)
    command = ["python", "app.py", "run", "--data-parallel"]
    with pytest.raises(LaunchError, match="this PEF has no REDUCE and GATHER sections"):
        mode_of(program, 2, Namespace(data_parallel=True), command, data_parallel=False, reduce_on_rdu=False)
