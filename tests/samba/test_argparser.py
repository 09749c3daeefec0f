"""Command lines, YAML files and metadata of PEFs: what an app gets of them, and what is refused in which words."""

import argparse
import copy
import logging
import pickle
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import OptionError
from sambasim.samba import process
from sambasim.samba.flags import COMMANDS, FLAGS
from sambasim.samba.utils.argparser import SambaConfig, SNConfig, _note_unmeasured, parse_app_args, parse_yaml_to_args
from tests.samba.harness import refused

PEF = ["--pef", "net.pef"]


@pytest.fixture(autouse=True)
def _app(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/app.py"])
    caplog.set_level(logging.getLogger("sambaflow").level, "sambaflow")  # put back after the test


def adding(*names: str, **options: Any) -> Callable[[ArgumentParser], object]:
    return lambda parser: parser.add_argument(*names, **options)


def test_every_flag_of_the_library_has_a_value_on_every_command() -> None:
    compiled, run = parse_app_args(["compile"]), parse_app_args(["run", *PEF])
    assert set(vars(compiled)) == set(vars(run)) == {*(flag.destination for flag in FLAGS), "command"}
    assert (compiled.command, compiled.pef) == ("compile", None)
    assert (run.command, run.pef, run.pef_name) == ("run", "net.pef", None)


LINES: dict[str, dict[str, object]] = {
    "compile --pef-name net -b 32 -ws 2 --data-parallel": {"pef_name": "net", "batch_size": 32, "world_size": 2},
    "compile --o0 --num-tiles 4 --dtype bf16": {"o0": True, "o1": False, "num_tiles": 4, "data_parallel": False},
    "compile --resources-scaling-factors 0.5 2 -b=1": {"resources_scaling_factors": [0.5, 2.0], "batch_size": 1},
    "compile --pef-name myapp.pef -mb 16 --mapping spatial --num-spatial-batches 16": {"pef_name": "myapp"},
    "compile --mac-v1 --weight-sharing --enable-conv-tiling --mac-v2 --enable-tiling --output-folder .": {},
    "compile --compiler-configs-file b.json --use-sambaloader": {},
    "compile --enable-stochastic-rounding --dtype=bf16 --inference": {"enable_stoc_rounding": False},
    "compile --inference --log-level error -v --debug": {"inference": True},
    "compile -p net --pef-name other": {"pef_name": "other"},
    "run --pef out/net/net.pef --reduce-on-rdu --num-iterations 3": {"reduce_on_rdu": True, "num_iterations": 3},
    "run -p out/net/net.pef -n 3": {"num_iterations": 3},
    "run --inference --pef=net.pef": {"inference": True},
    "measure-performance --pef=net.pef --ws 8": {},
    "measure-performance --pef=net.pef -ws 8 --inference": {"inference": True},
}


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_taken(line: str) -> None:
    arguments = parse_app_args(line.split())
    assert {name: getattr(arguments, name) for name in LINES[line]} == LINES[line]
    assert "--log-level" not in line or logging.getLogger("sambaflow").level == logging.ERROR


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (
            "--mac-human-decision x.json --num-spatial-batches=2 --own -b 4",
            "accepted, without an effect here:\n  --num-spatial-batches: batches run one after another\n"
            "  --mac-human-decision: sambasim cuts and places sections by its own rules\n",
        ),
        ("--visualize --debug --dtype fp32", "accepted, without an effect here:\n  --visualize: "),
        ("--pef out/net/net.pef", "--pef is for the other commands; compile writes the PEF net\n"),
        ("--enable-stochastic-rounding", "--enable-stoc-rounding has no effect: only optimizer steps with --dtype "),
        ("--enable-stochastic-rounding --dtype bf16", ""),
    ],
)
def test_flags_that_change_nothing_are_told_once(line: str, notice: str, capsys: pytest.CaptureFixture[str]) -> None:
    def add(parser: ArgumentParser) -> None:
        parser.add_argument("--own", action="store_true")
        if "--debug" in line:  # the app's own, then
            parser.add_argument("--debug", action="store_true")

    arguments = parse_app_args(["compile", *line.split()], common_parser_fn=add)
    assert (arguments.debug, arguments.enable_stoc_rounding) == ("--debug" in line, "bf16" in line)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"notice: {notice}") if notice else err == ""
    assert "--debug" not in err
    assert arguments.pef_name == "net" or "--pef" not in line


def test_both_spellings_of_an_apps_flag_are_taken_and_its_action_runs_once() -> None:
    ran = []

    class Note(argparse.Action):
        def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> None:
            ran.append(values)
            setattr(namespace, self.dest, values)

    for added in ("--hidden-size", "--hidden_size"):
        for typed in ("--hidden-size", "--hidden_size"):
            add = adding(added, type=int, action=Note, default=4)
            arguments = parse_app_args(["compile", typed, "5", "-b", "8"], common_parser_fn=add)
            assert (arguments.hidden_size, arguments.batch_size) == (5, 8)
    assert ran == [5] * 4


def test_each_function_adds_its_flags_to_its_command() -> None:
    functions = [adding(f"--of-{part}", default=part) for part in ("common", "compile", "test", "run")]
    for command in COMMANDS:
        arguments = parse_app_args([command, *PEF], False, *functions)
        added = {"of_common", f"of_{command}"} if command in ("compile", "test", "run") else {"of_common"}
        assert {name for name in vars(arguments) if name.startswith("of_")} == added


def test_a_command_that_has_measured_nothing_says_what_measures(capsys: pytest.CaptureFixture[str]) -> None:
    for command, has_run in (("test", False), ("measure-sections", True), ("measure-sections", False)):
        parse_app_args([command, *PEF])
        process.current().has_run = has_run
        assert capsys.readouterr().err == ""
        _note_unmeasured()
    notice = "notice: measure-sections has measured nothing\n  try:   samba.utils.common.common_app_driver("
    assert capsys.readouterr().err.startswith(notice)


def needing(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True)
    parser.add_argument("--again", action="append")
    parser.add_argument("data", nargs="?")


@pytest.mark.parametrize(
    ("compiled", "run"),
    [
        ("--pef-name net -ws 2 --o0", "--pef PEF --model MODEL"),
        ("-b 16 --n_hidden=8 --only x --model a_b", "--pef PEF --model a_b -b 16 --n_hidden 8"),
        ("--n-hidden=-8 x --sizes 1 2 --again a --again b",
         "x --pef PEF --model MODEL --n-hidden=-8 --sizes 1 2 --again a --again b"),
        ("--sizes -1 -2", "--pef PEF --model MODEL --sizes -1 -2"),
        ("--sizes -1", "--pef PEF --model MODEL --sizes=-1"),
    ],
)  # fmt: skip
def test_a_run_like_the_compile_repeats_the_flags_that_it_takes(compiled: str, run: str) -> None:
    def shape(parser: ArgumentParser) -> None:
        parser.add_argument("--n-hidden", type=int)
        parser.add_argument("--no-mask", action="store_true")
        parser.add_argument("--sizes", nargs="+")

    def only(parser: ArgumentParser) -> None:
        parser.add_argument("--only")
        parser.add_argument("--model")
        parser.add_argument("--again", action="append")
        parser.add_argument("data", nargs="?")

    arguments: Any = parse_app_args(["compile", *compiled.split()], False, shape, only, None, needing)
    assert " ".join(chain.from_iterable(arguments.parser.words_of_run().values())) == run


@pytest.mark.parametrize("added", ["--batch-size", "--batch_size"])
def test_an_apps_flag_of_the_same_name_wins_with_its_default(added: str) -> None:
    def add(parser: ArgumentParser) -> None:
        parser.add_argument_group("data").add_argument(added, type=int, default=64)

    for typed, value in (([], 64), (["-b", "8"], 8), (["--batch-size", "8"], 8), (["--batch_size=8"], 8)):
        assert parse_app_args(["compile", *typed], common_parser_fn=add).batch_size == value
    for typed, pef in (([], "own.pef"), (["-p", "x.pef"], "x.pef"), (["--pef", "x.pef"], "x.pef")):
        add_pef = adding("--pef", default="own.pef")  # which the library requires
        assert parse_app_args(["run", *typed], run_parser_fn=add_pef).pef == pef


def exclusive(parser: Any) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--rate", type=float, default=0.5)
    group.add_argument("--schedule")


@pytest.mark.parametrize(
    ("argv", "what", "remedy"),
    [
        ([], "a command is missing; commands are compile, run, test,", "python app.py compile --help"),
        (["compil"], "'compil' is not a command; commands are compile, run, test,", "python app.py compile --help"),
        (["run"], "the following arguments are required: --pef/-p", "python app.py run --help"),
        (["compile", "--bach-size", "3"], "compile has no flag --bach-size", "did you mean --batch-size?"),
        (["run", *PEF, "--o0"], "run has no flag --o0: it is a flag of compile", "leave --o0 out"),
        (["test", *PEF, "--world_size", "4"], "test has no flag --world_size: it is a flag", "leave --world_size out"),
        (["compile", "more"], "unexpected argument more", "python app.py compile --help"),
        (["compile", "-b", "0"], "'0' is not a whole number of at least 1", "python app.py compile --help"),
        (["measure-sections", *PEF, "--min-duration", "nan"], "'nan' is not a number of seconds", "--help"),
        (["measure-sections", *PEF, "--min-duration", "-1"], "'-1' is not a number of seconds", "--help"),
        (["compile", "--arch", "SN50"], "invalid choice: 'sn50' (choose from", "python app.py compile --help"),
        (["compile", "--mapping", "flat"], "invalid choice: 'flat'", "python app.py compile --help"),
        (["compile", "--log-level", "loud"], "'loud' is no logging level", "python app.py compile --help"),
        (["compile", "--o0", "--o1"], "--o0 and --o1 exclude each other", "leave out all but --o1"),
        (["compile", "--dtype", "bf8"], "invalid choice: 'bf8'", "python app.py compile --help"),
        (["compile", "--rate=1", "--schedule=cosine"], "not allowed with argument", "python app.py compile --help"),
    ],
)
def test_what_is_typed_wrong_is_told_with_what_to_type_instead(argv: list[str], what: str, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_app_args(argv, common_parser_fn=exclusive)
    assert what in caught.value.what
    assert remedy in str(caught.value.remedy)


def test_argv_that_is_no_list_of_words_is_refused_with_the_line_of_the_app() -> None:
    for wrong in (Namespace(batch_size=1), "compile -b 1"):
        what = f"must be a list of words, not {type(wrong).__name__}$"
        remedy = r"^parse_app_args\(argv=sys\.argv\[1:\], …\)$"
        with refused(OptionError, what, remedy, r"parse_app_args\(argv=wrong\)"):
            parse_app_args(argv=wrong)  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_the_flags_of_the_command_and_of_the_app_and_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_app_args([command, "-h"], common_parser_fn=adding("--rows", help="Of the table."))
    assert caught.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("examples:\n")
    assert text.startswith(f"usage: python app.py {command} [-h] ")
    effective, _, inert = (" ".join(part.split()) for part in text.partition("have no effect here:"))
    assert "Of the table." in effective + inert
    for flag in FLAGS:
        shown, other = (inert, effective) if flag.inert else (effective, inert)
        assert (flag.meaning in shown) is (command in flag.commands)
        assert flag.meaning not in other
    assert examples
    for line in examples.splitlines():
        words = line.partition("app.py ")[2].replace("--data-parallel", "").split()
        assert parse_app_args(words).command == command


def test_a_pef_that_is_not_named_is_named_by_time_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20240131_235959")
    monkeypatch.setattr("os.getpid", lambda: 4711)
    assert parse_app_args(["compile"]).pef_name == "20240131_235959_4711"


def test_a_config_is_made_from_keywords_or_from_what_was_parsed() -> None:
    typed = parse_app_args(["run", *PEF, "-b", "8", "--inference"])
    assert vars(SambaConfig("run", pef="net.pef", batch_size=8, inference=True)) == vars(typed)
    for arch in ("sn20", "SN20"):
        assert SambaConfig("compile", arch=arch).arch == parse_app_args(["compile", f"--arch={arch}"]).arch == "sn20"
    assert SambaConfig("compile", hidden={"sizes": [1, 2]}, pef_name="net").hidden == {"sizes": [1, 2]}
    with pytest.raises(OptionError, match="'0' is not a whole number"):
        SambaConfig("compile", batch_size=0)
    with pytest.raises(OptionError, match="--inference must be true or false, not 'yes'"):
        SambaConfig("compile", inference="yes")
    config = SambaConfig(typed, SNConfig)
    assert config.get_all_params() == vars(config) == vars(typed)
    config = SambaConfig(typed, SNConfig(batch_size=1, hidden=4), epochs=2)
    assert config.get_all_params() == {**vars(typed), "hidden": 4, "epochs": 2}


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
    (folder / "app.yaml").write_text(text, encoding="utf-8")
    return folder / "app.yaml"


def test_a_file_gives_what_the_command_line_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, SHARED)
    config = parse_yaml_to_args(path)
    own = {"hidden": 64, "optimizer": {"lr": 0.5}}
    factors = [0.5, 2.0]
    assert vars(config) == vars(
        SambaConfig("compile", batch_size=32, pef_name="net", resources_scaling_factors=factors, **own)
    )
    assert process.current().arguments is config
    assert "--resources-scaling-factors" in capsys.readouterr().err
    config = parse_yaml_to_args(str(path), "run")
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


def test_what_was_typed_counts_before_the_file_and_the_file_before_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(parser: ArgumentParser) -> None:
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--hidden", type=int, default=4)
        parser.add_argument("-e", "--epochs", type=int, default=1)
        parser.add_argument("--debug", action="store_true")

    typed = parse_app_args(["run", "--pef=a.pef", "-e2", "--hidden", "4", "--debug"], common_parser_fn=add)
    text = "batch-size: 32\nlr: 1e-3\nhidden: 64\nepochs: 9\npef: b.pef\nextra: 1\ninference: true\n"
    config = parse_yaml_to_args(written(tmp_path, text), typed)
    assert (config.command, config.pef, config.batch_size, config.inference) == ("run", "a.pef", 32, True)
    assert (config.lr, config.hidden, config.epochs, config.extra) == (1e-3, 4, 2, 1)
    assert set(vars(config)) == {*vars(typed), "extra"}
    assert config.parser is typed.parser
    assert config.parser.of_app > {"lr", "hidden", "epochs"}
    for copied in (copy.deepcopy(typed), pickle.loads(pickle.dumps(typed)), pickle.loads(pickle.dumps(config))):
        again = parse_yaml_to_args(written(tmp_path, text), copied)
        assert (vars(again), again.parser.of_app) == (vars(config), config.parser.of_app)
    assert (process.current().arguments, capsys.readouterr().err) == (config, ""), "--debug is the app's own"
    with pytest.raises(OptionError, match="'many' is not a whole number"):
        parse_yaml_to_args(written(tmp_path, "batch_size: many\n"), typed)
