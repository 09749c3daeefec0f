"""How runs go through their data: from the beginning, and from wherever a checkpoint was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import DataError
from sambasim.options.training import TrainingOptions
from sambasim.runtime.run.plan import Plan, Position, plan

TRAINING = st.builds(
    TrainingOptions, batch_size=st.integers(1, 3), accumulation_steps=st.integers(1, 2), epochs=st.integers(1, 4)
)
RUN = {"samples": st.integers(24, 200), "replicas": st.integers(1, 4), "training": TRAINING}


def positions(planned: Plan) -> list[Position]:
    """Where a run is after each step, and after each epoch, to its end."""
    course, step = [], planned.start.step
    for epoch in range(planned.start.epoch, planned.epochs):
        while step < min(planned.end_of(epoch), planned.steps):
            step += 1
            course.append(planned.position(step, epoch))
        if step == planned.end_of(epoch):
            course.append(Position(step, epoch + 1))
    return course


@given(**RUN, data=st.data())
def test_a_run_goes_through_all_epochs_also_from_wherever_it_goes_on(
    samples: int, replicas: int, training: TrainingOptions, data: st.DataObject
) -> None:
    planned = plan(samples, replicas, training)
    assert planned.epochs == training.epochs
    assert planned.steps == planned.steps_per_epoch * planned.epochs
    course = positions(planned)
    assert course[-1] == Position(planned.steps, planned.epochs)
    assert len(course) == planned.steps + planned.epochs
    assert all(position.used <= samples - planned.left_out for position in course)

    here = data.draw(st.integers(0, len(course) - 1))
    resumed = plan(samples, replicas, training, course[here])
    # One that lies at the last step of an epoch goes on to the epoch's end, which is a position of its own.
    assert positions(resumed) == course[here + 1 :]
    assert (resumed.steps, resumed.epochs) == (course[-1].step, training.epochs)


@given(**RUN, others=st.integers(1, 4), data=st.data())
def test_with_other_replicas_it_still_uses_no_sample_twice(
    samples: int, replicas: int, training: TrainingOptions, others: int, data: st.DataObject
) -> None:
    here = data.draw(st.sampled_from(positions(plan(samples, replicas, training))))
    resumed = plan(samples, others, training, here)
    rest = positions(resumed)
    assert all(position.used <= samples for position in rest)
    unused = samples - max((position.used for position in rest if position.epoch == here.epoch), default=here.used)
    assert unused < resumed.samples_per_step or samples == here.used or here.epoch == training.epochs
    assert [position.step for position in rest] == sorted(position.step for position in rest)


def test_a_run_by_steps_ends_in_the_midst_of_an_epoch_and_can_be_made_longer() -> None:
    training = TrainingOptions(batch_size=2, steps=5)
    planned = plan(9, 1, training)
    assert (planned.steps_per_epoch, planned.epochs, planned.steps) == (4, 2, 5)
    end = positions(planned)[-1]
    assert end == Position(5, 1, 2)
    assert positions(plan(9, 1, training, end)) == []
    assert positions(plan(9, 1, training.model_copy(update={"steps": 9}), end))[-1] == Position(9, 2, 2)


@pytest.mark.parametrize(
    ("changes", "beyond"),
    [({}, None), ({"epochs": 1}, "--epochs 1"), ({"steps": 7}, "--steps 7"), ({"steps": 8}, None)],
)
def test_what_is_over_stays_over(changes: dict[str, int], beyond: str | None) -> None:
    planned = plan(9, 1, TrainingOptions(batch_size=2, epochs=2).model_copy(update=changes), Position(8, 2))
    assert planned.beyond == beyond
    assert positions(planned) == []


def test_an_epoch_beyond_the_last_is_told_and_too_few_samples_for_a_step_are_refused() -> None:
    assert plan(9, 1, TrainingOptions(batch_size=2, epochs=1), Position(5, 1, 2)).beyond == "--epochs 1"
    with pytest.raises(DataError, match="one step takes 12"):
        plan(11, 2, TrainingOptions(batch_size=3, accumulation_steps=2))
