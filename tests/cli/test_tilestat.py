"""`sambasim tilestat`, as typed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sambasim.cli.main import sambasim
from sambasim.errors import OptionError, PefError

Tilestat = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    arguments = ["compile", "-b", "32", "--num-tiles", "4", "--output-folder", str(folder)]
    CliRunner().invoke(sambasim, arguments, catch_exceptions=False)
    return folder


@pytest.fixture
def tilestat(folder: Path) -> Tilestat:
    def called(*arguments: str) -> str:
        command = ["tilestat", *arguments, "--output-folder", str(folder)]
        return CliRunner().invoke(sambasim, command, catch_exceptions=False).stdout

    return called


def test_a_row_for_each_tile_of_the_replica(tilestat: Tilestat) -> None:
    printed = tilestat("digits")
    assert "digits on 4 of 8 tiles of SN30, a step of" in printed
    assert "predicted" in printed.splitlines()[0]
    assert printed.split("\n\n")[1].split()[:4] == ["tile", "%idle", "%exec", "%pload+%aload"]
    assert [line.split()[0] for line in printed.splitlines() if "TILE_" in line] == [f"TILE_{n}" for n in range(4)]
    assert "which no publication separates" in printed
    assert "%chkpt and %quiesce are not modelled" in printed
    assert "\x1b" not in printed


def test_shares_add_up_and_what_is_unknown_is_null(tilestat: Tilestat) -> None:
    printed = tilestat("digits", "--num-tiles", "2", "--json")
    assert printed.count("\n") == 1
    told = json.loads(printed)
    assert (told["kind"], told["device"], len(told["tiles"])) == ("predicted", "2 of 8 tiles of SN30", 2)
    for tile in told["tiles"]:
        shares = [value for value in tile.values() if isinstance(value, float)]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0
        unknown = {name for name, value in tile.items() if value is None}
        assert unknown == {f"predicted_{one}_share" for one in ("pload", "aload", "chkpt", "quiesce")}


def test_shares_are_those_of_the_prediction(tilestat: Tilestat, folder: Path) -> None:
    command = ["simulate", "digits", "--json", "--output-folder", str(folder)]
    simulated = json.loads(CliRunner().invoke(sambasim, command, catch_exceptions=False).stdout)
    tile = json.loads(tilestat("digits", "--json"))["tiles"][0]
    launch_s = sum(section["launch_s"] for section in simulated["sections"])
    assert tile["predicted_pload_aload_share"] == pytest.approx(launch_s / simulated["predicted_s"])
    assert tile["predicted_idle_share"] == pytest.approx(simulated["host_s"] / simulated["predicted_s"])


def test_a_device_whose_tiles_nobody_has_published_has_one_row(tilestat: Tilestat) -> None:
    told = json.loads(tilestat("digits", "--arch", "sn40", "--json"))
    assert [tile["tile"] for tile in told["tiles"]] == ["all"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("digits", "--num-tiles", "9"), OptionError, "--num-tiles 9 of an SN30, which has 8"),
        (("digits", "--arch", "sn31"), OptionError, "there is no device called 'sn31'"),
        (("digit",), (OptionError, PefError), "digit"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    folder: Path, arguments: tuple[str, ...], error: type[Exception], text: str
) -> None:
    result = CliRunner().invoke(sambasim, ["tilestat", *arguments, "--output-folder", str(folder)])
    assert isinstance(result.exception, error)
    assert text in str(result.exception)
