"""A cluster of one's own, as a user would write it."""

from pathlib import Path

from sambasim.hardware.spec import load_cluster


def write_cluster(folder: Path, rdus_per_node: int, nodes: int | None = None) -> Path:
    """`farm.toml` in `folder`, like sn30-8 but for these numbers and a peer link of its own; its path."""
    own = {"peer_link"}
    shipped = load_cluster("sn30-8")
    lines = ['name = "farm"', f"rdus_per_node = {rdus_per_node}", *([f"nodes = {nodes}"] if nodes else [])]
    for name in ("host_link", "network_link"):
        lines.append(f'{name} = "{getattr(shipped, name).name}"')
    for name in set(shipped.sources) - own - {"rdus_per_node", "host_link", "network_link"}:
        lines.append(f"{name} = {getattr(shipped, name)}")
    lines += ["[peer_link]", 'name = "cable"', "bandwidth_bytes_per_s = 1e9", "latency_s = 1e-6"]
    lines += ["[peer_link.sources]", 'bandwidth_bytes_per_s = "measured"', 'latency_s = "estimate"', "[sources]"]
    lines += [f'{name} = "mine"' for name in shipped.sources]
    path = folder / "farm.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
