"""Nodes of RDUs and what joins them, as data: what `--cluster` names."""

import tomllib
from collections.abc import Mapping
from functools import cache

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from sambasim.errors import OptionError
from sambasim.hardware.spec import Spec
from sambasim.hardware.tables import checked, is_file, shipped, shipped_text, user_text


class LinkSpec(Spec):
    """A link: bytes per second in each direction, and seconds for a message of no bytes."""

    bandwidth_bytes_per_s: PositiveFloat
    latency_s: NonNegativeFloat


class ClusterSpec(Spec):
    """Equal nodes; `nodes` is None for as many as it takes.

    peer_link: between two RDUs of a node; an RDU has `peer_links_per_rdu` of them, which all its traffic can use
    host_link: between an RDU and its host, `host_links_per_rdu` of them
    host_memory_bytes_per_s: of one node, shared by all that its RDUs copy and its host adds
    network_link: between nodes; the RDUs of a node share `network_links_per_node` of them
    """

    nodes: PositiveInt | None = None
    rdus_per_node: PositiveInt
    peer_link: LinkSpec
    peer_links_per_rdu: PositiveInt
    host_link: LinkSpec
    host_links_per_rdu: PositiveInt
    host_memory_bytes_per_s: PositiveFloat
    network_link: LinkSpec
    network_links_per_node: PositiveInt

    @classmethod
    def without_source(cls) -> frozenset[str]:
        return frozenset({"nodes"})


def cluster_names() -> tuple[str, ...]:
    """The clusters that ship with sambasim, in order."""
    return shipped("clusters")


@cache
def load_cluster(name: str) -> ClusterSpec:
    """The cluster called `name`, or the one in the file of that name. Raises OptionError if there is none.

    Links are given by name, of those that ship with sambasim, or as tables of their own.
    """
    if is_file(name):
        return _cluster(user_text("--cluster", name), name)
    if name not in cluster_names():
        raise OptionError(
            f"there is no cluster called {name!r}",
            remedy=f"--cluster takes one of {', '.join(cluster_names())}, or a TOML file",
        )
    return _cluster(shipped_text(f"clusters/{name}.toml"), f"the cluster file {name}.toml")


@cache
def link_tables() -> Mapping[str, Mapping[str, object]]:
    """The links that ship with sambasim, by name."""
    return tomllib.loads(shipped_text("links.toml"))


def _cluster(text: str, where: str) -> ClusterSpec:
    def with_links(table: dict[str, object]) -> dict[str, object]:
        return {key: _link(value, key, where) if key.endswith("_link") else value for key, value in table.items()}

    return checked(ClusterSpec, text, where, with_links)


def _link(given: object, key: str, where: str) -> object:
    if not isinstance(given, str):
        return given
    if given not in link_tables():
        raise OptionError(
            f"{key} of {where} is {given!r}, and there is no link of that name",
            remedy=f"name one of {', '.join(link_tables())}, or write a table [{key}]",
        )
    return {"name": given, **link_tables()[given]}
