"""`section_types`: which kinds of sections an app runs."""

from collections.abc import Collection, Sequence

from sambasim.errors import OptionError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.stepwise import STEP
from sambasim.samba.checks.keywords import nearest
from sambasim.samba.checks.place import app_line

_WITH_OPTIMIZER = frozenset({SectionKind.GRADNORM, SectionKind.REDUCE, SectionKind.GATHER})
"""Kinds that are part of an optimizer step: they run with OPT, whether they are named or not."""


def kinds_of(program: Program, section_types: Sequence[str] | None) -> Collection[SectionKind]:
    """The kinds that `section_types` name, in any case of letters; without them those of a whole training step, or the
    forward of an inference PEF. Kinds that run where OPT does are left out.

    Raises OptionError for a word that is no kind, and for kinds that this PEF cannot run so.
    """
    graph = program.training
    if section_types is None:
        return STEP if graph is not None else frozenset({SectionKind.FWD})
    if isinstance(section_types, str):
        raise OptionError(
            f"section_types is the word {section_types!r}, and must be a list of such words",
            where=app_line(),
            remedy=f'section_types=["{section_types}"]',
        )
    kinds = set()
    for word in section_types:
        try:
            kinds.add(SectionKind(str(word).upper()))
        except ValueError as error:
            raise OptionError(
                f"section_types has {word!r}, which is no type of section",
                where=app_line(),
                remedy=nearest(str(word).upper(), [kind.value for kind in SectionKind]),
            ) from error
    if graph is None and kinds != {SectionKind.FWD}:
        raise OptionError(
            f"this PEF predicts, and has no {', '.join(sorted(kinds - {SectionKind.FWD}))}",
            where=app_line(),
            remedy="run FWD alone; to train, compile and run without --inference, and give trace_graph the optimizers",
        )
    return frozenset(kinds - _WITH_OPTIMIZER)
