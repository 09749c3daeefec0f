"""When what happens in a predicted step: spans on the tracks of one replica. All replicas do the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Track(StrEnum):
    """Who is busy."""

    HOST = "host"
    SECTIONS = "sections"
    LINKS = "links"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasts, in seconds since the step began. `kind` is that of a section, or `HOST`; `section` is its
    number among the sections of the step, None for others."""

    track: Track
    kind: str
    name: str
    start_s: float
    stop_s: float
    section: int | None = None

    @property
    def predicted_s(self) -> float:
        """How long it lasts."""
        return self.stop_s - self.start_s


def busy_s(spans: Sequence[Span], track: Track) -> float:
    """Seconds in which `track` is busy; its spans do not overlap."""
    return sum(span.predicted_s for span in spans if span.track is track)
