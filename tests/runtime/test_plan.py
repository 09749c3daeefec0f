"""How runs go through their data: from the beginning, and from wherever a checkpoint was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import DataError
from sambasim.options.training import TrainingOptions
from sambasim.runtime.run.plan import Plan, Position, plan

RUNS = st.tuples(
    st.integers(24, 200),  # samples
    st.integers(1, 4),  # replicas
    st.builds(
        TrainingOptions, batch_size=st.integers(1, 3), accumulation_steps=st.integers(1, 2), epochs=st.integers(1, 4)
    ),
)


def positions(planned: Plan) -> list[Position]:
    """Where a run is after each step, and after each epoch, to its end."""
    found, step = [], planned.start.step
    for epoch in range(planned.start.epoch, planned.epochs):
        while step < min(planned.end_of(epoch), planned.steps):
            step += 1
            found.append(planned.position(step, epoch))
        if step == planned.end_of(epoch):
            found.append(Position(step, epoch + 1))
    return found


@given(RUNS)
def test_a_run_goes_through_all_epochs(run: tuple[int, int, TrainingOptions]) -> None:
    samples, world_size, training = run
    planned = plan(samples, world_size, training)
    assert planned.epochs == training.epochs
    assert planned.steps == planned.steps_per_epoch * planned.epochs
    ends = positions(planned)
    assert ends[-1] == Position(planned.steps, planned.epochs)
    assert len(ends) == planned.steps + planned.epochs
    assert all(position.used <= samples - planned.left_out for position in ends)


@given(RUNS, st.data())
def test_from_wherever_it_goes_on_a_run_takes_the_rest_of_its_course(
    run: tuple[int, int, TrainingOptions], data: st.DataObject
) -> None:
    samples, world_size, training = run
    course = positions(plan(samples, world_size, training))
    here = data.draw(st.integers(0, len(course) - 1))
    resumed = plan(samples, world_size, training, course[here])
    # One that lies at the last step of an epoch goes on to the epoch's end, which is a position of its own.
    assert positions(resumed) == course[here + 1 :]
    assert resumed.steps == course[-1].step
    assert resumed.epochs == training.epochs


@given(RUNS, st.integers(1, 4), st.data())
def test_with_other_replicas_it_still_uses_no_sample_twice(
    run: tuple[int, int, TrainingOptions], world_size: int, data: st.DataObject
) -> None:
    samples, before, training = run
    course = positions(plan(samples, before, training))
    here = data.draw(st.sampled_from(course))
    resumed = plan(samples, world_size, training, here)
    rest = positions(resumed)
    assert all(position.used <= samples for position in rest)
    left = samples - here.used
    of_this_epoch = [position.used for position in rest if position.epoch == here.epoch]
    unused = samples - max(of_this_epoch, default=here.used)
    assert unused < resumed.samples_per_step or not left or here.epoch == training.epochs
    assert [position.step for position in rest] == sorted(position.step for position in rest)


def test_a_run_by_steps_ends_in_the_midst_of_an_epoch_and_can_be_made_longer() -> None:
    training = TrainingOptions(batch_size=2, steps=5)
    planned = plan(9, 1, training)
    assert (planned.steps_per_epoch, planned.epochs, planned.steps) == (4, 2, 5)
    end = positions(planned)[-1]
    assert end == Position(5, 1, 2)
    assert positions(plan(9, 1, training, end)) == []
    longer = plan(9, 1, training.model_copy(update={"steps": 9}), end)
    assert positions(longer)[-1] == Position(9, 2, 2)


def test_what_is_over_stays_over() -> None:
    training = TrainingOptions(batch_size=2, epochs=2)
    over = Position(8, 2)
    assert (plan(9, 1, training, over).epochs, plan(9, 1, training, over).beyond) == (2, None)
    assert positions(plan(9, 1, training, over)) == []
    shorter = training.model_copy(update={"epochs": 1})
    assert positions(plan(9, 1, shorter, over)) == []
    assert plan(9, 1, shorter, over).beyond == plan(9, 1, shorter, Position(5, 1, 2)).beyond == "--epochs 1"
    by_steps = [training.model_copy(update={"steps": steps}) for steps in (7, 8)]
    assert [plan(9, 1, one, over).beyond for one in by_steps] == ["--steps 7", None]


def test_too_few_samples_for_a_step_are_refused() -> None:
    with pytest.raises(DataError, match="one step takes 12"):
        plan(11, 2, TrainingOptions(batch_size=3, accumulation_steps=2))
