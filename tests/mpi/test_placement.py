"""Replicas on the simulated machine: where MPI has put them, as many as it has RDUs for, and no more."""

import json
import sys
from pathlib import Path

import pytest

from sambasim.records.metrics import PlacementRecord, PredictedRecord, SummaryRecord
from tests.faults.command import sambasim
from tests.faults.fault import assert_contains
from tests.mpi.training import TWO_NODES
from tests.support.cluster import write_cluster
from tests.support.mpi import RANKS, ROOT, SAMBASIM, is_open_mpi, run_job, run_mpi
from tests.support.whole import is_whole, whole, whole_case

ALONE = ["run", "--pef", "digits", "--steps", "2", "--no-evaluate"]
RUN = [*SAMBASIM, *ALONE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the quick start for whole RDUs and for halves of them."""
    where = tmp_path_factory.mktemp("placement")
    for flags in ([], ["--num-tiles", "4", "--pef-name", "halves"]):
        sambasim(["compile", "--data-parallel", *flags], where).check()
    return where


def placed(run: SummaryRecord) -> PlacementRecord:
    assert run.placement is not None
    return run.placement


def predicted(run: SummaryRecord) -> PredictedRecord:
    assert run.predicted is not None, run.not_predicted
    return run.predicted


@pytest.mark.parametrize("np", [np if np == 2 else whole_case(np) for np in RANKS])
def test_every_replica_has_an_rdu_and_a_prediction(folder: Path, tmp_path: Path, np: int) -> None:
    """In the summary; the placement is printed first, and both times at the end."""
    metrics = tmp_path / "m.jsonl"
    ran = run_mpi(np, [*RUN, "--reduce-on-rdu", "--predict", "--metrics", str(metrics)], cwd=folder).check()
    run = SummaryRecord.model_validate_json(metrics.read_text().splitlines()[-1])
    assert placed(run) == PlacementRecord(
        device="SN30", cluster="sn30-8", tiles=None, node_of=(0,) * np, rdu_of=tuple(range(np)), first_tile_of=None
    )
    found = predicted(run)
    assert found.predicted_for == "SN30"
    assert found.predicted_sync == ("device" if np > 1 else "none")
    assert (found.predicted_sync_s > 0) == (np > 1)
    parts = found.predicted_host_s + found.predicted_model_s + found.predicted_update_s + found.predicted_sync_s
    assert found.predicted_step_s == pytest.approx(parts)
    assert set(found.predicted_by_kind_s) == {"FWD", "BCKWD", "OPT"} | ({"REDUCE", "GATHER"} if np > 1 else set())
    assert 0 < run.model_s < run.training_s
    first, _, last = ran.stdout.partition("step 1/")
    assert np != 2 or "simulated: 2 replicas on node 0, RDUs 0-1 of cluster sn30-8" in first.splitlines()
    _, heading, table = last.partition("measured on this machine")
    assert heading, last
    assert table.split("\n")[0].strip() == "predicted for SN30"
    rows = {line[:40].split("  ")[0].strip() for line in table.splitlines()}
    assert {"whole step", "forward and backward", "update", "samples/s"} <= rows
    if np > 1:
        assert "waiting for sync" in rows
        assert "no sync of RDUs was ever published" in next(
            line for line in table.splitlines() if "predicted: " in line
        )


@pytest.mark.skipif(is_open_mpi(), reason="only MPICH makes two nodes of one machine")
def test_replicas_are_on_the_nodes_that_mpi_finds(folder: Path) -> None:
    """And each node has RDUs of its own."""
    farm = str(write_cluster(folder, rdus_per_node=2))
    run = run_mpi(4, [*RUN, "--json", "--cluster", farm], cwd=folder, env=TWO_NODES).summary
    assert (placed(run).node_of, placed(run).rdu_of) == ((0, 1, 0, 1), (0, 0, 1, 1)), "MPICH deals ranks out"
    if is_whole():
        here = run_mpi(4, [*RUN, "--json"], cwd=folder).summary
        assert predicted(run).predicted_sync_s != predicted(here).predicted_sync_s


def test_where_a_pef_needs_some_tiles_replicas_share_an_rdu(folder: Path, tmp_path: Path) -> None:
    farm = str(write_cluster(tmp_path, rdus_per_node=2))
    argv = [*ALONE, "--pef", "halves", "--json", "--cluster", farm, "--emulate-replicas", "4"]
    run = sambasim(argv, folder).summary
    assert (placed(run).tiles, placed(run).rdu_of, placed(run).first_tile_of) == (4, (0, 0, 1, 1), (0, 4, 0, 4))
    assert predicted(run).predicted_for == "4 of 8 tiles of SN30"


@whole
def test_a_rank_that_only_serves_takes_no_rdu(folder: Path, tmp_path: Path) -> None:
    farm = str(write_cluster(tmp_path, rdus_per_node=1))
    serving = ["--host-sync", "parameter-server", "--parameter-servers", "1", "--cluster", farm]
    run = run_mpi(2, [*RUN, *serving], cwd=folder).check()
    assert "simulated: 1 replica on node 0, RDU 0 of cluster farm\n" in run.stdout


def test_more_replicas_than_rdus_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    farm, metrics = str(write_cluster(tmp_path, rdus_per_node=1)), tmp_path / "refused.jsonl"
    refused = run_mpi(2, [*RUN, "--cluster", farm, "--metrics", str(metrics)], cwd=folder)
    assert (refused.returncode, refused.stdout, metrics.exists()) == (2, "", False)
    assert_contains(
        refused.stderr,
        "error[launch] (every rank): 2 replicas on node 0, and a node of farm holds at most 1: one for each RDU, 1 RDU "
        "a node\n ... try:   start 1 replica a node: mpirun -np 1 sambasim run --pef digits --steps 2 --no-evaluate "
        "--cluster  ... ; or compile with --num-tiles 4, so that 2 share an RDU; or name a cluster with more RDUs a "
        "node: --cluster FILE.toml\n",
    )
    assert refused.stderr.count("error[") == 1


def test_an_emulation_fills_one_node_after_the_other(folder: Path) -> None:
    ran = sambasim([*ALONE, "--json", "--emulate-replicas", "10"], folder)
    assert placed(ran.summary).node_of == (0,) * 8 + (1,) * 2
    assert predicted(ran.summary).predicted_sync == "host"
    fields = json.loads(ran.stdout)
    assert all(name.startswith("predicted_") for name in fields.pop("predicted")), "apart from what is measured"
    assert [name for name in fields if "predicted" in name] == ["not_predicted"]


@whole
def test_nine_replicas_of_an_app_are_refused_in_its_own_words(folder: Path) -> None:
    app = str(ROOT / "examples" / "sambaflow" / "feed_forward.py")
    command = [*SAMBASIM, app, "compile", "-b", "4", "--data-parallel", "--pef-name", "net"]
    run_job(command, cwd=folder, timeout=120).check()
    argv = [*SAMBASIM, app, "measure-performance", "-b", "4", "--pef", "net", "--data-parallel"]
    result = run_mpi(9, argv, cwd=folder, timeout=200)
    assert result.returncode == 2
    assert "9 replicas on node 0, and a node of sn30-8 holds at most 8: one for each RDU, 8 RDUs" in result.stderr
    typed = f"{app} measure-performance -b 4 --pef net --data-parallel; or compile with --num-tiles 4, so that 2 share"
    assert f"mpirun -np 8 {sys.executable} -m sambasim {typed}" in result.stderr
    assert "--cluster" not in result.stderr, "an app has no such flag"
    assert result.stdout == ""
