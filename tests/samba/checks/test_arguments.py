"""The command line compared with the compile, and with what is passed to the session."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from sambasim.errors import LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.runtime.run.stepwise import Mode
from sambasim.samba import context
from sambasim.samba.checks.arguments import (
    Accumulation,
    likely_cause,
    mode_of,
    note_changed,
    note_not_passed_on,
)
from sambasim.samba.checks.findings import Reporter
from sambasim.samba.utils.argparser import parse_app_args

METADATA = {"command": "compile", "batch_size": "8", "hidden": "32", "mapping": "section", "pef_name": "net", "lr": "1"}
TYPED = {"command": "run", "batch_size": 8, "hidden": 32, "mapping": "section", "pef": "net", "lr": 1, "epochs": 3}
COMMAND = ["python", "app.py", "run"]


@pytest.fixture(autouse=True)
def new_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())


def _parsed(*argv: str) -> Namespace:
    """The arguments of an app with one flag of its own."""
    return parse_app_args(argv, common_parser_fn=lambda parser: parser.add_argument("--hidden", type=int, default=32))


def _metadata(*argv: str) -> dict[str, str]:
    return {name: str(value) for name, value in vars(_parsed("compile", *argv)).items()}


def test_equal_arguments_are_no_finding(reporter: Reporter) -> None:
    note_changed(Namespace(**TYPED), METADATA, 8)
    note_changed(Namespace(**TYPED), {}, 8)
    note_changed(None, METADATA, 8)
    note_not_passed_on(None, {}, inference=False)
    own_world_size = Namespace(command="compile", world_size=None)  # a flag of the app, without a default
    note_not_passed_on(own_world_size, {}, inference=False)
    assert likely_cause(Namespace(**TYPED), METADATA) == ""
    assert not reporter.findings


def test_changed_arguments_are_found_and_are_a_likely_cause(reporter: Reporter) -> None:
    typed = Namespace(**{**TYPED, "batch_size": 4, "hidden": 16})
    note_changed(typed, METADATA, 8)
    (finding,) = reporter.findings
    assert finding.words == "AP02: --batch-size was 8 when the PEF was compiled, and is 4 now"
    assert "note_changed(typed, METADATA, 8)" in str(finding.where)
    assert likely_cause(typed, METADATA) == (
        " (AP02: --batch-size was 8 at the compile, and is 4 now; --hidden was 32 at the compile, and is 16 now)"
    )


@pytest.mark.parametrize("typed", ["run --reduce-on-rdu --threads 1 --hidden 16", "measure-sections --hidden 16"])
def test_flags_that_do_not_change_the_graph_are_no_likely_cause(reporter: Reporter, typed: str) -> None:
    metadata = _metadata("--pef-name", "net", "--o0", "--verbose")
    now = _parsed(*typed.split(), "--pef", "net")
    cause = " (AP02: --hidden was 32 at the compile, and is 16 now)"
    assert likely_cause(now, metadata) == cause
    note_changed(now, metadata, 1)
    assert not reporter.findings, "the app's own flags may differ"


def test_a_run_may_have_the_batch_size_of_the_pef_if_the_compile_had_another_flag(reporter: Reporter) -> None:
    note_changed(Namespace(**{**TYPED, "batch_size": 500}), METADATA, 500)
    assert not reporter.findings
    note_changed(Namespace(**{**TYPED, "batch_size": 400}), METADATA, 500)
    assert [finding.code for finding in reporter.findings] == ["AP02"]


def test_a_training_pef_may_predict_and_an_inference_pef_cannot_train(reporter: Reporter) -> None:
    for command in ("measure-performance", "run"):
        note_changed(_parsed(command, "--pef", "net", "--inference"), _metadata(), 1)
    note_changed(_parsed("measure-performance", "--pef", "net"), _metadata("--inference"), 1)
    assert not reporter.findings
    note_changed(_parsed("run", "--pef", "net"), _metadata("--inference"), 1)
    assert [finding.what for finding in reporter.findings] == [
        "--inference was True when the PEF was compiled, and is False now"
    ]


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({}, "--data-parallel, --world-size, --o0"),
        ({"data_parallel": True, "world_size": 2}, "--o0"),
        ({"data_parallel": True, "world_size": 2, "o0": True}, None),
    ],
)
def test_flags_that_are_not_passed_to_the_compiler_are_found(
    reporter: Reporter, config: dict[str, object], flags: str | None
) -> None:
    typed = Namespace(command="compile", data_parallel=True, world_size=2, o0=True, o1=False, inference=False)
    note_not_passed_on(typed, config, inference=False)
    words = [f"DP02: {flags} is on the command line, but not passed to session.compile"] if flags else []
    assert [finding.words for finding in reporter.findings] == words


@pytest.mark.parametrize(
    ("typed", "backwards", "made"), [(1, 4, None), (4, 4, None), (4, 1, "1 backward"), (4, 5, "5 backwards")]
)
def test_another_number_of_backwards_than_was_typed_is_found(
    reporter: Reporter, typed: int, backwards: int, made: str | None
) -> None:
    accumulation = Accumulation(Namespace(grad_accumulation_steps=typed))
    for _ in range(backwards):
        accumulation.note({SectionKind.FWD})
        accumulation.note({SectionKind.FWD, SectionKind.BCKWD})
    accumulation.note({SectionKind.OPT})
    accumulation.note({SectionKind.FWD, SectionKind.BCKWD, SectionKind.OPT})
    words = [f"--grad-accumulation-steps is 4, but the optimizer step follows {made}"] if made else []
    assert [finding.what for finding in reporter.findings] == words


@pytest.mark.parametrize(
    ("typed", "words", "remedy"),
    [
        (False, "--data-parallel is not on the command line", "mpirun -np 2 python app.py run --data-parallel"),
        (True, "session.run has no data_parallel=", "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu="),
    ],
)
def test_the_finding_says_which_argument_for_sync_is_missing(
    reporter: Reporter, typed: bool, words: str, remedy: str
) -> None:
    program: Any = SimpleNamespace(data_parallel=object(), world_size=2)
    arguments = Namespace(data_parallel=typed)
    assert mode_of(program, 2, arguments, COMMAND, data_parallel=False, reduce_on_rdu=False) is Mode.HOST
    (finding,) = reporter.findings
    assert finding.code == "DP01"
    assert finding.what.endswith(words)
    assert finding.remedy.startswith(remedy)


def test_several_replicas_of_a_pef_without_sync_are_an_error() -> None:
    program: Any = SimpleNamespace(data_parallel=None, world_size=1)
    with pytest.raises(LaunchError, match="this PEF has no REDUCE and GATHER sections"):
        mode_of(program, 2, Namespace(data_parallel=True), COMMAND, data_parallel=False, reduce_on_rdu=False)
