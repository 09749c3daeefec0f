"""What is said, and what is refused, where a run goes on otherwise than it began."""

import pytest

from sambasim.errors import CheckpointError, OptionError
from sambasim.pef.parts import PartDigests
from sambasim.runtime.checkpoint.changes import changes, check_epoch, check_exact, check_pef
from sambasim.runtime.checkpoint.manifest import Manifest
from tests.runtime.checkpoint.samples import manifest

SAVED = manifest()


def with_run(**changed: object) -> Manifest:
    return SAVED.model_copy(update={"run": SAVED.run.model_copy(update=changed)})


def with_options(table: str, **changed: object) -> Manifest:
    options = dict(SAVED.options)
    before = options[table]
    assert isinstance(before, dict)
    return SAVED.model_copy(update={"options": {**options, table: {**before, **changed}}})


def test_nothing_is_said_of_a_run_that_goes_on_as_it_was() -> None:
    assert changes(SAVED, SAVED) == []


def test_another_number_of_replicas_is_told_and_not_refused() -> None:
    now = with_run(world_size=4)
    found = changes(SAVED, now)
    assert [str(change) for change in found] == ["replicas = 4 (checkpoint: 2)"]
    check_epoch(SAVED, now, found, "here")


@pytest.mark.parametrize(
    "now", [with_run(world_size=4), with_run(threads=2), with_run(torch="3.0"), with_options("optimizer", lr=0.2)]
)
def test_exactness_refuses_what_would_change_bits(now: Manifest) -> None:
    with pytest.raises(OptionError, match="the run would not go on with the bits it would have had"):
        check_exact(changes(SAVED, now), "here")


@pytest.mark.parametrize("now", [with_options("training", epochs=9), with_options("training", epochs=None, steps=70)])
def test_a_longer_run_is_the_same_run(now: Manifest) -> None:
    found = changes(SAVED, now)
    assert found
    check_exact(found, "here")


def test_a_longer_run_is_another_one_where_the_schedule_goes_by_its_length() -> None:
    schedule = {"name": "cosine", "total_steps": None}
    saved = with_options("training", schedule=schedule)
    options = {**saved.options, "training": {"seed": 0, "epochs": 9, "steps": None, "schedule": schedule}}
    with pytest.raises(OptionError, match=r"training\.epochs = 9 \(checkpoint: 3\)"):
        check_exact(changes(saved, saved.model_copy(update={"options": options})), "here")


@pytest.mark.parametrize(
    "now",
    [with_run(samples=385), with_options("training", seed=1), with_options("data", shuffle=False)],
)
def test_the_order_of_samples_must_not_change_within_an_epoch(now: Manifest) -> None:
    found = changes(SAVED, now)
    with pytest.raises(OptionError, match="lies in the midst of epoch 2"):
        check_epoch(SAVED, now, found, "here")
    between = SAVED.model_copy(update={"position": SAVED.position.model_copy(update={"used": 0})})
    check_epoch(between, now, found, "here")


def test_data_of_the_same_name_has_moved_and_of_another_is_other_data() -> None:
    """Its content is not known: that of the same name is gone on with, and no bits are promised."""
    saved = with_options("data", source="/scratch/job-7/train.npz")
    moved, other = (with_options("data", source=f"/scratch/job-8/{name}.npz") for name in ("train", "test"))
    found = changes(saved, moved)
    told = 'data.source = "/scratch/job-8/train.npz" (checkpoint: "/scratch/job-7/train.npz")'
    assert [str(one) for one in found] == [told]
    check_epoch(saved, moved, found, "here")
    with pytest.raises(OptionError, match=r"data\.source"):
        check_exact(found, "here")
    found = changes(saved, other)
    with pytest.raises(OptionError, match=r"data\.source"):
        check_epoch(saved, other, found, "here")
    with pytest.raises(OptionError, match=r"data\.source"):
        check_exact(found, "here")


def test_another_pef_is_refused_with_what_differs() -> None:
    def refused(*parts: str, **changed: object) -> str:
        others = SAVED.pef.parts.model_copy(update=dict.fromkeys(parts, "d" * 64))
        pef = SAVED.pef.model_copy(update={"digest": "b" * 64, "parts": others})
        with pytest.raises(CheckpointError) as error:
            check_pef(SAVED, SAVED.model_copy(update={"pef": pef, **changed}), "here")
        return f"{error.value.what} -> {error.value.remedy}"

    group = SAVED.groups[0]
    smaller = group.model_copy(update={"members": group.members[:1]})
    assert "than net: what differs: its graph, its initial weights -> name" in refused("weights", "graph")
    assert "what differs: what wrote it" in refused()
    assert not any("what wrote it" in refused(part) for part in PartDigests.model_fields)
    assert "what differs: its defaults of training -> " in (told := refused("training_defaults"))
    assert ", or compile it as it was, and tell run what is to be otherwise: --set NAME=VALUE; or begin" in told
    slower = with_options("optimizer", lr=0.01)
    assert "its defaults of training; optimizer.lr = 0.01 (checkpoint: 0.1) -> " in refused(
        "training_defaults", options=slower.options
    )
    assert "tell run" not in refused("training_defaults", "graph")
    assert "parameters differ: 1 of them, 'net__bias' for one" in refused(groups=(smaller,))
    assert "its optimizer keeps other state" in refused(groups=(group.model_copy(update={"states": ("momentum",)}),))
    other = SAVED.pef.model_copy(update={"digest": "b" * 64, "name": "lenet", "batch_size": 8})
    assert "that one is called 'net'; its batch is 4 and not 8" in refused(pef=other)
