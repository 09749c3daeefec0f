"""Whether a run may execute a PEF: this account compiled it, or the user trusts it."""

import pwd
from pathlib import Path

from sambasim.errors import OptionError
from sambasim.options.run import RunOptions
from sambasim.pef import PefDocument
from sambasim.pef.account import is_compiled_here
from sambasim.runtime.ranks import Communicator


def check_trusted(path: Path, document: PefDocument, options: RunOptions, communicator: Communicator) -> None:
    """Collective. Raises OptionError for a PEF that this account did not compile, unless --trust was given.

    Rank 0 decides for all ranks, so that none of them executes what another refuses. Nothing that the PEF names has
    been opened by then.
    """
    trusted = options.trust or (communicator.rank == 0 and is_compiled_here(document.digest))
    if not communicator.broadcast_object(trusted):
        raise OptionError(
            f"this account did not compile {path.name}, which belongs to {_owner(path)}: its graph and its data source "
            "are not executed",
            where=str(path),
            remedy="compile the model yourself: sambasim compile; or, if you trust the author of the file, add --trust",
        )


def _owner(path: Path) -> str:
    uid = path.stat().st_uid
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:  # a user of another machine, on a shared file system
        return f"the user with the id {uid}"
