"""How a figure is taken: candidates in turn, several times, and the median of each."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Action = Callable[[], float | None]
"""Does the work once. Returns the seconds that it measured itself, or None: then the whole call is timed."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`subject` against `peer`. `goal` is what is to hold, in words; `medians_s` has the seconds of both."""

    name: str
    subject: str
    peer: str
    goal: str
    medians_s: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """The subject's time in units of the peer's."""
        return self.medians_s[self.subject] / self.medians_s[self.peer]

    @property
    def difference_s(self) -> float:
        """By how much the subject takes longer."""
        return self.medians_s[self.subject] - self.medians_s[self.peer]


def compare(name: str, subject: tuple[str, Action], peer: tuple[str, Action], goal: str, runs: int) -> Figure:
    """`runs` rounds of the subject and the peer, in turn, after one round that does not count."""
    seconds: dict[str, list[float]] = {subject[0]: [], peer[0]: []}
    for round_number in range(runs + 1):
        for title, action in (subject, peer):
            began_s = time.perf_counter()
            measured_s = action()
            elapsed_s = time.perf_counter() - began_s if measured_s is None else measured_s
            if round_number:
                seconds[title].append(elapsed_s)
    medians_s = {title: statistics.median(values) for title, values in seconds.items()}
    return Figure(name, subject[0], peer[0], goal, medians_s)


def print_figures(figures: Sequence[Figure]) -> None:
    """A line for people and a line of JSON for each figure."""
    for figure in figures:
        subject_s, peer_s = figure.medians_s[figure.subject], figure.medians_s[figure.peer]
        print(f"{figure.name}: {figure.subject} {subject_s:.3f} s, {figure.peer} {peer_s:.3f} s: ", end="")
        print(f"ratio {figure.ratio:.3f}, difference {figure.difference_s:+.3f} s (goal: {figure.goal})")
        facts = {"name": figure.name, "ratio": figure.ratio, "difference_s": figure.difference_s, **figure.medians_s}
        print(json.dumps(facts), flush=True)
