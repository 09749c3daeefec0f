"""Help: every command has it, in groups, with an example, and each flag with its default."""

import re
from pathlib import Path
from typing import get_args

import click
import pytest
import torch
from click.shell_completion import ShellComplete

from sambasim.cli.main import _COMMANDS, sambasim
from sambasim.cli.train import compile_command, run_command
from sambasim.errors import OptionError
from sambasim.ir.schedule import SCHEDULES
from sambasim.options.compile import compile_options
from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.given import assign, given_flags, given_overrides, leaves
from sambasim.options.run import ResolvedRun, resolve_run, run_options
from tests.cli.typed import invoked, printed, refused

OPTIONS = compile_options(None, None, [], {})


def _resolved(*typed: str) -> ResolvedRun:
    """What `sambasim run` makes of what is typed, for a PEF of the quick start."""
    params = run_command.make_context("run", [*typed]).params
    flags = {name: value for name, value in params.items() if name in RUN_FLAGS}
    chosen = run_options(flags, given_overrides(params["overrides"]))
    return resolve_run(chosen, OPTIONS.training_defaults(), OPTIONS.data.model_dump(mode="json"))


def help_of(*command: str) -> str:
    return " ".join(printed(*command, "--help").split())


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_is_listed_and_its_help_has_an_example(name: str) -> None:
    _, text = _COMMANDS[name]
    assert text in help_of()
    assert text in help_of(name)
    subcommand = ["collectives"] if name == "bench" else []
    assert f"sambasim {name}" in help_of(name, *subcommand).split("Example")[1]


@pytest.mark.parametrize("command", ["compile", "run"])
def test_help_shows_every_flag_in_its_panel_with_its_default_and_six_options_first(command: str) -> None:
    text = printed(command, "--help")
    first = text.partition("Most used:")[2].partition("\n\n")[0]
    assert len(re.findall(r"^  -", first, re.MULTILINE)) == 6
    assert text.index("Example") < text.index("Most used:") < text.index("Training:")
    shown = " ".join(text.split())
    for setting in (COMPILE_FLAGS if command == "compile" else RUN_FLAGS).values():
        typed = [f"--{choice}" for choice in setting.flag.choices] or [setting.flag.names[-1].split("/")[0]]
        assert f"{setting.panel}:" in shown
        assert all(f" {flag}" in shown for flag in typed), typed
    assert "[default: 300]" in shown or command == "compile"
    assert "Learning rate. [default: as compiled]" in shown or command == "compile"
    assert "--o3 The grouping with the shortest predicted step. [default]" in shown or command == "run"
    assert all(name in shown for name in SCHEDULES) or command == "run"


def test_underscores_in_flags_are_hyphens_and_a_typing_error_gets_the_nearest_name() -> None:
    typed = ("run", "--pef", "x", "--reduce_on_rdu", "--no_such_flag")
    assert "No such option '--no-such-flag'." in invoked(*typed).output
    assert "Did you mean 'inspect'?" in invoked("inspct").output
    assert "'--batch-size'" in invoked("compile", "--batchsize", "3").output


@pytest.mark.parametrize("command", [compile_command, run_command], ids=["compile", "run"])
def test_every_flag_sets_its_option(command: click.Command) -> None:
    settings = COMPILE_FLAGS if command is compile_command else RUN_FLAGS
    samples = {bool: True, int: 7, float: 0.5, str: "1epoch", Path: Path("x.safetensors")}
    for keyword, setting in settings.items():
        choices = get_args(setting.kind)
        value = choices[-1] if choices else samples[setting.kind]
        typed = [f"--{value}"] if setting.flag.choices else [setting.flag.names[-1].split("/")[0]]
        typed += [] if value is True or setting.flag.choices else [str(value)]
        needed = [] if command is compile_command or keyword == "pef" else ["--pef", "net"]
        given = command.make_context("x", [*typed, *needed]).params
        (flag,) = given_flags({keyword: given[keyword]}, settings)
        assert leaves(assign({}, [flag])) == {setting.name: value}
        assert flag.origin == setting.flag.typed


@pytest.mark.parametrize("typed", [["no row"], ["--only", "no row"]])
def test_words_of_published_rows_are_an_argument_or_a_flag(typed: list[str]) -> None:
    assert "no published row has 'no row' in its name" in refused("validate", *typed).what


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (["--emulate-replicas", "0"], "--emulate-replicas 1"),
        (["--keep", "0", "--checkpoint-dir", "c"], "--keep 1"),
        (["--set", "training.epochs=0"], "--set training.epochs=1"),
        (["-b", "16"],
         "sambasim compile … -b 16, and then run without it; sambasim inspect PEF --all shows how it was compiled"),
    ],
)  # fmt: skip
def test_a_wrong_flag_of_a_run_has_a_remedy(typed: list[str], remedy: str) -> None:
    with pytest.raises(OptionError) as refused:
        _resolved("--pef", "net", *typed)
    assert refused.value.remedy == remedy


@pytest.mark.parametrize("command", ["run", "inspect", "verify", "simulate", "tilestat", "plan", "report", "devices"])
def test_a_pef_is_an_argument_or_a_flag(command: str) -> None:
    others = ["--html", "net.html"] if command == "report" else []
    for typed in (["net"], ["--pef", "net"], ["-p", "net"]):
        assert "there is no PEF 'net'" in refused(command, *typed, *others).what
    for typed in (["net", "--pef", "net"], [] if command != "devices" else ["a", "-p", "b"]):
        assert "name one PEF" in invoked(command, *typed, *others).output


@pytest.mark.parametrize(
    ("flag", "number"),
    [
        *(("--threads", number) for number in ("9" * 400, "4097", "0", "-1")),
        *(("--emulate-replicas", number) for number in ("9" * 400, "-1")),
        *(("--sync-timeout", number) for number in ("9" * 400, "nan", "inf", "1e308", "-1")),
        *(("--steps", "9" * 400), ("--keep", "9" * 400), ("--lr", "9" * 400), ("--lr", "nan")),
    ],
)
def test_a_number_out_of_range(flag: str, number: str) -> None:
    with pytest.raises(OptionError, match="must be"):
        _resolved("--pef", "net", "--checkpoint-dir", "saved", flag, number)


def test_the_version_names_what_a_report_of_a_bug_needs() -> None:
    shown = printed("--version")
    assert [line.split()[0] for line in shown.splitlines()] == ["sambasim", "Python", "torch", "MPI", "CPU"]
    assert f"torch    {torch.__version__}\n" in shown


def test_completion_knows_commands_options_and_pefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("net", "nest", "other"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / f"{name}.pef").touch()
    monkeypatch.chdir(tmp_path)

    def completed(*typed: str) -> list[str]:
        shell = ShellComplete(sambasim, {}, "sambasim", "_SAMBASIM_COMPLETE")
        return [item.value for item in shell.get_completions([*typed[:-1]], typed[-1])]

    assert completed("in") == ["inspect"]
    assert completed("run", "--reduce") == ["--reduce-on-rdu"]
    for typed in (["run", "--pef"], ["run"], ["inspect"], ["verify"], ["simulate"], ["devices", "--pef"]):
        assert completed(*typed, "ne") == ["nest", "net"], typed
        assert completed(*typed, "/") == ["/"], "the shell completes files"
