"""Argument parsing: the rows of the census, and the flags of its command lines."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.samba.census.support import parsed, refused


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
