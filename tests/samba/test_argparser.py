"""Command lines, YAML files and metadata of PEFs: what an app gets of them, and what is refused in which words."""

import argparse
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import OptionError
from sambasim.samba import process
from sambasim.samba.flags import COMMANDS, FLAGS
from sambasim.samba.utils.argparser import SambaConfig, SNConfig, parse_app_args, parse_yaml_to_args
from sambasim.samba.utils.parser import command_parser

PEF = ["--pef", "net.pef"]


@pytest.fixture(autouse=True)
def _app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["/somewhere/app.py"])
    level = logging.getLogger("sambaflow").level
    yield
    logging.getLogger("sambaflow").setLevel(level)


def refused(*argv: str, **functions: Any) -> OptionError:
    with pytest.raises(OptionError) as caught:
        parse_app_args(argv, **functions)
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
    def add(parser: ArgumentParser) -> None:
        parser.add_argument(added, type=int)

    for typed in ("--hidden-size", "--hidden_size"):
        assert parse_app_args(["compile", typed, "5"], common_parser_fn=add).hidden_size == 5


def adding(part: str) -> Callable[[argparse.ArgumentParser], object]:
    return lambda parser: parser.add_argument(f"--of-{part}", default=part)


def test_an_action_of_the_app_runs_once_for_each_time_it_is_typed() -> None:
    ran = []

    class Note(argparse.Action):
        def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> None:
            ran.append(values)
            setattr(namespace, self.dest, values)

    def add(parser: ArgumentParser) -> None:
        parser.add_argument("--note", action=Note, default="none")

    arguments = parse_app_args(["compile", "--note", "a", "-b", "8"], common_parser_fn=add)
    assert (arguments.note, arguments.batch_size, ran) == ("a", 8, ["a"])


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
    for command, name in (("run", "-ws"), ("run", "--ws"), ("test", "--world-size"), ("run", "--world_size")):
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
        (["compile", "--arch", "sn20"], "invalid choice: 'sn20' (choose from", "python app.py compile --help"),
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
        parse_app_args(["test", "-h"], common_parser_fn=lambda one: one.add_argument("--rows", help="Of the table."))
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


def test_rounding_at_random_without_bf16_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_mutually_exclusive_group_and_a_function_that_reads_yaml(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text("rate: 0.5\n")

    def add_args(args: Any, file: str = str(path)) -> None:
        rate = float(Path(file).read_text().split()[1])
        group: Any = args.add_mutually_exclusive_group()
        group.add_argument("--rate", type=float, default=rate)
        group.add_argument("--schedule")

    assert parse_app_args(["compile"], common_parser_fn=add_args).rate == 0.5
    error = refused("compile", "--rate=1", "--schedule=cosine", common_parser_fn=add_args)
    assert "not allowed with argument" in error.what


LINES: dict[str, dict[str, object]] = {
    'compile -b=1 --pef-name="lenet" --output-folder="pef"': {"pef_name": "lenet", "output_folder": "pef"},
    "compile --pef-name myapp.pef -mb 16 --mapping spatial --num-spatial-batches 16": {"pef_name": "myapp"},
    "compile --pef net --data-parallel -ws 2": {"world_size": 2, "pef_name": "net"},
    "compile --mac-v1 --weight-sharing --enable-conv-tiling --mac-v2 --enable-tiling --output-folder .": {},
    "compile --mac-human-decision a.json --compiler-configs-file b.json --num-tiles 4 --use-sambaloader": {},
    "compile --enable-stoc-rounding --dtype bf16": {"enable_stoc_rounding": True},
    "compile --enable-stochastic-rounding --dtype bf16": {"enable_stoc_rounding": True},
    "compile --inference --log-level error -v --debug": {"inference": True},
    "run --pef out/net/net.pef --data-parallel --reduce-on-rdu --num-iterations 3": {"reduce_on_rdu": True},
    "run -p out/net/net.pef -n 3": {"num_iterations": 3},
    "run --inference --pef=net.pef": {"inference": True},
    "measure-performance --pef=net.pef --ws 8": {},
    "measure-performance --pef=net.pef -ws 8 --inference": {"inference": True},
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_taken(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = line.replace('"', "").split()
    if words[0] != "compile":
        words = [word for word in words if word != "--data-parallel"]  # it needs ranks: see replicas.py
    args = parse_app_args(words)
    assert {name: getattr(args, name) for name in LINES[line]} == LINES[line]


SHARED = """\
command: compile
batch-size: 32
hidden: 64
optimizer:
  lr: 0.5
compile:
  pef_name: net
  resources_scaling_factors: [0.5, 2]
run:
  pef: out/net/net.pef
  batch_size: 16
  epochs: 3
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "app.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_what_the_command_line_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_yaml_to_args(written(tmp_path, SHARED))
    expected = SambaConfig(
        "compile", batch_size=32, pef_name="net", resources_scaling_factors=[0.5, 2.0], hidden=64, optimizer={"lr": 0.5}
    )
    assert vars(config) == vars(expected)
    assert process.current().arguments is config
    assert "--resources-scaling-factors" in capsys.readouterr().err


def test_what_is_under_a_command_holds_for_it_alone(tmp_path: Path) -> None:
    config = parse_yaml_to_args(str(written(tmp_path, SHARED)), "run")
    assert (config.command, config.pef, config.batch_size, config.epochs) == ("run", "out/net/net.pef", 16, 3)
    assert (config.hidden, config.pef_name) == (64, None)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("command: compile\nbatch_size: [1\n", ":3", "this is not plain YAML: expected ',' or ']'"),
        ("command: compile\nx: !!python/object/apply:os.getcwd []\n", ":2", "could not determine a constructor"),
        ("- command\n", "", "this YAML has ['command'] instead of names with values"),
        ("command: compile\nbatch_size: many\n", "", "'many' is not a whole number"),
        ("command: run\n", "", "the following arguments are required: --pef/-p"),
        ("", None, "a command is missing"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, where: str | None, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        parse_yaml_to_args(path)
    assert what in caught.value.what
    assert caught.value.where == (None if where is None else f"{path}{where}")
    with pytest.raises(OptionError, match=r"none\.yaml cannot be read: No such file"):
        parse_yaml_to_args(tmp_path / "none.yaml", "compile")


def test_what_was_typed_counts_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--hidden", type=int, default=4)
        parser.add_argument("-e", "--epochs", type=int, default=1)

    typed = parse_app_args(["run", "--pef=a.pef", "-e2", "--hidden", "4"], common_parser_fn=add)
    text = "batch-size: 32\nlr: 1e-3\nhidden: 64\nepochs: 9\npef: b.pef\nextra: 1\ninference: true\n"
    config = parse_yaml_to_args(written(tmp_path, text), typed)
    assert (config.command, config.pef, config.batch_size, config.inference) == ("run", "a.pef", 32, True)
    assert (config.lr, config.hidden, config.epochs, config.extra) == (1e-3, 4, 2, 1)
    assert set(vars(config)) == {*vars(typed), "extra"}
    assert config.of_app == typed.of_app > {"lr", "hidden", "epochs"}
    assert process.current().arguments is config
    with pytest.raises(OptionError, match="'many' is not a whole number"):
        parse_yaml_to_args(written(tmp_path, "batch_size: many\n"), typed)
