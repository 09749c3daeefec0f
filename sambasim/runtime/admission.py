"""What a run lets a PEF do that this account did not compile: compute what it states, and open no data unasked.

All ranks go by what rank 0 finds in its account, so that none of them opens what the others refuse.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sambasim.bounded import shortened
from sambasim.errors import InternalError, OptionError, PefError
from sambasim.options.run import ResolvedRun
from sambasim.options.targets import SourceKind
from sambasim.pef import PefDocument
from sambasim.pef.account import is_compiled_here
from sambasim.pef.rules import COMPILE_AGAIN
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.rehearsal import rehearse

_LEADS_OUT = {
    SourceKind.FUNCTION: "is code that a run imports and calls",
    SourceKind.FILE: "is a file that a run opens",
}
"""Kinds of data source that lead out of the PEF, and what a run does with them."""

_SHOWN = 200


def admit(document: PefDocument, resolved: ResolvedRun, communicator: Communicator) -> bool:
    """Collective. Whether the PEF was compiled on this account; one that was not is looked at more closely.

    Raises OptionError if it names a data source that nobody has confirmed, PefError for a node that is not what it
    states, and MachineError if it computes more at once than there is memory for. Nothing has been opened by then.
    """
    own = is_compiled_here(document.digest) if communicator.rank == 0 else False
    known: bool = communicator.broadcast_object(own)
    if not known:
        _check_source(document, resolved)
        rehearse(document.program)
    return known


@contextmanager
def blaming(known: bool) -> Iterator[None]:
    """Around a run: what is a mistake of ours where we compiled the PEF is the file's where we did not: PefError."""
    try:
        yield
    except InternalError as error:
        if known:
            raise
        raise _cannot_run(error.what, error.where) from error
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        # What a program of our own compiler never makes Python or torch say.
        if known:
            raise
        raise _cannot_run(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", None) from error


def _cannot_run(why: str, where: str | None) -> PefError:
    what = f"the PEF was not compiled on this account, and cannot be carried out: {shortened(why)}"
    return PefError(what, where=where, remedy=COMPILE_AGAIN)


def _check_source(document: PefDocument, resolved: ResolvedRun) -> None:
    data = resolved.options.overrides.get("data")
    typed = isinstance(data, dict) and "source" in data
    what = _LEADS_OUT.get(resolved.data.kind) if resolved.data.kind is not None else None
    if typed or what is None or resolved.options.trust_data_source:
        return
    # It is the file's: what a terminal would obey is shown as what it is.
    source = ascii(resolved.data.source)[1:-1][:_SHOWN]
    raise OptionError(
        f"the PEF {document.program.name} was not compiled on this account, and its data source {what}: {source}",
        where="data.source of the PEF",
        remedy="look at what that is, and add --trust-data-source; or name other data: --data FILE.npz",
    )
