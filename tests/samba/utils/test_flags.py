"""The table of flags has every row of what is known of the vendor's command line, with its default and its commands."""

import pytest

from sambasim.samba.utils.flags import COMMANDS, FLAGS, Flag
from sambasim.samba.utils.parser import command_parser

ALL = ("compile", "run", "test", "measure-performance", "measure-sections")
COMPILE = ("compile",)
NOT_COMPILE = ALL[1:]
MEASURE = ALL[3:]

KNOWN: tuple[tuple[str, tuple[str, ...], object], ...] = (
    ("--output-folder", COMPILE, "out"),
    ("-b", ALL, 1),
    ("--batch-size", ALL, 1),
    ("--microbatch-size", ALL, None),
    ("--grad-accumulation-steps", ALL, 1),
    ("--inference", ALL, False),
    ("--data-parallel", ALL, False),
    ("-ws", ("compile", "measure-performance"), 1),
    ("--world-size", ("compile", "measure-performance"), 1),
    ("--ws", ("compile", "measure-performance"), 1),
    ("--data-parallel-mode", ALL, "normal"),
    ("--reduce-on-rdu", NOT_COMPILE, False),
    ("-p", ALL, None),
    ("--pef", ALL, None),
    ("--mapping", ALL, "section"),
    ("--num-spatial-batches", ALL, 1),
    ("--n-chips", ALL, 1),
    ("--num-tiles", COMPILE, -1),
    ("--o0", COMPILE, False),
    ("--o1", COMPILE, False),
    ("--o3", COMPILE, False),
    ("--tensor-parallel", ALL, "none"),
    ("--optim-level", ALL, None),
    ("--compiler-configs-file", ALL, None),
    ("--mac-human-decision", ALL, None),
    ("--resources-scaling-factors", ALL, None),
    ("--enable-stoc-rounding", COMPILE, False),
    ("--arch", COMPILE, "sn30"),
    ("--num-iterations", NOT_COMPILE, 100),
    ("-n", NOT_COMPILE, 100),
    ("--min-duration", MEASURE, 0.0),
    ("--run-graph-only", MEASURE, False),
    ("--json", MEASURE, None),
    ("--bench-report-json", MEASURE, None),
    ("--compiled-stats-json", MEASURE, None),
    ("--log-level", ALL, None),
    ("--verbose", ALL, False),
    ("--debug", ALL, False),
    ("--distlearn-config", ALL, None),
    ("--gold-file-path", ALL, None),
    ("--visualize", ALL, False),
    ("--enable-profiler", ALL, False),
    ("--dtype", ALL, None),
    ("--gradient-groups", COMPILE, "section"),
    ("--threads", NOT_COMPILE, None),
    ("-mb", ALL, None),
    ("-v", ALL, False),
    ("--mac-v1", ALL, False),
    ("--mac-v2", ALL, False),
    ("--weight-sharing", ALL, False),
    ("--enable-conv-tiling", ALL, False),
    ("--enable-tiling", ALL, False),
    ("--enable-stochastic-rounding", COMPILE, False),
    ("--disable-retry-lower-visible-resources", ALL, False),
    ("--io-memory-location", ALL, None),
    ("--resource-report-path", ALL, None),
    ("--verbose-report", ALL, False),
    ("--use-sambaloader", ALL, False),
    ("--acc-report-json", NOT_COMPILE, None),
    ("--min-throughput", NOT_COMPILE, 0.0),
    ("--json-counters", MEASURE, None),
    ("--num-sections", MEASURE, None),
)


def flag_called(name: str) -> Flag:
    [found] = [flag for flag in FLAGS if name in flag.names]
    return found


def test_a_flag_has_its_commands_and_its_default() -> None:
    for name, commands, default in KNOWN:
        flag = flag_called(name)
        assert set(flag.commands) == set(commands), name
        assert [flag.default_for(command) for command in COMMANDS] == [default] * len(COMMANDS), name


def test_nothing_else_is_in_the_table() -> None:
    assert {name for flag in FLAGS for name in flag.names} == {name for name, _, _ in KNOWN} | {"--pef-name"}


def test_a_pef_that_is_not_named_is_named_by_time_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20240131_235959")
    monkeypatch.setattr("os.getpid", lambda: 4711)
    flag = flag_called("--pef-name")
    assert flag.default_for("compile") == "20240131_235959_4711"
    assert flag.default_for("run") is None


def test_no_two_flags_share_a_name_or_a_destination() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    destinations = [flag.destination for flag in FLAGS]
    assert len(set(names)) == len(names)
    assert len(set(destinations)) == len(destinations)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_each_flag_of_a_command_what_it_means_and_no_other(command: str) -> None:
    text = " ".join(command_parser(command, ()).format_help().split())
    for flag in FLAGS:
        if command in flag.commands:
            assert flag.meaning in text
        else:
            assert f" {flag.names[0]} " not in text


def test_help_tells_defaults() -> None:
    text = " ".join(command_parser("measure-performance", ()).format_help().split())
    assert "Measure for at least so many seconds. Default: 0.0." in text
    assert "Threads of each rank; by default its share of the cores. --num-iterations" in text


def test_help_puts_flags_that_change_nothing_apart() -> None:
    text = command_parser("compile", ()).format_help()
    effective, _, inert = text.partition("flags that are accepted, and have no effect here:")
    assert "\n  --data-parallel  " in effective
    assert "\n  --n-chips N " in inert
    assert "\n  --n-chips N " not in effective
