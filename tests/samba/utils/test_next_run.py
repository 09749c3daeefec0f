"""The run command at the end of an app's compile."""

import shlex
from argparse import ArgumentParser

import pytest

from sambasim.samba.utils.parser import NextRun, command_parser


def _for_all(parser: ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=4)
    parser.add_argument("--name")
    parser.add_argument("--sizes", type=int, nargs="+")


def _for_compile(parser: ArgumentParser) -> None:
    parser.add_argument("--note-it", action="store_true")


def _for_run(parser: ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, required=True)


def _next(typed: str, replicas: int = 1) -> str | None:
    parser = command_parser("compile", [_for_all, _for_compile])
    return NextRun(["python", "app.py"], shlex.split(typed), parser, [_for_all]).command("out/net/net.pef", replicas)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("", ""),
        ("-b 32 --pef-name net --hidden 8", "-b 32 --hidden 8"),
        ("--pef_name=net --output-folder=there --inference", "--inference"),
        ("--data-parallel -ws 4 --dtype bf16", "--data-parallel --dtype bf16"),
        ("--o0 --arch sn10 --hidden 10", "--hidden 10"),
        ("--num-tiles -1 -b 4", "-b 4"),
        ("--note-it --sizes 1 2 3 --o1", "--sizes 1 2 3"),
        ("--name --o1x --hidden=3", None),
        ("--name 'two words' -ws 2", "--name 'two words'"),
        ("--batch_size 3", "--batch-size 3"),
    ],
)
def test_what_only_a_compile_has_is_left_out(typed: str, kept: str | None) -> None:
    expected = None if kept is None else " ".join(f"python app.py run {kept} --pef out/net/net.pef".split())
    assert _next(typed) == expected


@pytest.mark.parametrize("typed", ["--data-parallel -ws 4", "-ws 4"])
def test_replicas_are_started_by_mpirun(typed: str) -> None:
    assert _next(typed, 4) == ("mpirun -np 4 python app.py run --data-parallel --pef out/net/net.pef --reduce-on-rdu")


def test_nothing_is_said_where_a_run_wants_more() -> None:
    parser = command_parser("compile", [_for_all])
    assert NextRun(["python", "app.py"], [], parser, [_for_all, _for_run]).command("net.pef", 1) is None


def test_the_pef_of_a_compile_is_not_repeated() -> None:
    words = ["--pef", "net", "-b=2", "--mapping", "spatial"]
    run = NextRun(["python", "app.py"], words, command_parser("compile", []), []).command("out/net/net.pef", 1)
    assert run == "python app.py run -b=2 --mapping spatial --pef out/net/net.pef"


def test_an_app_whose_flags_of_a_run_cannot_be_made_is_told_nothing() -> None:
    def reads_a_file(parser: ArgumentParser) -> None:
        with open("absent.yaml", encoding="utf-8"):
            pass

    assert NextRun(["app.py"], [], command_parser("compile", []), [reads_a_file]).command("net.pef", 1) is None
