"""`sambasim devices`, as typed."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sambasim.cli.devices import devices_command
from sambasim.errors import OptionError
from sambasim.hardware.spec import cluster_names, device_names, load_device
from tests.pef.samples import write_sample
from tests.support.cluster import write_cluster


def devices(*arguments: str) -> str:
    result = CliRunner().invoke(devices_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def facts(*arguments: str) -> dict[str, Any]:
    output = devices(*arguments, "--json")
    assert output.count("\n") == 1
    found: dict[str, Any] = json.loads(output)
    return found


def test_everything_that_ships_is_listed_with_its_sources() -> None:
    found, output = facts(), devices()
    assert [device["name"] for device in found["devices"]] == [load_device(name).name for name in device_names()]
    assert [cluster["name"] for cluster in found["clusters"]] == list(cluster_names())
    for spec in (*found["devices"], *found["clusters"]):
        assert all(figure["source"] for figure in spec["figures"])
    for name in device_names():
        device = load_device(name)
        told = {
            figure["name"]: figure
            for spec in found["devices"]
            if spec["name"] == device.name
            for figure in spec["figures"]
        }
        assert told["pcus"] == {"name": "pcus", "value": device.pcus, "source": device.sources["pcus"]}
        for source in device.sources.values():
            assert source in output
    assert "peer links per rdu       4                     estimate: as many as an SN10 has" in output
    assert "tiles           not published   none" in output, "an SN40L"
    assert "\x1b" not in output


def test_the_seats_of_a_node_by_default() -> None:
    output = devices("--arch", "sn30")
    assert "8 replicas on node 0, RDUs 0-7 of cluster sn30-8\n" in output
    assert "a replica has all of an SN30: 1,280 compute units, 1.0 TiB of DDR; a node has room for 8\n" in output
    assert output.splitlines()[-2].split() == ["7", "0", "7", "all"]
    assert "device SN10" not in output


def test_parts_of_rdus_and_more_than_a_node() -> None:
    seats = facts("--arch", "sn30", "--num-tiles", "4", "--replicas", "17")["seats"]
    assert seats[1] == {"replica": 1, "node": 0, "rdu": 0, "first_tile": 4, "tiles": 4}
    assert seats[16] == {"replica": 16, "node": 1, "rdu": 0, "first_tile": 0, "tiles": 4}
    assert devices("--num-tiles", "4", "--replicas", "2").splitlines()[-2].split() == ["1", "0", "0", "4-7"]


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    farm = str(write_cluster(tmp_path, rdus_per_node=3, nodes=2))
    found = facts("--cluster", farm, "--replicas", "6")
    assert (found["cluster"], found["nodes"], found["room_of_a_node"]) == ("farm", 2, 3)
    assert [(seat["node"], seat["rdu"]) for seat in found["seats"]] == [(n, r) for n in range(2) for r in range(3)]
    assert [cluster["name"] for cluster in found["clusters"]] == ["farm"]
    refused = CliRunner().invoke(devices_command, ["--cluster", farm, "--replicas", "7"])
    assert isinstance(refused.exception, OptionError)
    assert "7 replicas, and farm has room for 6: one for each RDU, 3 RDUs a node, 2 nodes" in str(refused.exception)


def test_a_pef_says_which_device(tmp_path: Path) -> None:
    assert facts("--pef", str(write_sample(tmp_path)))["device"] == "SN30"
    with pytest.raises(OptionError, match=r"--num-tiles 9 of an SN30, which has 8"):
        CliRunner().invoke(devices_command, ["--num-tiles", "9"], catch_exceptions=False)
