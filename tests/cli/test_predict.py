"""`sambasim simulate`, `tilestat` and `devices`: what they print, and what they refuse."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sambasim.errors import MachineError, OptionError
from sambasim.hardware.spec import cluster_names, device_names, load_device
from sambasim.units import format_seconds
from tests.cli.typed import each, invoked, printed, record, refused
from tests.pef.samples import write_sample
from tests.support.cluster import write_cluster
from tests.support.whole import whole

Simulate = Callable[..., str]

FIGURES = {
    "tiles": 2, "pcus": 64, "pmus": 64, "sram_bytes": 33554432, "pcu_bf16_flops_per_s": "468.75e9",
    "ddr_capacity_bytes": 68719476736, "ddr_bandwidth_bytes_per_s": "100e9",
}  # fmt: skip
_LINES = [f"{name} = {value}" for name, value in FIGURES.items()], [f'{name} = "estimate"' for name in FIGURES]
DEVICE = "\n".join(['name = "Mine"\ncluster = "sn10-8"', *_LINES[0], "[sources]", *_LINES[1], ""])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    flags = ("--data-parallel", "-b", "32", "--num-tiles", "4", "--o1", "--check", "0")
    printed("compile", *flags, "--output-folder", str(folder))
    return folder


@pytest.fixture
def simulate(folder: Path) -> Simulate:
    return partial(printed, "simulate", "digits", "--output-folder", str(folder))


@pytest.fixture
def simulated(folder: Path) -> Callable[..., Any]:
    return partial(record, "simulate", "digits", "--output-folder", str(folder))


@pytest.fixture
def own_device(tmp_path: Path) -> Callable[..., list[str]]:
    """Flags for the device of ones own, in which a text is replaced."""

    def written(before: str = "", now: str = "") -> list[str]:
        (tmp_path / "mine.toml").write_text(DEVICE.replace(before, now, 1) if before else DEVICE, encoding="utf-8")
        return ["--arch", str(tmp_path / "mine.toml")]

    return written


def test_predictions_are_printed_as_such(simulate: Simulate) -> None:
    text = simulate()
    for said in (
        "on 4 of 8 tiles of SN30, o1: predicted, not measured", "slowest sections",
        "most of the time is for section launches", "calibrated on thirteen published steps",
        "this is one replica, without REDUCE and GATHER; --replicas 2,4,8 adds them",
    ):  # fmt: skip
        assert said in text
    assert "range" not in text, "no calibration row is bound by launches, as this is"
    text = simulate("--arch", "SN40")  # taken whole
    assert "on SN40L, o1" in text
    assert "no published step of SN40L backs this" in text
    assert "range" not in text
    assert "on 4 of 8 tiles of SN30" in simulate("--arch", "sn30"), "its own device has the tiles of the PEF"
    assert "on 2 of 8 tiles of SN30, o0" in simulate("--num-tiles", "2", "--o0")


def test_json_has_every_section_and_every_row(simulated: Callable[..., Any]) -> None:
    one = simulated("--replicas", "1,2,32")
    assert (one["device"], one["tiles"], one["level"], one["batch_size"]) == ("SN30", 4, "o1", 32)
    assert one["device_s"] == pytest.approx(sum(section["predicted_s"] for section in one["sections"]))
    assert one["predicted_s"] == pytest.approx(one["device_s"] + one["host_s"])
    assert one["predicted_least_s"] is None
    rows = [(row["replicas"], row["nodes"], row["sync"]) for row in one["scaling"]]
    assert rows == [(1, 1, None), (2, 1, "host"), (2, 1, "rdu"), (32, 2, "host"), (32, 2, "rdu")]
    assert one["scaling"][0]["predicted_s"] == pytest.approx(one["predicted_s"])
    of_two = 2 * one["memory_bytes"] - one["states_bytes"]  # of 4 tiles each, on one RDU, with ZeRO 1
    assert one["scaling"][1]["bytes_per_rdu"] == pytest.approx(of_two, rel=1e-3)


def test_batch_sizes_and_replicas_make_a_table_and_a_csv_file(simulate: Simulate, tmp_path: Path) -> None:
    file, plot = tmp_path / "new" / "rows.csv", tmp_path / "rows.svg"
    written = ["--csv", str(file), "--plot", str(plot)]
    text = simulate("-b", "32,64", "--replicas", "2,8", "--sync", "rdu", *written)
    assert text.splitlines()[-2:] == [f"{file} written", f"{plot} written"]
    assert "replicas, predicted" in text
    drawn = "".join(ElementTree.fromstring(plot.read_text(encoding="utf-8")).itertext())
    assert "digits on 4 of 8 tiles of SN30: predicted, not measured" in drawn
    assert all(name in drawn for name in ("rdu, batch 32", "rdu, batch 64", "no sync, batch 32"))
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    shown = [(row["batch_size"], row["replicas"], row["sync"]) for row in rows]
    assert shown == [(size, replicas, "rdu") for size in ("32", "64") for replicas in ("2", "8")]
    assert all(float(row["predicted_samples_per_s"]) > 0 for row in rows)
    assert simulate("--json", *written).count("\n") == 1


def test_a_device_of_ones_own_is_read(simulate: Simulate, own_device: Callable[..., list[str]]) -> None:
    text = simulate(*own_device(), "--replicas", "2")
    for said in ("digits on Mine", "no published step of Mine", "links are those of cluster sn10-8"):
        assert said in text


def test_replicas_on_one_node_and_on_nodes_of_their_own(simulate: Simulate, tmp_path: Path) -> None:
    text = Path("sambasim/hardware/clusters/sn30-8.toml").read_text(encoding="utf-8")
    file = tmp_path / "apart.toml"
    file.write_text(text.replace("rdus_per_node = 8", "rdus_per_node = 1", 1), encoding="utf-8")
    advice, parameters = "set rdus_per_node = 1 in a cluster file", "receive parameters while the next step"
    said = (simulate("--replicas", "2", "--num-tiles", "8", *own) for own in ((), ("--cluster", str(file))))
    together, apart = (" ".join(text.split()) for text in said)
    assert (advice in together, parameters in together) == (True, False)
    assert (advice in apart, parameters in apart) == (False, True)


def test_a_model_that_does_not_fit_is_refused(simulate: Simulate, own_device: Callable[..., list[str]]) -> None:
    with pytest.raises(MachineError, match=r"of DDR, and Mine has 64\.0 KiB") as error:
        simulate(*own_device("68719476736", "65536"))
    assert "(predicted)" not in str(error.value), "nothing fits"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("pcus = 64", "pcus = 0"), "pcus = 0: Input should be greater than or equal to 1"),
        (("pcus = 64\n", ""), "pcus is missing"),
        (("tiles = 2", "tiels = 2"), "tiels is unknown"),
        (('pcus = "estimate"\n', ""), "no source is given for pcus"),
        (("100e9", "9" * 5000), "is not valid TOML: Exceeds the limit"),
        (("100e9", "inf"), "ddr_bandwidth_bytes_per_s = inf: Input should be a finite number"),
        (("[sources]", "[sources]\npcu = 'estimate'"), "sources has pcu, which is not a figure"),
        (("[sources]", 'hbm_capacity_bytes = 1\n[sources]\nhbm_capacity_bytes = "estimate"'), "HBM needs both"),
    ],
)
def test_a_wrong_device_file_is_refused(
    simulate: Simulate, own_device: Callable[..., list[str]], change: tuple[str, str], told: str
) -> None:
    with pytest.raises(OptionError) as error:
        simulate(*own_device(*change))
    assert told in error.value.what
    assert "mine.toml" in error.value.what
    assert "DeviceSpec" not in error.value.what


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
        (("--num-tiles", "0"), "--num-tiles 0 of an SN30, which has 8"),
        (("--num-tiles", "9"), "--num-tiles 9 of an SN30, which has 8"),
        (("--set", "optimizer.lr=1"), "--set changes a config, and digits is a PEF"),
        (("--csv", "/proc/rows.csv"), "the CSV file cannot be written"),
        (("--arch=sn50",), "--arch sn40, or a TOML file"),
        (("--cluster=sn30",), "--cluster sn30-8, or a TOML"),
    ],
)
def test_what_cannot_be_asked_is_refused(simulate: Simulate, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(OptionError) as error:
        simulate(*arguments)
    assert told in str(error.value)
    assert error.value.remedy


def test_what_would_make_it_quicker_is_the_same_in_text_and_json(
    simulate: Simulate, simulated: Callable[..., Any]
) -> None:
    text, told = simulate(), simulated()
    assert "; priced in bf16, whatever dtype the PEF has" in text.splitlines()[0]
    assert told["priced_in"].startswith("priced in bf16")
    assert told["advice"], "a batch of 32 is bound by launches"
    for change in told["advice"]:
        gain = change["predicted_samples_per_s"] / change["predicted_samples_per_s_before"]
        assert gain > 1.02
        assert change["predicted_gain_samples_per_s"] > 0
        steps = " -> ".join(format_seconds(change[name]) for name in ("predicted_s_before", "predicted_s"))
        assert f"  x{gain:.2f}  {change['change']}: a step of {steps};" in text
        assert change["how"] in text
    assert "\nOne replica on a whole RDU\n" in text
    assert [device["device"] for device in told["devices"]] == ["SN10", "SN30", "SN40L"]


def test_what_would_fit_is_predicted(tmp_path: Path, own_device: Callable[..., list[str]]) -> None:
    (tmp_path / "net.py").write_text("""from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    def forward(self, x):
        return super().forward(x).square().mean()
""")
    data = each("--set", ["data.source=synthetic", 'data.inputs={x="float32[64]"}', "optimizer.name=sgd"])
    asked = ["simulate", f"{tmp_path}/net.py:Net", *data, *own_device("68719476736", "2097152"), "--num-tiles", "1"]
    error = refused(*asked, "-b", "2048", kind=MachineError)
    assert "1 of 2 tiles of Mine has 1.0 MiB" in error.what
    fits = str(error.remedy).splitlines()
    assert [line.partition(":")[0] for line in fits] == ["--num-tiles 2", "-b 1024"], fits
    assert all(" samples/s (predicted), " in line for line in fits)
    assert printed(*asked, "-b", "1024")
    assert printed(*asked, "-b", "2048", "--num-tiles", "2")


@whole
def test_a_recurrent_model_at_a_batch_larger_than_its_data(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("""from torch import nn
class Net(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0].square().mean()
""")
    fields = ["model.args.input_size=8", "model.args.hidden_size=8", "data.source=synthetic", "optimizer.name=adamw"]
    data = ['data.inputs={x="float32[16, 8]"}', "data.samples=8"]
    text = printed("simulate", f"{tmp_path}/net.py:Net", *each("--set", [*fields, *data]), "-b", "512")
    assert "batch 512" in text
    assert "range" not in text, "no calibration row is recurrent"
    assert "the dependency of each time step on the last is ignored" in text


def test_a_link_of_ones_own_is_read(simulated: Callable[..., Any], tmp_path: Path) -> None:
    """As the page about clusters has it."""
    page = Path("docs/device-model.md").read_text(encoding="utf-8")
    link = page[page.index("[network_link]") : page.rindex("```")]
    given = Path("sambasim/hardware/clusters/sn30-8.toml").read_text(encoding="utf-8")
    file = tmp_path / "mine.toml"
    file.write_text(given.replace('network_link = "roce_100"\n', "", 1) + link, encoding="utf-8")
    asked = ("--replicas", "32", "--sync", "rdu")
    slow, quick = (simulated(*asked, *own)["scaling"][0] for own in ((), ("--cluster", str(file))))
    assert quick["predicted_exposed_sync_s"] < slow["predicted_exposed_sync_s"]


def test_a_row_for_each_tile_of_the_replica(folder: Path) -> None:
    text = printed("tilestat", "digits", "--output-folder", str(folder))
    assert "digits on 4 of 8 tiles of SN30, a step of" in text
    assert "predicted" in text.splitlines()[0]
    assert text.split("\n\n")[1].split()[:4] == ["tile", "%idle", "%exec", "%pload+%aload"]
    assert [line.split()[0] for line in text.splitlines() if "TILE_" in line] == [f"TILE_{n}" for n in range(4)]
    assert "which no publication separates" in text
    assert "%chkpt and %quiesce are not modelled" in text
    assert "\x1b" not in text


def test_shares_add_up_and_what_is_unknown_is_null(folder: Path) -> None:
    told = record("tilestat", "digits", "--num-tiles", "2", "--output-folder", str(folder))
    assert (told["kind"], told["device"], len(told["tiles"])) == ("predicted", "2 of 8 tiles of SN30", 2)
    for tile in told["tiles"]:
        shares = [value for value in tile.values() if isinstance(value, float)]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) > 0
        unknown = {name for name, value in tile.items() if value is None}
        assert unknown == {f"predicted_{share}_share" for share in ("pload", "aload", "chkpt", "quiesce")}


def test_everything_that_ships_is_listed_with_its_sources() -> None:
    told, text = record("devices"), printed("devices")
    assert [device["name"] for device in told["devices"]] == [load_device(name).name for name in device_names()]
    assert [cluster["name"] for cluster in told["clusters"]] == list(cluster_names())
    for spec in (*told["devices"], *told["clusters"]):
        assert all(figure["source"] for figure in spec["figures"])
    for device in map(load_device, device_names()):
        (figures,) = (spec["figures"] for spec in told["devices"] if spec["name"] == device.name)
        assert {"name": "pcus", "value": device.pcus, "source": device.sources["pcus"]} in figures
        assert all(source in text for source in device.sources.values())
    assert "peer links per rdu       4                     estimate: as many as an SN10 has" in text
    assert "tiles           not published   none" in text, "an SN40L"
    assert "\x1b" not in text


def test_the_replicas_of_one_node_by_default_and_of_parts_of_rdus() -> None:
    text = printed("devices", "--arch", "sn30")
    assert "8 replicas on node 0, RDUs 0-7 of cluster sn30-8\n" in text
    assert "a replica has all of an SN30: 1,280 compute units, 1.0 TiB of DDR; 8 replicas fit on a node\n" in text
    assert text.splitlines()[-2].split() == ["7", "node", "0", "RDU", "7"]
    assert "device SN10" not in text
    placement = record("devices", "--arch", "sn30", "--num-tiles", "4", "--replicas", "17")["placement"]
    assert placement[1] == {"replica": 1, "node": 0, "rdu": 0, "first_tile": 4, "tiles": 4}
    assert placement[16] == {"replica": 16, "node": 1, "rdu": 0, "first_tile": 0, "tiles": 4}
    last = printed("devices", "--num-tiles", "4", "--replicas", "2").splitlines()[-2]
    assert last.split() == ["1", "node", "0", "RDU", "0", "tiles", "4-7"]


def test_a_cluster_of_ones_own_and_the_device_of_a_pef(tmp_path: Path) -> None:
    farm = str(write_cluster(tmp_path, rdus_per_node=3, nodes=2))
    told = record("devices", "--cluster", farm, "--replicas", "6")
    assert (told["cluster"], told["nodes"], told["replicas_per_node"]) == ("farm", 2, 3)
    assert [(at["node"], at["rdu"]) for at in told["placement"]] == [(n, r) for n in range(2) for r in range(3)]
    assert [cluster["name"] for cluster in told["clusters"]] == ["farm"]
    error = refused("devices", "--cluster", farm, "--replicas", "7")
    assert "7 replicas, and farm holds at most 6: one for each RDU, 3 RDUs a node, 2 nodes" in error.what
    assert record("devices", "--pef", str(write_sample(tmp_path)))["device"] == "SN30"
    for tiles in ("9", "0"):
        assert f"--num-tiles {tiles} of an SN30, which has 8" in refused("devices", "--num-tiles", tiles).what


def test_a_pef_whose_replicas_have_several_ranks(mesh_pef: Path, tmp_path: Path) -> None:
    pef = ("--pef", str(mesh_pef))
    placement = record("devices", *pef, "--num-tiles", "4")["placement"]
    assert [at["rank"] for at in placement] == list(range(16)), "as many replicas as fit on a node"
    last = {"rank": 15, "coordinates": {"dp": 3, "pp": 1, "tp": 1}, "node": 0, "rdu": 7, "first_tile": 4, "tiles": 4}
    assert placement[15] == last
    text = printed("devices", *pef, "--replicas", "3")
    assert "12 ranks on nodes 0-1 of cluster sn30-8" in text
    assert " ".join(text.splitlines()[-2].split()) == "11 dp 2, pp 1, tp 1 node 1 RDU 3"
    stages = ["--pipeline-stages", "2", "--micro-batches", "2", "--output-folder", str(tmp_path)]
    printed("compile", "-b", "4", "--check", "0", *stages)
    alone = ("--pef", str(tmp_path / "digits" / "digits.pef"))
    assert " ".join(printed("devices", *alone).splitlines()[-2].split()) == "1 pp 1 node 0 RDU 1"
    assert "has one replica" in refused("devices", *alone, "--replicas", "2").what
    farm = str(write_cluster(tmp_path, rdus_per_node=3, nodes=2))
    assert "8 ranks, and farm holds at most 6" in refused("devices", *pef, "--replicas", "2", "--cluster", farm).what


def test_a_model_that_cannot_be_built_is_told_without_repeating_a_phase(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    result = invoked("estimate-memory", f"{tmp_path}/net.py:Net")
    assert result.stderr.splitlines() == ["build the model …"]
    assert f"{tmp_path}/net.py has no Net" in str(result.exception)
