"""Ranks that fail inside the guard, in the way that the first argument names. What is told goes to stderr."""

import os
import signal
import sys
import time
from collections.abc import Callable

from sambasim.errors import DataError, LaunchError, PeerError, SambasimError
from sambasim.runtime.communicator import Communicator, connect
from sambasim.runtime.guard import Failure, ends_the_job


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


def all_raise_otherwise(c: Communicator) -> None:
    raise DataError(f"there is no file {c.rank}.npz")


def some_raise(c: Communicator) -> None:
    if c.rank != 1:
        raise DataError(f"there is no file {c.rank}.npz")
    c.barrier()


def one_raises_and_the_others_blame_it(c: Communicator) -> None:
    if c.rank == 1:
        raise DataError("the shard of this rank is empty")
    raise PeerError("rank 1 does not answer")


def one_exits(c: Communicator) -> None:
    if c.rank == 1:
        sys.exit(3)
    c.barrier()


def one_exits_well(c: Communicator) -> None:
    if c.rank == 1:
        sys.exit(0)
    c.barrier()


def all_exit(c: Communicator) -> None:
    sys.exit(3)


def all_exit_well(c: Communicator) -> None:
    sys.exit(0)


def one_is_killed(c: Communicator) -> None:
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    c.barrier()


def none_fails(c: Communicator) -> None:
    c.barrier()


WAYS: tuple[Callable[[Communicator], None], ...] = (
    one_raises, one_raises_while_others_compute, all_raise_alike, all_raise_otherwise, some_raise,
    one_raises_and_the_others_blame_it, one_exits, one_exits_well, all_exit, all_exit_well, one_is_killed, none_fails,
)  # fmt: skip


def tell(failure: Failure) -> None:
    print(f"TOLD rank={failure.rank} alike={failure.alike} {failure.error!r}", file=sys.stderr)


def exit_code(error: BaseException) -> int:
    if isinstance(error, SambasimError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 70


def main() -> None:
    communicator = connect(sys.argv)
    window = communicator.allocate_shared(1 << 20)
    window.local[:] = communicator.rank
    with ends_the_job(communicator, tell=tell, exit_code=exit_code):
        {way.__name__: way for way in WAYS}[sys.argv[1]](communicator)
    if communicator.rank == 0:
        print("the block ended")


main()
