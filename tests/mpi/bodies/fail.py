"""Ranks that fail under a supervisor, in the way that the first argument names. Reports go to stderr."""

import sys
import time
from collections.abc import Callable

from sambasim.errors import DataError, LaunchError, PeerError, SambasimError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.watch.supervisor import Failure, Supervisor


def one_raises(c: Communicator) -> None:
    if c.rank == c.world_size - 1:
        raise DataError("the shard of this rank is empty")
    c.barrier()


def one_raises_while_others_compute(c: Communicator) -> None:
    if c.rank == 1:
        raise ZeroDivisionError("division by zero")
    time.sleep(60)


def all_raise_alike(c: Communicator) -> None:
    raise LaunchError("too few replicas", remedy="mpirun -np 8")


def some_raise(c: Communicator) -> None:
    if c.rank != 1:
        raise DataError(f"there is no file {c.rank}.npz")
    c.barrier()


def one_raises_and_the_others_blame_it(c: Communicator) -> None:
    if c.rank == 1:
        raise DataError("the shard of this rank is empty")
    raise PeerError("rank 1 does not answer")


def one_exits_well(c: Communicator) -> None:
    if c.rank == 1:
        sys.exit(0)
    c.barrier()


def all_exit(c: Communicator) -> None:
    sys.exit(3)


WAYS: tuple[Callable[[Communicator], None], ...] = (
    one_raises, one_raises_while_others_compute, all_raise_alike, some_raise, one_raises_and_the_others_blame_it,
    one_exits_well, all_exit,
)  # fmt: skip


def report(failure: Failure) -> None:
    print(f"REPORT rank={failure.rank} alike={failure.alike} {failure.error!r}", file=sys.stderr)


def exit_code(error: BaseException) -> int:
    if isinstance(error, SambasimError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 70


def main() -> None:
    communicator = connect(sys.argv)
    window = communicator.allocate_shared(1 << 20)
    window.parts[communicator.local_rank][:] = communicator.rank
    with Supervisor(communicator, report=report, exit_code=exit_code):
        {way.__name__: way for way in WAYS}[sys.argv[1]](communicator)


main()
