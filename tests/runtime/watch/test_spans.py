"""Which calls an observer is told of: those of marked methods, from `report_spans` on, also if they fail."""

import pytest

from sambasim.records.trace import Track
from sambasim.runtime.watch.observer import SpanArgs, StepObserver, When, report_spans, span


class Wire:
    def _length(self, words: str) -> SpanArgs:
        return {"length": len(words)}

    @span(Track.COLLECTIVES, "send", _length)
    def send(self, words: str) -> str:
        if not words:
            raise ValueError("nothing to send")
        return words.upper()

    @span(Track.COPIES, "copy")
    def copy(self) -> None:
        pass

    @span(Track.COLLECTIVES, "wait", when=When.BRIEF)
    def wait(self) -> None:
        pass


class Spans(StepObserver):
    def __init__(self, *, detailed: bool) -> None:
        self.detailed = detailed
        self.begun: list[str] = []
        self.ended: list[tuple[int, str, SpanArgs]] = []

    def span_begins(self, replica: int, track: Track, name: str) -> None:
        self.begun.append(name)

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        self.ended.append((replica, name, args))


def use(wire: Wire) -> None:
    assert wire.send("abc") == "ABC"
    wire.copy()
    wire.wait()


@pytest.mark.parametrize(
    ("detailed", "ended"),
    [(True, [(7, "send", {"length": 3}), (7, "copy", {})]), (False, [(7, "send", {}), (7, "wait", {})])],
)
def test_an_observer_gets_the_spans_of_its_kind_until_another_one_comes(
    detailed: bool, ended: list[tuple[int, str, SpanArgs]]
) -> None:
    wire, before, spans = Wire(), Spans(detailed=True), Spans(detailed=detailed)
    report_spans(wire, before, 1)
    report_spans(wire, spans, 7)
    use(wire)
    assert spans.ended == ended
    assert spans.begun == [name for _, name, _ in ended]
    report_spans(wire, None, 7)
    use(wire)
    assert spans.ended == ended
    assert before.begun == []


def test_a_call_that_fails_ends_its_span() -> None:
    wire, spans = Wire(), Spans(detailed=False)
    report_spans(wire, spans, 0)
    with pytest.raises(ValueError, match="nothing to send"):
        wire.send("")
    assert spans.begun == ["send"]
    assert spans.ended == [(0, "send", {})]
