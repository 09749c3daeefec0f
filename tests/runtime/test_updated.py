"""What a step reports of several exchanges: all of their seconds, from the first one on."""

from sambasim.runtime.engine.update import Updated


def test_a_step_of_several_exchanges_has_the_seconds_of_all() -> None:
    counts = Updated((8.0, 4.0), {}, 0, None, 0.25, 0.0, 1_000, {"pp": 0.5}, True)
    losses = Updated((1.0, 2.0), {}, 3, None, 0.5, 0.0, 2_000, {}, True)
    updated = Updated((1.0, 2.0), {}, 3, 0.7, 1.0, 0.125, 3_000, {}, True)
    assert updated.after([]) is updated
    whole = updated.after([counts, losses])
    assert whole == updated._replace(exposed_s=1.75, began_ns=1_000, waited_s={"pp": 0.5})
