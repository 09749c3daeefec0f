"""Which of the job's processes this one is."""

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
    """Whether this is rank 0: the one that prints, and writes the files that there is one of."""
    return get_rank() == 0
