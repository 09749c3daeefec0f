"""Every method of the communicator, on data that depends on the rank. Rank 0 prints how many ranks got through."""

import mmap
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import torch
import torch.distributed as dist

from sambasim.errors import MachineError
from sambasim.runtime.machine import node_memory
from sambasim.runtime.machine.communicator import Communicator, SharedWindow
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.machine.node_memory import ByteArray
from sambasim.runtime.machine.process import bring_up, take_down
from sambasim.runtime.record.trace import compare_clocks
from sambasim.runtime.transports.communication import sum_of
from sambasim.runtime.transports.messages import Boxes, MessageGroup
from sambasim.units import MIB

AHEAD_NS = 1_000_000_000
"""By how much the clock of each rank is set ahead of that of the rank before."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def bytes_of(sender: int, receiver: int) -> ByteArray:
    """What `sender` has for `receiver`: a length and a content that no other pair has. Some are empty."""
    length = (sender * 7 + receiver * 3) % 5 * 11
    return np.arange(16 * sender + receiver + 1, 16 * sender + receiver + 1 + length).astype(np.uint8)


def topology(c: Communicator) -> None:
    expect(c.node_of[c.rank] == c.node_index, "node_of names my node")
    expect(c.local_ranks[c.local_rank] == c.rank, "local_ranks names me")
    expect(len(c.local_ranks) == c.local_size, "local_size")
    expect(len(c.node_of) == c.world_size, "node_of covers the world")
    expect(set(c.node_of) == set(range(c.node_count)), "nodes are numbered from 0")
    expect(c.node_of[0] == 0, "the node of rank 0 is node 0")
    expect(set(c.all_gather_object(c.node_of)) == {c.node_of}, "all ranks agree on the nodes")


def objects(c: Communicator) -> None:
    expect(c.broadcast_object({"from": c.rank} if c.rank == 0 else None) == {"from": 0}, "broadcast")
    gathered = c.gather_object(c.rank**2 + 1)
    squares = tuple(rank**2 + 1 for rank in range(c.world_size))
    expect(gathered == (squares if c.rank == 0 else None), "gather")
    expect(c.all_gather_object(c.rank**2 + 1) == squares, "all_gather of objects")


def all_gather(c: Communicator) -> None:
    parts = [np.full(5, rank + 1, dtype=np.uint8) for rank in range(c.world_size)]
    receive = np.full(5 * c.world_size, 255, dtype=np.uint8)
    c.all_gather(parts[c.rank], receive)()
    expect(bool(np.array_equal(receive, np.concatenate(parts))), "all_gather")


def messages(c: Communicator) -> None:
    if c.world_size == 1:
        return  # it has no messages
    ranks = range(c.world_size)
    arrived = {sender: np.full(len(bytes_of(sender, c.rank)), 255, dtype=np.uint8) for sender in ranks}
    second = {sender: np.full(1, 255, dtype=np.uint8) for sender in ranks}
    requests = [c.irecv(second[sender], sender, tag=8) for sender in ranks]
    requests += [c.irecv(buffer, sender, tag=7) for sender, buffer in arrived.items()]
    requests += [c.isend(bytes_of(c.rank, receiver), receiver, tag=7) for receiver in ranks]
    requests += [c.isend(np.array([c.rank + 100], dtype=np.uint8), receiver, tag=8) for receiver in ranks]
    c.wait_all(requests)
    for sender in ranks:
        expect(bool(np.array_equal(arrived[sender], bytes_of(sender, c.rank))), f"message from rank {sender}")
        expect(int(second[sender][0]) == sender + 100, f"tags keep messages of rank {sender} apart")


def messages_asked_for(c: Communicator) -> None:
    if c.world_size == 1:
        return
    right, left = (c.rank + 1) % c.world_size, (c.rank - 1) % c.world_size
    buffer = np.zeros(4, dtype=np.uint8)
    receive = [c.irecv(buffer, left, tag=9)]
    c.barrier()
    expect(c.test_all([]), "no messages are through")
    expect(not c.test_all(receive), "nobody has sent yet")
    c.barrier()
    sends = [c.isend(np.full(4, c.rank + 1, dtype=np.uint8), right, tag=9)]
    while not c.test_all([*receive, *sends]):
        pass
    expect(bool((buffer == left + 1).all()), "the message is there")
    expect(c.test_all(receive), "what is through stays through")
    c.wait_all([*receive, *sends])


def shared_windows(c: Communicator) -> None:
    """A small one, of which ranks use all; and one that is mapped again, where huge pages can lie, of which each uses
    other bytes."""
    ranks = range(c.world_size)
    small = [slice(0, 1000 + 5000 * rank) for rank in ranks]
    large = [slice(MIB, MIB + 2 * MIB * (1 + rank % 3)) for rank in ranks]
    for used, behind, by_peer in ((small, 0, 0), (large, 4 * MIB + 4321, 5)):
        mine = used[c.rank]
        window = c.allocate_shared(mine.stop + behind, [(mine.start, mine.stop), (5, 6)] if behind else None)
        own = window.parts[c.local_rank]
        expect(own.ctypes.data % mmap.PAGESIZE == 0, "parts start on a page")
        expect(not own.any(), "parts are zeros at first")
        own[mine] = c.rank + 1
        meet(c, window)
        for part, rank in zip(window.parts, c.local_ranks, strict=True):
            expect(len(part) == used[rank].stop + behind, f"the part of rank {rank} is as long as it asked")
            expect(bool((part[used[rank]] == rank + 1).all()), f"the part of rank {rank} holds what it wrote")
            expect(not part[used[rank].stop :].any(), "and zeros behind that")
        c.node_barrier()
        window.parts[(c.local_rank + 1) % c.local_size][by_peer] = 200 + c.rank
        meet(c, window)
        writer = c.local_ranks[(c.local_rank - 1) % c.local_size]
        expect(int(own[by_peer]) == 200 + writer, "a peer's write arrives in my part")
    sparse = c.allocate_shared(1 << 20, touched=[(0, 1)])
    expect(not sparse.parts[c.local_rank].any(), "parts of which little is touched are zeros at first too")
    empty = c.allocate_shared(0)
    expect(len(empty.parts[c.local_rank]) == 0, "a part may be empty")
    c.barrier()
    expect(not node_memory.mapped_names(), "no name is left, so that a kill leaves nothing behind")


def meet(c: Communicator, window: SharedWindow) -> None:
    window.sync()
    c.node_barrier()
    window.sync()


def shared_memory_that_is_not_there(c: Communicator) -> None:
    """More than any machine has: the check must come before the memory is touched."""
    if c.world_size == 1 or c.node_count > 1:
        return
    error = "it was allocated"
    try:
        c.allocate_shared((1 << 50) if c.rank == 1 else 4096)
    except MachineError as refused:
        error = str(refused)
    expect(set(c.all_gather_object(error)) == {error}, "all ranks say the same")
    says = r"the replicas of this node need 1\d\d\d\.0 TiB of shared memory, and /dev/shm has .*--shm-size"
    expect(re.match(says, error, re.DOTALL) is not None, error)
    expect(f"where: host {c.host_name}" in error, error)


def freed_pages(c: Communicator) -> None:
    """Freeing them again and again takes no memory."""
    memory = node_memory.private_storage(1 << 21)
    free = node_memory.freeing([memory[4096:900_000]])
    for count in (1_000, 100_000):
        before = _resident_bytes()
        for _ in range(count):
            free()
    expect(_resident_bytes() - before < 4 << 20, "freeing pages takes memory")


def _resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def clocks(c: Communicator) -> None:
    expect({one.ahead_ns for one in compare_clocks(c)} == {0}, "ranks of one host read one clock")
    for rank, one in enumerate(compare_clocks(c, lambda: perf_counter_ns() + c.rank * AHEAD_NS)):
        expect(abs(one.ahead_ns - rank * AHEAD_NS) <= one.accuracy_ns < AHEAD_NS, f"the clock of rank {rank}")


def interfaces_of_store() -> set[str]:
    """The addresses, in hexadecimal digits, on which the store of the process group accepts connections."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    expect(isinstance(store, dist.TCPStore), "the kind of the store")
    own = int(getattr(store, "port", 0))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = (line[1].partition(":") for line in lines if line[3] == "0A")
    return {address for address, _, port in listening if int(port, 16) == own}


def process_group(c: Communicator) -> None:
    """torch.distributed over the communicator: brought up, used by the ranks, taken down, and up again."""
    for _ in range(2):
        bring_up(c, timeout_s=30)
        found = (dist.get_rank(), dist.get_world_size(), dist.get_backend())
        expect(found == (c.rank, c.world_size, "gloo"), "the process group")
        if len(set(c.all_gather_object(c.host_name))) == 1:
            expect(interfaces_of_store() == {"0100007F"}, "the store of one host is for this host only")
        values = torch.tensor([10**c.rank, c.rank], dtype=torch.int64)
        dist.all_reduce(values)
        ranks = range(c.world_size)
        expect(values.tolist() == [sum(10**rank for rank in ranks), sum(ranks)], "all_reduce by gloo")
        dist.new_group([c.world_size - 1])
        dist.barrier()
        take_down()
        expect(not dist.is_initialized(), "the process group is down")
    take_down()
    expect("MASTER_PORT" not in os.environ, "no environment")


def mailbox(c: Communicator) -> None:
    """Tensors of all sizes, one of them too large for a box, more often than there are boxes; late ranks."""
    if c.node_count > 1:
        return
    group = MessageGroup(c)
    group.boxes = Boxes(c, 64)
    first, second = group.gather("first", sum_of), group.gather("second", lambda tensors: torch.stack(list(tensors)))
    for turn in range(6):
        shape = ((16,), (), (0, 3), (4, 4), (17,), (2,))[turn]
        if turn % c.world_size == c.rank:
            time.sleep(0.01)
        first.begin(torch.full(shape, 2.0**c.rank + turn))
        total = first.finish()
        second.begin(torch.full(shape, c.rank, dtype=torch.int8))
        right = torch.full(shape, sum(2.0**rank + turn for rank in range(c.world_size)))
        expect(isinstance(total, torch.Tensor) and torch.equal(total, right), "a sum")
        right = torch.stack([torch.full(shape, rank, dtype=torch.int8) for rank in range(c.world_size)])
        stacked = second.finish()
        expect(isinstance(stacked, torch.Tensor) and torch.equal(stacked, right), "all tensors, in order")


PARTS: tuple[Callable[[Communicator], None], ...] = (
    topology, objects, all_gather, messages, messages_asked_for, shared_windows,
    shared_memory_that_is_not_there, freed_pages, mailbox, clocks, process_group,
)  # fmt: skip


def main() -> None:
    communicator = connect(sys.argv)
    try:
        for part in PARTS:
            part(communicator)
            communicator.barrier()
    except Exception as error:
        print(f"rank {communicator.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        communicator.abort(1)
    passed = communicator.gather_object((communicator.rank, communicator.node_of))
    if passed is not None:
        print(f"passed {len(passed)} of {communicator.world_size}; nodes {communicator.node_of}")
