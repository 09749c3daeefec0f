"""The command line from a YAML file, and the run command at the end of a compile."""

import argparse
import shlex
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from sambasim.errors import OptionError
from sambasim.samba import context
from sambasim.samba.utils.argparser import SambaConfig, parse_app_args, parse_yaml_to_args
from sambasim.samba.utils.parser import NextRun, command_parser

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


@pytest.fixture(autouse=True)
def _app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py"])
    monkeypatch.setattr(context, "_OF_THIS_PROCESS", context.Context())


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
    assert context.current().arguments is config
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
    assert context.current().arguments is config
    with pytest.raises(OptionError, match="'many' is not a whole number"):
        parse_yaml_to_args(written(tmp_path, "batch_size: many\n"), typed)


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
