"""What two runs say otherwise, and which of it makes bits differ by right."""

from collections.abc import Iterable, Mapping, Sequence

from sambasim.records.digests import RecordedRun
from sambasim.records.metrics import SummaryRecord
from sambasim.report.compare.result import Fact

_SHORT_DIGEST = 12
_NOTHING = "-"
_NAMED_ABOVE = ("training.seed", "training.batch_size")
"""Options that are compared as facts of their own, or with the PEF."""


def facts(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Fact, ...]:
    """What differs, in the order of `a`; then what only `b` has."""
    names = dict.fromkeys((*a, *b))
    return tuple(Fact(name=name, a=_text(a, name), b=_text(b, name)) for name in names if a.get(name) != b.get(name))


def not_comparable(a: RecordedRun, b: RecordedRun) -> tuple[Fact, ...]:
    """What makes the bits of two recorded runs differ by right, the weightiest first."""
    return facts(*(_decisive(one) for one in (a, b)))


def asked_otherwise(a: RecordedRun, b: RecordedRun) -> tuple[Fact, ...]:
    """The options in which two runs differ."""
    return facts(*({k: v for k, v in one.options.items() if k not in _NAMED_ABOVE} for one in (a, b)))


def not_comparable_by_summary(a: SummaryRecord, b: SummaryRecord) -> tuple[Fact, ...]:
    """As `not_comparable`, as far as summaries say."""
    return facts(*(_of_summary(one) for one in (a, b)))


def told(found: Sequence[Fact]) -> str:
    """`threads 1 and 2, seed 0 and 3`."""
    return ", ".join(_fact(one) for one in found)


def _fact(fact: Fact) -> str:
    if _NOTHING in (fact.a, fact.b):
        return f"{fact.name} {fact.b} in B alone" if fact.a == _NOTHING else f"{fact.name} {fact.a} in A alone"
    return f"{fact.name} {fact.a} and {fact.b}"


def _decisive(run: RecordedRun) -> Mapping[str, object]:
    return {
        "threads": run.threads,
        "engine": run.engine,
        "torch": run.torch,
        "CPU": run.cpu,
        "exempt": _exempt(run.exempt_from_exactness),
        "world size": run.world_size,
        "seed": run.seed,
        "PEF": f"{run.pef} {run.pef_digest[:_SHORT_DIGEST]}",
    }


def _of_summary(summary: SummaryRecord) -> Mapping[str, object]:
    return {
        "threads": summary.threads,
        "engine": summary.engine,
        "torch": summary.torch,
        "exempt": _exempt(summary.exempt_from_exactness),
        "world size": summary.world_size,
        "seed": summary.seed,
        "PEF": summary.pef_digest[:_SHORT_DIGEST],
        "batch size": summary.batch_size,
        "accumulation steps": summary.accumulation_steps,
    }


def _exempt(reasons: Iterable[str]) -> str | None:
    """Without the engine, which is a fact of its own."""
    return "; ".join(reason for reason in reasons if not reason.startswith("--engine")) or None


def _text(values: Mapping[str, object], name: str) -> str:
    value = values.get(name)
    return _NOTHING if value is None else str(value).lower() if isinstance(value, bool) else str(value)
