"""What a trace is made of, without a run: which steps, what stands in for methods, how much there is room for."""

import pytest

from sambasim.records.trace import Track
from sambasim.runtime.single_rank import single_rank
from sambasim.runtime.trace.clocks import Clock, compare_clocks
from sambasim.runtime.trace.recorder import Recorder
from sambasim.runtime.trace.run import traced_steps
from sambasim.runtime.trace.watched import StandIns


@pytest.mark.parametrize(
    ("asked", "steps", "traced"),
    [
        (None, 100, [2, 3, 4]),
        (None, 5, [2, 3, 4]),
        (None, 4, [1, 2, 3]),
        (None, 1, [0]),
        (1, 2, [1]),
        (1, 100, [2]),
        (7, 4, [0, 1, 2, 3]),
    ],
)
def test_the_first_steps_are_left_out_where_there_are_enough(asked: int | None, steps: int, traced: list[int]) -> None:
    assert list(traced_steps(asked, steps)) == traced


class _Owner:
    def __init__(self) -> None:
        self.kept = self.double

    def double(self, number: int) -> int:
        return 2 * number


def test_what_stands_in_goes_away_without_a_trace() -> None:
    owner, other, calls = _Owner(), _Owner(), []
    before, stand_ins = dict(vars(owner)), StandIns()

    def counting(name: str):  # type: ignore[no-untyped-def]
        def make(function):  # type: ignore[no-untyped-def]
            def call(*args: int) -> int:
                calls.append(name)
                result: int = function(*args)
                return result

            return call

        return make

    stand_ins.put(owner, "double", counting("inner"))
    stand_ins.put(owner, "double", counting("outer"))
    stand_ins.put(owner, "kept", counting("kept"))
    assert (owner.double(4), other.double(4), owner.kept(5)) == (8, 8, 10)
    assert calls == ["outer", "inner", "kept"]
    stand_ins.remove()
    assert vars(owner) == before
    assert (owner.double(4), len(calls)) == (8, 3)


def test_a_method_that_is_not_there_is_told_of() -> None:
    with pytest.raises(AttributeError, match="triple"):
        StandIns().put(_Owner(), "triple", lambda function: function)


def test_a_recorder_that_is_full_counts_what_it_leaves_out() -> None:
    recorder = Recorder(room=2)
    recorder.step = 7
    for number in range(5):
        recorder.add(number % 2, Track.HOST, "data", 10, 20, {"bytes": number})
    assert [[span.args for span in spans] for spans in recorder.spans.values()] == [
        [{"step": 7, "bytes": 0}],
        [{"step": 7, "bytes": 1}],
    ]
    assert recorder.left_out == 3


def test_one_rank_has_one_clock() -> None:
    assert compare_clocks(single_rank("here")) == (Clock(0, 0),)
