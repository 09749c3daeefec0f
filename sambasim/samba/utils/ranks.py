"""The rank of this process, and the number of ranks."""

from sambasim.samba.context import current


def get_rank() -> int:
    """The rank of this process; 0 before it has found the others, and where there are none."""
    communicator = current().communicator
    return 0 if communicator is None else communicator.rank


def get_world_size() -> int:
    """How many ranks the job has; 1 before this process has found the others, and where there are none."""
    communicator = current().communicator
    return 1 if communicator is None else communicator.world_size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints, and writes files that all ranks share."""
    return get_rank() == 0
