"""The two bandwidths of an all-reduce, as nccl-tests defines them in its PERFORMANCE.md."""


def algorithm_bandwidth(size_bytes: int, time_s: float) -> float:
    """Bytes of the buffer for each second: what a user sees."""
    return size_bytes / time_s


def bus_bandwidth(size_bytes: int, time_s: float, world_size: int) -> float:
    """The same, times 2 (n - 1) / n: every rank must send and receive that many buffers, whatever the algorithm; so
    this can be compared with a link's bandwidth, and between numbers of ranks."""
    return algorithm_bandwidth(size_bytes, time_s) * 2 * (world_size - 1) / world_size
