"""The command line compared with the compile, and with what is passed to the session."""

import shlex
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sambasim.errors import LaunchError
from sambasim.runtime.transports.connect import Way
from sambasim.samba import process
from sambasim.samba.checks.replicas import likely_cause, mode_of, note_changed, note_not_passed_on
from sambasim.samba.process import Reporter
from sambasim.samba.utils.argparser import SambaConfig, parse_app_args

METADATA = {"command": "compile", "batch_size": "8", "hidden": "32", "mapping": "section", "pef_name": "net", "lr": "1"}
TYPED = {"command": "run", "batch_size": 8, "hidden": 32, "mapping": "section", "pef": "net", "lr": 1, "epochs": 3}


def _typed(arguments: dict[str, Any]) -> None:
    process.current().arguments = SambaConfig(Namespace(**arguments))


def _hidden(parser: ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=32)


def _parsed(*argv: str, add: Callable[[ArgumentParser], object] = _hidden) -> Namespace:
    """The arguments of an app, by default with one flag of its own."""
    return parse_app_args(argv, common_parser_fn=add)


def test_equal_arguments_are_no_finding(reporter: Reporter) -> None:
    note_changed(METADATA, 8)  # without a command line
    note_not_passed_on({}, inference=False)
    _typed(TYPED)
    note_changed(METADATA, 8)
    note_changed({}, 8)
    assert likely_cause(METADATA) == ("", "")
    _typed({"command": "compile", "world_size": None})  # a flag of the app, without a default
    note_not_passed_on({}, inference=False)
    parse_app_args(["compile", "--arch", "v2"], common_parser_fn=lambda parser: parser.add_argument("--arch"))
    note_not_passed_on({}, inference=False)
    assert not reporter.findings


@pytest.mark.parametrize(
    ("typed", "batch_size", "found", "cause"),
    [
        ({"batch_size": 4, "hidden": 16}, 8, "batch_size was 8 at the compile, and is 4 now",
         "batch_size was 8 at the compile, and is 4 now; hidden was 32 at the compile, and is 16 now"),
        ({"batch_size": 500}, 500, "", "batch_size was 8 at the compile, and is 500 now"),  # that of the PEF
        ({"batch_size": 400}, 500, "batch_size was 8 at the compile, and is 400 now",
         "batch_size was 8 at the compile, and is 400 now"),
    ],
)  # fmt: skip
def test_changed_arguments_are_found_and_are_a_likely_cause(
    reporter: Reporter, typed: dict[str, int], batch_size: int, found: str, cause: str
) -> None:
    _typed({**TYPED, **typed})
    note_changed(METADATA, batch_size)
    assert [finding.words for finding in reporter.findings] == ([f"AP02: {found}"] if found else [])
    assert all("note_changed(METADATA, batch_size)" in str(finding.where) for finding in reporter.findings)
    assert likely_cause(METADATA)[0] == f" (AP02: {cause})"


HIDDEN = " (AP02: --hidden was 32 at the compile, and is 16 now)"


@pytest.mark.parametrize(
    ("compiled", "typed", "cause", "found"),
    [
        ("--pef-name net --o0 --verbose", "run --reduce-on-rdu --threads 1 --hidden 16", HIDDEN, False),
        ("--pef-name net --o0 --verbose", "measure-sections --hidden 16", HIDDEN, False),
        ("", "measure-performance --inference", "", False),  # a training PEF predicts too
        ("", "run --inference", "", False),
        ("--inference", "measure-performance", "", False),
        ("--inference", "run", " (AP02: --inference was True at the compile, and is False now)", True),
    ],
)
def test_flags_of_a_command_line_are_compared(
    reporter: Reporter, compiled: str, typed: str, cause: str, found: bool
) -> None:
    metadata = {name: str(value) for name, value in vars(_parsed("compile", *compiled.split())).items()}
    _parsed(*typed.split(), "--pef", "net")
    assert likely_cause(metadata)[0] == cause
    note_changed(metadata, 1)
    assert bool(reporter.findings) == found, "the app's own flags may differ"


def _shaping(parser: ArgumentParser) -> None:
    parser.add_argument("--hidden", "-H", type=int, default=32)
    parser.add_argument("--no-mask", dest="mask", action="store_false")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--bias", action=BooleanOptionalAction, default=True)
    parser.add_argument("--sizes", nargs="+", type=int, default=[4])
    parser.add_argument("--name")
    parser.add_argument("-v", action="count", default=0)
    parser.add_argument("--only", nargs="*", default=["all"])
    parser.add_argument("--again", action="append")
    parser.add_argument("data", nargs="?")


@pytest.mark.parametrize(
    ("compiled", "typed", "remedy"),
    [
        ("--hidden 12", "", "run it with --hidden 12, or compile again with --hidden 32"),
        ("-b 32", "-b 16", "run it with -b 32, or compile again with -b 16"),
        ("-H 12 --deep", "-H=16 --no-mask", "run it with --deep -H 12 and without --no-mask, or compile again without "
         "--deep and with -H 16 --no-mask"),
        ("--no-bias --sizes 3 5", "", "run it with --no-bias --sizes 3 5, or compile again with --bias --sizes 4"),
        ("--sizes 4 --name a_b", "--name 'a b'", "run it with --name a_b, or compile again with --name 'a b'"),
        ("", "--name x", "run it without --name, or compile again with --name x"),
        ("-vv", "", "run it with -v -v, or compile again without -v"),
        ("--only", "--only 'a, b' c", "run it with --only, or compile again with --only 'a, b' c"),
        ("--again a", "--again=-b --again c", "run it with --again a, or compile again with --again=-b --again c"),
        ("--sizes -3", "--sizes -3 -5", "run it with --sizes=-3, or compile again with --sizes -3 -5"),
        ("a", "b", "run it with a, or compile again with b"),
    ],
)  # fmt: skip
def test_the_remedy_is_what_to_type(compiled: str, typed: str, remedy: str) -> None:
    metadata = {name: str(value) for name, value in vars(_parsed("compile", *compiled.split(), add=_shaping)).items()}
    _parsed("run", "--pef", "net", *shlex.split(typed), add=_shaping)
    assert likely_cause(metadata)[1] == remedy


@pytest.mark.parametrize(
    ("typed", "passed", "flags"),
    [
        ("--data-parallel -ws 2 --o0", [], "--data-parallel, --world-size, --o0"),
        ("--data-parallel -ws 2 --o0", ["data_parallel", "world_size"], "--o0"),
        ("--data-parallel -ws 2 --o0", ["data_parallel", "world_size", "o0"], None),
        ("--arch sn10 --num-tiles 4 --gradient-groups parameter", [], "--arch, --gradient-groups, --num-tiles"),
        ("--dtype bf16 --enable-stoc-rounding --pef-name net -b 8 --verbose", ["dtype"], "--enable-stoc-rounding"),
    ],
)
def test_flags_that_are_not_passed_to_the_compiler_are_found(
    reporter: Reporter, typed: str, passed: list[str], flags: str | None
) -> None:
    arguments = _parsed("compile", *typed.split())
    note_not_passed_on({name: getattr(arguments, name) for name in passed}, inference=False)
    words = [f"DP02: {flags} is on the command line, but not passed to session.compile"] if flags else []
    assert [finding.words for finding in reporter.findings] == words


@pytest.mark.parametrize(
    ("typed", "words", "remedy"),
    [
        (False, "--data-parallel is not on the command line", "mpirun -np 2 "),
        (True, "session.run has no data_parallel=", "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu="),
    ],
)
def test_the_finding_says_which_argument_is_missing(reporter: Reporter, typed: bool, words: str, remedy: str) -> None:
    program: Any = SimpleNamespace(data_parallel=True, world_size=2)
    _typed({"data_parallel": typed})
    reporter.on_demand = True
    assert mode_of(program, 1, data_parallel=False, reduce_on_rdu=False) is Way.IN_PROCESS
    assert mode_of(program, 2, data_parallel=False, reduce_on_rdu=False) is Way.HOST_REPLICATED
    (finding,) = reporter.findings
    assert (finding.code, finding.what.endswith(words), finding.remedy.startswith(remedy)) == ("DP01", True, True)


def test_several_replicas_of_a_pef_without_sync_are_an_error() -> None:
    program: Any = SimpleNamespace(data_parallel=False, world_size=1)
    _typed({"data_parallel": True})
    with pytest.raises(LaunchError, match="this PEF has no REDUCE and GATHER sections"):
        mode_of(program, 2, data_parallel=False, reduce_on_rdu=False)
