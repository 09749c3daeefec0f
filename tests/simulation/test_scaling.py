"""A step of many replicas, by law."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.hardware.budget import Budget, budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import ClusterSpec, LinkSpec, load_cluster, load_device
from sambasim.ir.graph import SectionKind
from sambasim.simulation.alone import price_ranks
from sambasim.simulation.scaling import SyncedRank, Track, with_sync
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program

DEVICE = load_device("sn30")
BUDGET = budget_of(DEVICE, 4)

_REPLICAS = st.integers(1, 300)
_FACTOR = st.floats(1, 100)


@st.composite
def _clusters(draw: st.DrawFn) -> ClusterSpec:
    """Peers are joined by links like those to the host, whose memory is no faster than the devices' together."""
    bandwidth, latency = draw(st.floats(1e8, 1e12)), draw(st.floats(1e-9, 1e-4))
    cluster = load_cluster("sn30-8")
    link = cluster.peer_link.model_copy(update={"bandwidth_bytes_per_s": bandwidth, "latency_s": latency})
    network = {"bandwidth_bytes_per_s": draw(st.floats(1e8, 1e12)), "latency_s": draw(st.floats(1e-9, 1e-4))}
    rates = {"rdus_per_node": draw(st.integers(1, 16)), "peer_link": link, "peer_links_per_rdu": 1, "host_link": link}
    memory = {"host_memory_bytes_per_s": draw(st.floats(1e9, BUDGET.memory_bytes_per_s))}
    return cluster.model_copy(update=rates | memory | {"network_link": cluster.network_link.model_copy(update=network)})


def _scaled(replicas: int, path: SyncPath, cluster: ClusterSpec, budget: Budget = BUDGET) -> SyncedRank:
    (rank,) = price_ranks(sample_program(), budget, level="o3")
    return with_sync(rank.program, rank.alone, place(replicas, DEVICE, 4, cluster), path)


@given(_REPLICAS, st.sampled_from(SyncPath), _clusters())
def test_the_parts_are_the_total(replicas: int, path: SyncPath, cluster: ClusterSpec) -> None:
    scaled = _scaled(replicas, path, cluster)
    assert scaled.predicted_s == pytest.approx(max(span.stop_s for span in scaled.spans))
    assert scaled.predicted_s == pytest.approx(scaled.step.host_s + scaled.step.device_s + scaled.exposed_sync_s)
    assert scaled.sync_s + scaled.slowest_s == pytest.approx(scaled.exposed_sync_s + scaled.hidden_sync_s)
    assert scaled.hidden_sync_s >= -1e-12
    assert 0 < scaled.ideal_s <= scaled.predicted_s
    assert _busy_s(scaled, Track.LINKS) == pytest.approx(scaled.sync_s)
    assert _busy_s(scaled, Track.SECTIONS) == pytest.approx(scaled.step.device_s)
    assert _busy_s(scaled, Track.HOST) == pytest.approx(scaled.step.host_s)


def _busy_s(scaled: SyncedRank, track: Track) -> float:
    return sum(span.predicted_s for span in scaled.spans if span.track is track)


@given(_REPLICAS, st.sampled_from(SyncPath), _clusters())
def test_spans_of_a_track_follow_each_other(replicas: int, path: SyncPath, cluster: ClusterSpec) -> None:
    scaled = _scaled(replicas, path, cluster)
    for track in Track:
        spans = [span for span in scaled.spans if span.track is track]
        assert all(span.start_s <= span.stop_s for span in spans)
        assert all(a.stop_s <= b.start_s + 1e-12 for a, b in pairwise(spans))


@given(st.sampled_from(SyncPath), _clusters())
def test_one_replica_has_no_sync(path: SyncPath, cluster: ClusterSpec) -> None:
    scaled = _scaled(1, path, cluster)
    assert (scaled.sync_s, scaled.exposed_sync_s, scaled.path) == (0.0, 0.0, None)
    assert not {span.kind for span in scaled.spans} & {SectionKind.REDUCE, SectionKind.GATHER}


@given(_REPLICAS, _clusters())
def test_the_host_is_never_quicker_on_the_same_links(replicas: int, cluster: ClusterSpec) -> None:
    host, device = (_scaled(replicas, path, cluster).predicted_s for path in (SyncPath.HOST, SyncPath.RDU))
    assert device <= host * (1 + 1e-9)


@given(_REPLICAS, st.sampled_from(SyncPath), _clusters(), _FACTOR)
def test_more_of_any_link_is_never_slower(replicas: int, path: SyncPath, cluster: ClusterSpec, factor: float) -> None:
    before = _scaled(replicas, path, cluster).predicted_s
    for name in (
        "peer_link", "host_link", "network_link", "host_memory_bytes_per_s", "peer_links_per_rdu", "host_links_per_rdu",
        "network_links_per_node",
    ):  # fmt: skip
        better = cluster.model_copy(update={name: _better(getattr(cluster, name), factor)})
        assert _scaled(replicas, path, better).predicted_s <= before * (1 + 1e-9)


def _better(value: LinkSpec | float, factor: float) -> LinkSpec | float:
    if not isinstance(value, LinkSpec):
        return value * int(factor) if isinstance(value, int) else value * factor
    better = {"bandwidth_bytes_per_s": value.bandwidth_bytes_per_s * factor, "latency_s": value.latency_s / factor}
    return value.model_copy(update=better)


@given(_REPLICAS, st.sampled_from(SyncPath), _clusters(), _FACTOR)
def test_more_units_and_bandwidth_are_never_slower(
    replicas: int, path: SyncPath, cluster: ClusterSpec, factor: float
) -> None:
    before = _scaled(replicas, path, cluster).predicted_s
    for better in (
        replace(BUDGET, placeable_units=int(BUDGET.placeable_units * factor)),
        replace(BUDGET, memory_bytes_per_s=BUDGET.memory_bytes_per_s * factor),
        replace(BUDGET, chip_bytes=int(BUDGET.chip_bytes * factor)),
        replace(BUDGET, launch_s=BUDGET.launch_s / factor),
    ):
        assert _scaled(replicas, path, cluster, budget=better).predicted_s <= before * (1 + 1e-9)
