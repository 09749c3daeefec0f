"""`sambasim simulate`, `tilestat` and `devices`: what they print, and what they refuse."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from sambasim.cli.devices import devices_command
from sambasim.cli.main import sambasim
from sambasim.errors import MachineError, OptionError
from sambasim.hardware.spec import cluster_names, device_names, load_device
from sambasim.units import format_seconds
from tests.pef.samples import write_sample
from tests.support.cluster import write_cluster
from tests.support.examples import in_stages
from tests.support.whole import whole, whole_case

Simulate = Callable[..., str]
Tilestat = Callable[..., str]

DEVICE = """
name = "Mine"
tiles = 2
pcus = 64
pmus = 64
sram_bytes = 33554432
pcu_bf16_flops_per_s = 468.75e9
ddr_capacity_bytes = 68719476736
ddr_bandwidth_bytes_per_s = 100e9
cluster = "sn10-8"
[sources]
tiles = "estimate"
pcus = "estimate"
pmus = "estimate"
sram_bytes = "estimate"
pcu_bf16_flops_per_s = "estimate"
ddr_capacity_bytes = "estimate"
ddr_bandwidth_bytes_per_s = "estimate"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    arguments = ["compile", "--data-parallel", "-b", "32", "--num-tiles", "4", "--o1", "--output-folder", str(folder)]
    CliRunner().invoke(sambasim, arguments, catch_exceptions=False)
    return folder


@pytest.fixture
def simulate(folder: Path) -> Simulate:
    def called(*arguments: str) -> str:
        command = ["simulate", *arguments, "--output-folder", str(folder)]
        return CliRunner().invoke(sambasim, command, catch_exceptions=False).stdout

    return called


def test_predictions_are_printed_as_such(simulate: Simulate) -> None:
    printed = simulate("digits")
    assert "on 4 of 8 tiles of SN30, o1: predicted, not measured" in printed
    assert "slowest sections" in printed
    assert "range" not in printed, "no calibration row is bound by launches, as this is"
    assert "most of the time is for section launches" in printed
    assert "calibrated on thirteen published steps" in printed
    assert "this is one replica, without REDUCE and GATHER; --replicas 2,4,8 adds them" in printed


def test_another_device_is_taken_whole_and_says_that_nothing_backs_it(simulate: Simulate) -> None:
    printed = simulate("digits", "--arch", "sn40")
    assert "on SN40L, o1" in printed
    assert "no published step of SN40L backs this" in printed
    assert "range" not in printed
    assert "on 4 of 8 tiles of SN30" in simulate("digits", "--arch", "sn30"), "its own device has the tiles of the PEF"
    assert "on 2 of 8 tiles of SN30, o0" in simulate("digits", "--num-tiles", "2", "--o0")


def test_json_has_every_section_and_every_row(simulate: Simulate) -> None:
    record = json.loads(simulate("digits", "--json", "--replicas", "1,2,32"))
    assert (record["device"], record["tiles"], record["level"], record["batch_size"]) == ("SN30", 4, "o1", 32)
    assert record["device_s"] == pytest.approx(sum(section["predicted_s"] for section in record["sections"]))
    assert record["predicted_s"] == pytest.approx(record["device_s"] + record["host_s"])
    assert record["predicted_least_s"] is None
    rows = [(row["replicas"], row["nodes"], row["sync"]) for row in record["scaling"]]
    assert rows == [(1, 1, None), (2, 1, "host"), (2, 1, "rdu"), (32, 2, "host"), (32, 2, "rdu")]
    assert record["scaling"][0]["predicted_s"] == pytest.approx(record["predicted_s"])
    assert record["scaling"][1]["bytes_per_rdu"] == 2 * record["needed_bytes"], "two replicas of 4 tiles on one RDU"


def test_batch_sizes_and_replicas_make_a_table_and_a_csv_file(simulate: Simulate, tmp_path: Path) -> None:
    file, plot = tmp_path / "new" / "rows.csv", tmp_path / "rows.svg"
    written = ["--csv", str(file), "--plot", str(plot)]
    printed = simulate("digits", "-b", "32,64", "--replicas", "2,8", "--sync", "rdu", *written)
    assert printed.splitlines()[-2:] == [f"{file} written", f"{plot} written"]
    drawn = "".join(ElementTree.fromstring(plot.read_text(encoding="utf-8")).itertext())
    assert "digits on 4 of 8 tiles of SN30: predicted, not measured" in drawn
    assert all(name in drawn for name in ("rdu, batch 32", "rdu, batch 64", "no sync, batch 32"))
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["batch_size"], row["replicas"], row["sync"]) for row in rows] == [
        *(("32", "2", "rdu"), ("32", "8", "rdu")),
        *(("64", "2", "rdu"), ("64", "8", "rdu")),
    ]
    assert "replicas, predicted" in printed
    assert all(float(row["predicted_samples_per_s"]) > 0 for row in rows)
    assert simulate("digits", "--json", *written).count("\n") == 1


def test_a_device_of_ones_own_is_read(simulate: Simulate, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DEVICE, encoding="utf-8")
    printed = simulate("digits", "--arch", str(file), "--replicas", "2")
    assert "digits on Mine" in printed
    assert "no published step of Mine" in printed
    assert "links are those of cluster sn10-8" in printed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("pcus = 64", "pcus = 0"), "pcus: Input should be greater than 0"),
        (("pcus = 64\n", ""), "pcus is missing"),
        (("tiles = 2", "tiels = 2"), "tiels is unknown"),
        (('pcus = "estimate"\n', ""), "no source is given for pcus"),
        (("100e9", "9" * 5000), "is not valid TOML: Exceeds the limit"),
        (("100e9", "inf"), "ddr_bandwidth_bytes_per_s: Input should be a finite number"),
        (("[sources]", "[sources]\npcu = 'estimate'"), "sources has pcu, which is not a figure"),
        (("[sources]", 'hbm_capacity_bytes = 1\n[sources]\nhbm_capacity_bytes = "estimate"'), "HBM needs both"),
    ],
)
def test_a_wrong_device_file_is_refused(simulate: Simulate, tmp_path: Path, change: tuple[str, str], told: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DEVICE.replace(*change, 1), encoding="utf-8")
    with pytest.raises(OptionError) as refused:
        simulate("digits", "--arch", str(file))
    assert told in refused.value.what
    assert str(file) in refused.value.what


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--replicas", "2,x"), "--replicas 2,x: must be whole numbers from 1 to 16,384"),
        (("--sync", "rdu,device"), "there is no path 'device'"),
        (("--replicas", "9" * 400), "must be whole numbers from 1 to 16,384"),
        (("--batch-size", "9" * 400), "must be whole numbers from 1 to 1,000,000,000"),
        (("--arch", "sn50"), "there is no device called 'sn50': there are sn10, sn30, sn40l"),
        (("--arch", "nothing.toml"), "--arch nothing.toml cannot be read: No such file or directory"),
        (("--cluster", "sn30-9"), "there is no cluster called 'sn30-9'"),
        (("--num-tiles", "9"), "--num-tiles 9 of an SN30, which has 8"),
        (("--set", "optimizer.lr=1"), "--set changes a config, and digits is a PEF"),
        (("--csv", "/proc/rows.csv"), "the CSV file cannot be written"),
    ],
)
def test_what_cannot_be_asked_is_refused(simulate: Simulate, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(OptionError) as refused:
        simulate("digits", *arguments)
    assert told in refused.value.what
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [("--arch=sn50", "--arch sn40, or a TOML file"), ("--cluster=sn30", "--cluster sn30-8, or a TOML")],
)
def test_the_nearest_device_or_cluster_is_named(simulate: Simulate, flag: str, remedy: str) -> None:
    with pytest.raises(OptionError) as refused:
        simulate("digits", flag)
    assert remedy in str(refused.value.remedy)


def test_a_model_that_does_not_fit_is_refused(simulate: Simulate, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(DEVICE.replace("68719476736", "65536"), encoding="utf-8")
    with pytest.raises(MachineError, match=r"of DDR, and Mine has 64\.0 KiB"):
        simulate("digits", "--arch", str(file))


def test_what_would_make_it_quicker_is_the_same_in_text_and_json(simulate: Simulate) -> None:
    printed, record = simulate("digits"), json.loads(simulate("digits", "--json"))
    assert "; priced in bf16, whatever dtype the PEF has" in printed.splitlines()[0]
    assert record["priced_in"].startswith("priced in bf16")
    assert record["advice"], "a batch of 32 is bound by launches"
    for change in record["advice"]:
        gain = change["predicted_samples_per_s"] / change["predicted_samples_per_s_before"]
        assert gain > 1.02
        assert change["predicted_gain_samples_per_s"] > 0
        steps = " -> ".join(format_seconds(change[name]) for name in ("predicted_s_before", "predicted_s"))
        assert f"  x{gain:.2f}  {change['change']}: a step of {steps};" in printed
        assert change["how"] in printed
    assert "one replica on a whole RDU: SN10: " in printed
    assert [one["device"] for one in record["devices"]] == ["SN10", "SN30", "SN40L"]


def test_what_would_fit_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("""from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    def forward(self, x):
        return super().forward(x).square().mean()
""")
    (tmp_path / "mine.toml").write_text(DEVICE.replace("68719476736", "2097152"), encoding="utf-8")
    data = ["--set", "data.source=synthetic", "--set", 'data.inputs={x="float32[64]"}', "--set", "optimizer.name=sgd"]
    asked = ["--arch", str(tmp_path / "mine.toml"), "--num-tiles", "1", "-b", "2048"]
    result = CliRunner().invoke(sambasim, ["simulate", f"{tmp_path}/net.py:Net", *data, *asked])
    assert isinstance(result.exception, MachineError)
    assert "1 of 2 tiles of Mine has 1.0 MiB" in result.exception.what
    fits = str(result.exception.remedy).splitlines()
    assert [line.partition(":")[0] for line in fits] == ["--num-tiles 2", "-b 1024"], fits
    assert all(" samples/s (predicted), " in line for line in fits)
    smaller = ["-b", "1024", *asked[:-2]]
    assert CliRunner().invoke(sambasim, ["simulate", f"{tmp_path}/net.py:Net", *data, *smaller]).exit_code == 0


@whole
def test_a_recurrent_model_at_a_batch_larger_than_its_data(simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("""from torch import nn
class Net(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0].square().mean()
""")
    model = [f"{tmp_path}/net.py:Net", *(["--set", "model.args.input_size=8", "--set", "model.args.hidden_size=8"])]
    data = ["--set", "data.source=synthetic", "--set", 'data.inputs={x="float32[16, 8]"}', "--set", "data.samples=8"]
    printed = simulate(*model, *data, "--set", "optimizer.name=adamw", "-b", "512")
    assert "batch 512" in printed
    assert "range" not in printed, "no calibration row is recurrent"
    assert "the dependency of each time step on the last is ignored" in printed


def test_a_link_of_ones_own_is_read(simulate: Simulate, tmp_path: Path) -> None:
    """As the page about clusters has it."""
    page = Path("docs/device-model.md").read_text(encoding="utf-8")
    link = page[page.index("[network_link]") : page.rindex("```")]
    given = Path("sambasim/hardware/clusters/sn30-8.toml").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(given.replace('network_link = "roce_100"\n', "", 1) + link, encoding="utf-8")
    slow, quick = (
        json.loads(simulate("digits", "--json", "--replicas", "32", "--sync", "rdu", *cluster))["scaling"][0]
        for cluster in ((), ("--cluster", str(file)))
    )
    assert quick["predicted_exposed_sync_s"] < slow["predicted_exposed_sync_s"]


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


@pytest.mark.parametrize("subject", [whole_case("configs/parallelism/tensor.toml"), "PEF"])
def test_several_ranks_are_for_simulate_with_the_same_subject(subject: str, tmp_path: Path) -> None:
    if subject == "PEF":
        subject = str(in_stages("char_gpt", tmp_path))
    result = CliRunner().invoke(sambasim, ["tilestat", subject])
    assert isinstance(result.exception, OptionError)
    assert "has 2 ranks" in result.exception.what
    assert result.exception.remedy == f"sambasim simulate {subject} predicts all of its ranks"
    assert CliRunner().invoke(sambasim, ["simulate", subject], catch_exceptions=False).exit_code == 0


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


def test_the_replicas_of_one_node_by_default() -> None:
    output = devices("--arch", "sn30")
    assert "8 replicas on node 0, RDUs 0-7 of cluster sn30-8\n" in output
    assert "a replica has all of an SN30: 1,280 compute units, 1.0 TiB of DDR; 8 replicas fit on a node\n" in output
    assert output.splitlines()[-2].split() == ["7", "0", "7", "all"]
    assert "device SN10" not in output


def test_parts_of_rdus_and_more_than_a_node() -> None:
    placement = facts("--arch", "sn30", "--num-tiles", "4", "--replicas", "17")["placement"]
    assert placement[1] == {"replica": 1, "node": 0, "rdu": 0, "first_tile": 4, "tiles": 4}
    assert placement[16] == {"replica": 16, "node": 1, "rdu": 0, "first_tile": 0, "tiles": 4}
    assert devices("--num-tiles", "4", "--replicas", "2").splitlines()[-2].split() == ["1", "0", "0", "4-7"]


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    farm = str(write_cluster(tmp_path, rdus_per_node=3, nodes=2))
    found = facts("--cluster", farm, "--replicas", "6")
    assert (found["cluster"], found["nodes"], found["replicas_per_node"]) == ("farm", 2, 3)
    assert [(at["node"], at["rdu"]) for at in found["placement"]] == [(n, r) for n in range(2) for r in range(3)]
    assert [cluster["name"] for cluster in found["clusters"]] == ["farm"]
    refused = CliRunner().invoke(devices_command, ["--cluster", farm, "--replicas", "7"])
    assert isinstance(refused.exception, OptionError)
    assert "7 replicas, and farm holds at most 6: one for each RDU, 3 RDUs a node, 2 nodes" in str(refused.exception)


def test_a_pef_says_which_device(tmp_path: Path) -> None:
    assert facts("--pef", str(write_sample(tmp_path)))["device"] == "SN30"
    with pytest.raises(OptionError, match=r"--num-tiles 9 of an SN30, which has 8"):
        CliRunner().invoke(devices_command, ["--num-tiles", "9"], catch_exceptions=False)


def test_a_pef_whose_replicas_have_several_ranks(tmp_path: Path) -> None:
    on_chips = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"')
    several = ("parallel.data_parallel=true", "parallel.world_size=1")
    pef = str(in_stages("char_gpt", tmp_path / "several", *on_chips, *several))
    found = facts("--pef", pef, "--num-tiles", "4")
    assert [at["rank"] for at in found["placement"]] == list(range(16)), "as many replicas as fit on a node"
    last = {"rank": 15, "coordinates": {"dp": 3, "pp": 1, "tp": 1}, "node": 0, "rdu": 7, "first_tile": 4, "tiles": 4}
    assert found["placement"][15] == last
    output = devices("--pef", pef, "--replicas", "3")
    assert "12 ranks on nodes 0-1 of cluster sn30-8" in output
    assert " ".join(output.splitlines()[-2].split()) == "11 dp 2, pp 1, tp 1 1 3 all"
    command = ["compile", "-b", "4", "--pipeline-stages", "2", "--micro-batches", "2", "--output-folder", str(tmp_path)]
    CliRunner().invoke(sambasim, command, catch_exceptions=False)
    alone = str(tmp_path / "digits" / "digits.pef")
    assert " ".join(devices("--pef", alone).splitlines()[-2].split()) == "1 pp 1 0 1 all"
    refused = CliRunner().invoke(devices_command, ["--pef", alone, "--replicas", "2"])
    assert "has one replica" in str(refused.exception)
    farm = str(write_cluster(tmp_path, rdus_per_node=3, nodes=2))
    refused = CliRunner().invoke(devices_command, ["--pef", pef, "--replicas", "2", "--cluster", farm])
    assert "8 ranks, and farm holds at most 6" in str(refused.exception)
