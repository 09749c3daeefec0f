"""Argument parsing: the rows of the census, and the flags of its command lines."""

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.samba.census.support import parsed, refused

COMMANDS = ["compile", "run", "test", "measure-performance", "measure-sections"]
PEF = "--pef=out/net/net.pef"


def words_of(command: str) -> list[str]:
    return [command] if command == "compile" else [command, PEF]


Add = Callable[[argparse.ArgumentParser], object]


def flag(*names: str, **options: Any) -> Add:
    return lambda parser: parser.add_argument(*names, **options)


REDEFINED: dict[str, tuple[Add, list[str], str, object]] = {
    "-b/--batch-size": (flag("-b", "--batch-size", type=int, default=12), ["-b", "6"], "batch_size", 6),
    "-b/--batch-size, its default": (flag("-b", "--batch-size", type=int, default=12), [], "batch_size", 12),
    "--batch_size": (flag("--batch_size", type=int, default=3), ["--batch_size=5"], "batch_size", 5),
    "--data-parallel": (flag("--data-parallel", action="store_true"), [], "data_parallel", False),
    "--visualize": (flag("--visualize", action="store_true"), ["--visualize"], "visualize", True),
    "--world-size": (flag("--world-size", type=int, default=1), ["--world-size", "2"], "world_size", 2),
    "--min-throughput": (
        flag("--min-throughput", type=float, default=0.0),
        ["--min-throughput=5"],
        "min_throughput",
        5,
    ),
    "--n": (flag("--n", type=int), ["--n", "7"], "n", 7),
    "--h": (flag("--h", type=int), ["--h=7"], "h", 7),
    "--num-workers": (flag("--num-workers", type=int, default=0), ["--num-workers=2"], "num_workers", 2),
    "--data-dir": (flag("--data-dir"), ["--data-dir", "data"], "data_dir", "data"),
    "-bs": (flag("-bs", type=int), ["-bs", "9"], "bs", 9),
    "-lr": (flag("-lr", type=float), ["-lr", "0.5"], "lr", 0.5),
    "-mbsize": (flag("-mbsize", type=int), ["-mbsize", "9"], "mbsize", 9),
    "-maxep": (flag("-maxep", type=int), ["-maxep=3"], "maxep", 3),
    "positional overrides with nargs *": (
        flag("overrides", nargs="*"),
        ["model.depth=3", "lr=1"],
        "overrides",
        ["model.depth=3", "lr=1"],
    ),
    "a custom type": (
        flag("--sizes", type=lambda text: [int(word) for word in text.split(",")]),
        ["--sizes=1,2"],
        "sizes",
        [1, 2],
    ),
}


@pytest.mark.parametrize("command", ["compile", "run"])
@pytest.mark.parametrize("redefined", REDEFINED)
def test_functions_of_the_app_define_flags_anew(redefined: str, command: str) -> None:
    add, typed, name, value = REDEFINED[redefined]
    args = parsed(*words_of(command), *typed, common_parser_fn=add)
    assert getattr(args, name) == value


def test_a_mutually_exclusive_group_and_a_function_that_reads_yaml(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text("rate: 0.5\n")

    def add_args(args: Namespace, file: str = str(path)) -> None:
        rate = float(Path(file).read_text().split()[1])
        group: Any = args.add_mutually_exclusive_group()
        group.add_argument("--rate", type=float, default=rate)
        group.add_argument("--schedule")

    assert parsed("compile", common_parser_fn=add_args).rate == 0.5
    with refused("not allowed with argument", here=False):
        parsed("compile", "--rate=1", "--schedule=cosine", common_parser_fn=add_args)


READ = [
    "command", "pef", "mapping", "inference", "batch_size", "visualize", "data_parallel", "reduce_on_rdu",
    "run_graph_only", "num_iterations", "json", "bench_report_json", "compiled_stats_json", "min_duration",
    "n_chips", "world_size", "num_spatial_batches", "distlearn_config", "data_parallel_mode", "acc_report_json",
    "gold_file_path", "log_level", "output_folder", "pef_name", "num_sections", "json_counters",
    "grad_accumulation_steps", "resource_report_path", "verbose_report", "io_memory_location", "min_throughput",
    "mac_human_decision",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_attributes_of_the_namespace_are_read_and_written(command: str) -> None:
    args = parsed(*words_of(command), "-b=4")
    assert [name for name in READ if not hasattr(args, name)] == []
    args.local_rank = -1
    args.batch_size *= args.num_spatial_batches
    assert args.batch_size == 4
    args.mac_v1, args.resources_scaling_factors, args.disable_retry_lower_visible_resources = True, [0.5], True
    assert not args.__dict__.get("train_samba_spatial", False)
    assert args.__dict__.get("data_parallel", True) is False
    params = vars(args)
    params["modelbox_mode"] = True
    assert args.modelbox_mode is params["modelbox_mode"]


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
    args = parsed(*words)
    assert {name: getattr(args, name) for name in LINES[line]} == LINES[line]
