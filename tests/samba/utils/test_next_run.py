"""The command that runs what was compiled, where the app or the command line is unusual."""

from argparse import ArgumentParser

from sambasim.samba.utils.next_run import NextRun
from sambasim.samba.utils.parser import command_parser


def test_the_pef_of_a_compile_is_not_repeated() -> None:
    words = ["--pef", "net", "-b=2", "--mapping", "spatial"]
    run = NextRun(["python", "app.py"], words, command_parser("compile", []), []).command("out/net/net.pef", 1)
    assert run == "python app.py run -b=2 --mapping spatial --pef out/net/net.pef"


def test_an_app_whose_flags_of_a_run_cannot_be_made_is_told_nothing() -> None:
    def reads_a_file(parser: ArgumentParser) -> None:
        with open("absent.yaml", encoding="utf-8"):
            pass

    assert NextRun(["app.py"], [], command_parser("compile", []), [reads_a_file]).command("net.pef", 1) is None
