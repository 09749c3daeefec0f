"""`parse_app_args`: what an app gets, and what is refused in which words."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from sambasim.errors import OptionError
from sambasim.samba import context, notices
from sambasim.samba.utils.argparser import SambaConfig, SNConfig, parse_app_args
from sambasim.samba.utils.flags import COMMANDS, FLAGS
from sambasim.samba.utils.parser import command_parser

PEF = ["--pef", "net.pef"]


@pytest.fixture(autouse=True)
def _app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["/somewhere/app.py"])
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())
    level = logging.getLogger("sambaflow").level
    yield
    logging.getLogger("sambaflow").setLevel(level)


def refused(*argv: str) -> OptionError:
    with pytest.raises(OptionError) as caught:
        parse_app_args(argv)
    return caught.value


def test_every_flag_of_the_library_has_a_value_on_every_command() -> None:
    compiled, run = parse_app_args(["compile"]), parse_app_args(["run", *PEF])
    destinations = {flag.destination for flag in FLAGS}
    assert set(vars(compiled)) == set(vars(run)) == destinations | {"command"}
    assert (compiled.command, compiled.pef) == ("compile", None)
    assert (run.command, run.pef, run.pef_name) == ("run", "net.pef", None)


def test_values_are_parsed() -> None:
    words = "compile --pef-name net -b 32 --data-parallel -ws 2 --o0 --num-tiles 4 --resources-scaling-factors 0.5 2"
    arguments = parse_app_args(words.split())
    assert (arguments.pef_name, arguments.batch_size, arguments.world_size) == ("net", 32, 2)
    assert (arguments.data_parallel, arguments.o0, arguments.o1, arguments.num_tiles) == (True, True, False, 4)
    assert arguments.resources_scaling_factors == [0.5, 2.0]


@pytest.mark.parametrize("added", ["--hidden-size", "--hidden_size"])
def test_both_spellings_of_an_apps_flag_are_taken(added: str) -> None:
    for typed in ("--hidden-size", "--hidden_size"):
        arguments = parse_app_args(
            ["compile", typed, "5"], common_parser_fn=lambda parser: parser.add_argument(added, type=int)
        )
        assert arguments.hidden_size == 5


def adding(part: str) -> Callable[[argparse.ArgumentParser], object]:
    return lambda parser: parser.add_argument(f"--of-{part}", default=part)


def test_each_function_adds_its_flags_to_its_command() -> None:
    for command in COMMANDS:
        argv = [command, *PEF]
        arguments = parse_app_args(argv, False, adding("common"), adding("compile"), adding("test"), adding("run"))
        added = {"of_common", f"of_{command}"} if command in ("compile", "test", "run") else {"of_common"}
        assert {name for name in vars(arguments) if name.startswith("of_")} == added


@pytest.mark.parametrize("added", ["--batch-size", "--batch_size"])
def test_an_apps_flag_of_the_same_name_wins_with_its_default(added: str) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument_group("data").add_argument(added, type=int, default=64)

    for typed, value in (([], 64), (["-b", "8"], 8), (["--batch-size", "8"], 8), (["--batch_size=8"], 8)):
        assert parse_app_args(["compile", *typed], common_parser_fn=add).batch_size == value


def test_a_required_flag_that_an_app_has_again_is_as_the_app_says() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--pef", default="own.pef")

    for typed, pef in (([], "own.pef"), (["-p", "x.pef"], "x.pef"), (["--pef", "x.pef"], "x.pef")):
        assert parse_app_args(["run", *typed], run_parser_fn=add).pef == pef


def test_the_number_of_replicas_is_for_mpirun_to_say() -> None:
    for command, name in (
        ("run", "-ws"),
        ("run", "--ws"),
        ("test", "--world-size"),
        ("measure-sections", "--world_size"),
    ):
        error = refused(command, *PEF, name, "4")
        assert f"{command} has no flag {name}: it is a flag of compile" in error.what
        assert error.remedy == f"leave {name} out"


@pytest.mark.parametrize(
    ("argv", "what", "remedy"),
    [
        ([], "a command is missing; commands are compile, run, test,", "python app.py compile --help"),
        (["compil"], "'compil' is not a command; commands are compile, run, test,", "python app.py compile --help"),
        (["run"], "the following arguments are required: --pef/-p", "python app.py run --help"),
        (["compile", "--bach-size", "3"], "compile has no flag --bach-size", "did you mean --batch-size?"),
        (["run", *PEF, "--o0"], "run has no flag --o0: it is a flag of compile", "leave --o0 out"),
        (["compile", "more"], "unexpected argument more", "python app.py compile --help"),
        (["compile", "-b", "0"], "'0' is not a whole number of at least 1", "python app.py compile --help"),
        (["measure-sections", *PEF, "--min-duration", "nan"], "'nan' is not a number of seconds", "--help"),
        (["measure-sections", *PEF, "--min-duration", "-1"], "'-1' is not a number of seconds", "--help"),
        (["compile", "--mapping", "flat"], "invalid choice: 'flat'", "python app.py compile --help"),
        (["compile", "--log-level", "loud"], "'loud' is no logging level", "python app.py compile --help"),
        (["compile", "--o0", "--o1"], "--o0 and --o1 exclude each other", "leave out all but --o1"),
        (["compile", "--dtype", "bf8"], "invalid choice: 'bf8'", "python app.py compile --help"),
    ],
)  # fmt: skip
def test_what_is_typed_wrong_is_told_with_what_to_type_instead(argv: list[str], what: str, remedy: str) -> None:
    error = refused(*argv)
    assert what in error.what
    assert remedy in (error.remedy or "")


def test_help_of_a_command_has_the_apps_flags_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_app_args(
            ["test", "-h"], common_parser_fn=lambda parser: parser.add_argument("--rows", help="Of the table.")
        )
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python app.py test [-h] ")
    assert "Of the table." in text
    assert text.endswith("examples:\n  python app.py test --pef out/net/net.pef -b 32\n")


def test_examples_in_help_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compile", "run", "test", "measure-performance", "measure-sections"):
        with pytest.raises(SystemExit):
            parse_app_args([command, "-h"])
        lines = capsys.readouterr().out.rpartition("examples:\n")[2].splitlines()
        assert lines
        for line in lines:
            words = line.partition("app.py ")[2].replace("--data-parallel", "").split()
            assert parse_app_args(words).command == command


def test_flags_that_change_nothing_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    parse_app_args(["compile", "--mac-human-decision", "x.json", "--num-spatial-batches=2", "-b", "4"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "notice: accepted, without an effect here:\n"
        "  --num-spatial-batches: batches run one after another\n"
        "  --mac-human-decision: sambasim cuts and places sections by its own rules\n"
    )


def test_the_notice_of_flags_without_effect_leaves_the_apps_own_out(capsys: pytest.CaptureFixture[str]) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--debug", action="store_true")
        parser.add_argument("--dtype", default="bf16")

    arguments = parse_app_args(["compile", "--debug", "--visualize"], common_parser_fn=add)
    assert (arguments.debug, arguments.dtype) == (True, "bf16")
    err = capsys.readouterr().err
    assert "--visualize" in err
    assert "--debug" not in err


def test_the_level_of_the_log_is_set() -> None:
    parse_app_args(["compile", "--log-level", "error"])
    assert logging.getLogger("sambaflow").level == logging.ERROR


def test_a_config_made_from_keywords_is_what_the_command_line_gives() -> None:
    typed = parse_app_args(["run", *PEF, "-b", "8", "--inference"])
    assert vars(SambaConfig("run", pef="net.pef", batch_size=8, inference=True)) == vars(typed)


def test_a_config_holds_an_apps_own_values_and_checks_the_librarys() -> None:
    assert SambaConfig("compile", hidden={"sizes": [1, 2]}, pef_name="net").hidden == {"sizes": [1, 2]}
    with pytest.raises(OptionError, match="'0' is not a whole number"):
        SambaConfig("compile", batch_size=0)
    with pytest.raises(OptionError, match="--inference must be true or false, not 'yes'"):
        SambaConfig("compile", inference="yes")


def test_argv_that_is_no_list_of_words_is_refused_with_the_line_of_the_app() -> None:
    for wrong in (argparse.Namespace(batch_size=1), "compile -b 1"):
        with pytest.raises(OptionError, match=f"must be a list of words, not {type(wrong).__name__}") as caught:
            parse_app_args(argv=wrong)  # type: ignore[arg-type]  # the mistake
        assert "parse_app_args(argv=wrong)" in (caught.value.where or "")
        assert caught.value.remedy == "parse_app_args(argv=sys.argv[1:], …)"


def test_rounding_at_random_without_bf16_has_no_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_SAID", set())
    typed = ["compile", "--enable-stochastic-rounding"]
    assert parse_app_args([*typed, "--dtype", "bf16"]).enable_stoc_rounding is True
    assert capsys.readouterr().err == ""
    assert parse_app_args(typed).enable_stoc_rounding is False
    assert "notice: --enable-stoc-rounding has no effect: " in capsys.readouterr().err
    assert parse_app_args([*typed, "--dtype=bf16", "--inference"]).enable_stoc_rounding is False


def test_compile_takes_the_name_of_pef(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_app_args(["compile", "--pef", "out/net/net.pef"]).pef_name == "net"
    assert capsys.readouterr().err == "notice: --pef is for the other commands; compile writes the PEF net\n"
    assert parse_app_args(["compile", "-p", "net", "--pef-name", "other"]).pef_name == "other"


def test_a_config_is_made_from_what_was_parsed() -> None:
    arguments = parse_app_args(["compile", "-b", "8"])
    config = SambaConfig(arguments, SNConfig)
    assert config.get_all_params() == vars(config) == vars(arguments)
    assert SambaConfig(arguments, SNConfig(batch_size=1, hidden=4), epochs=2).get_all_params() == {
        **vars(arguments), "hidden": 4, "epochs": 2,
    }  # fmt: skip


def test_a_pef_that_is_not_named_is_named_by_time_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20240131_235959")
    monkeypatch.setattr("os.getpid", lambda: 4711)
    (flag,) = [flag for flag in FLAGS if flag.names == ("--pef-name",)]
    assert flag.default_for("compile") == "20240131_235959_4711"
    assert flag.default_for("run") is None


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_each_flag_of_a_command_what_it_means_and_no_other(command: str) -> None:
    text = " ".join(command_parser(command, ()).format_help().split())
    for flag in FLAGS:
        if command in flag.commands:
            assert flag.meaning in text
        else:
            assert f" {flag.names[0]} " not in text


def test_help_puts_flags_that_change_nothing_apart() -> None:
    text = command_parser("compile", ()).format_help()
    effective, _, inert = text.partition("flags that are accepted, and have no effect here:")
    assert "\n  --data-parallel  " in effective
    assert "\n  --optim-level LEVEL" in inert
    assert "\n  --optim-level LEVEL" not in effective
