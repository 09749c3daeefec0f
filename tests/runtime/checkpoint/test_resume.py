"""Which checkpoint a run resumes from, and which changes since it are reported or refused."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from sambasim.errors import CheckpointError, OptionError
from sambasim.pef import write
from sambasim.pef.digests import PARTS
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.choose import AUTO, NEWEST, changes, check_epoch, check_exact, check_pef, choose
from sambasim.runtime.checkpoint.content import Manifest
from sambasim.runtime.machine.communicator import single_rank
from tests.pef.samples import sample_document, sample_weights
from tests.runtime.checkpoint.samples import SHARD, Fields, change_fields, flip_a_bit, manifest, write_sample

ALONE = single_rank("here")
SAVED = manifest()


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [write_sample(tmp_path, step) for step in (10, 20, 30)]


def chosen(resume: str, checkpoint_dir: Path | None = None) -> Path:
    return choose(resume, checkpoint_dir, ALONE)[0].path


def test_the_newest_is_taken_or_the_one_that_is_named(three: list[Path], tmp_path: Path) -> None:
    assert chosen(NEWEST, tmp_path) == chosen(AUTO, tmp_path) == chosen(str(tmp_path)) == three[2]
    assert chosen(str(three[0])) == three[0]
    best = three[2].rename(tmp_path / "best")
    assert chosen(str(best)) == best
    best.rename(tmp_path / f".{three[2].name}.deleted")
    assert chosen(NEWEST, tmp_path) == three[1]


def test_a_damaged_newest_is_refused_and_auto_renames_it(three: list[Path], tmp_path: Path) -> None:
    flip_a_bit(three[2])
    with pytest.raises(CheckpointError, match="step-0000000030 is damaged"):
        choose(NEWEST, tmp_path, ALONE)
    assert three[2].exists()
    (tmp_path / "step-0000000040").write_text("")
    checkpoint, notices = choose(AUTO, tmp_path, ALONE)
    assert checkpoint.path == three[1]
    assert notices[1].startswith("step-0000000030 is damaged: ")
    assert notices[1].endswith("; renamed to damaged-step-0000000030")
    assert list(folder.checkpoints_in(tmp_path)) == [three[1], three[0]]
    assert (tmp_path / "damaged-step-0000000030" / SHARD).exists()
    assert (tmp_path / "damaged-step-0000000040").exists()


def test_auto_never_starts_from_the_beginning_silently(three: list[Path], tmp_path: Path) -> None:
    """Not from a later version, nor if all are damaged; none is renamed where none is taken."""
    change_fields(three[2], lambda found: found.update(version="9.0", writer="sambasim 9.9"))
    with pytest.raises(CheckpointError, match=r"a checkpoint of format 9\.0"):
        choose(AUTO, tmp_path, ALONE)
    shutil.rmtree(three[2])
    for path in (*three[:2], write_sample(tmp_path, 30)):
        flip_a_bit(path)
    with pytest.raises(CheckpointError, match=r"all 3 checkpoints in .* are damaged"):
        choose(AUTO, tmp_path, ALONE)
    assert len(folder.checkpoints_in(tmp_path)) == 3
    for resume, place in product((AUTO, NEWEST), (tmp_path / "empty", tmp_path / "nowhere")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(OptionError, match="there is no checkpoint"):
            choose(resume, place, ALONE)


def changed(before: Manifest = SAVED, run: Fields | None = None, pef: Fields | None = None, **fields: Any) -> Manifest:
    """`before` with other fields, also of its run and of its PEF, and with other values of tables of options."""
    options: Fields = dict(before.options)
    for table in [name for name in fields if name in ("data", "loss", "optimizer", "training")]:
        options[table] = {**options.get(table, {}), **fields.pop(table)}
    update = {"run": before.run.model_copy(update=run), "pef": before.pef.model_copy(update=pef), "options": options}
    return before.model_copy(update=update | fields)


def test_exact_refuses_what_would_change_bits() -> None:
    runs: list[Fields] = [
        {"replicas": 4},
        {"chips": 2},
        {"threads": 2},
        {"torch": "3.0"},
        {"data": "content 1"},
        {"gradient_sync": "gloo"},
    ]
    for now in (*(changed(run=run) for run in runs), changed(optimizer={"lr": 0.2})):
        with pytest.raises(OptionError, match="would not have the bits of an uninterrupted run"):
            check_exact(changes(SAVED, now), "here")
    lengths: list[Fields] = [{"epochs": 9}, {"epochs": None, "steps": 70}]
    for now in (*(changed(training=length) for length in lengths), changed(data={"workers": 2})):
        assert changes(SAVED, now)
        check_exact(changes(SAVED, now), "here")


def test_the_order_of_samples_must_not_change_within_an_epoch() -> None:
    between = changed(position=replace(SAVED.position, used=0))
    for now in (changed(run={"samples": 385}), changed(training={"seed": 1}), changed(data={"shuffle": False})):
        with pytest.raises(OptionError, match="lies within epoch 2"):
            check_epoch(SAVED, now, changes(SAVED, now), "here")
        check_epoch(between, now, changes(SAVED, now), "here")


def test_data_in_another_folder_is_accepted_without_exactness_and_other_data_is_not() -> None:
    saved = changed(data={"source": "/scratch/job-7/train.npz"})
    moved, other = (changed(data={"source": f"/scratch/job-8/{name}.npz"}) for name in ("train", "test"))
    (change,) = changes(saved, moved)
    assert str(change) == 'data.source = "/scratch/job-8/train.npz" (checkpoint: "/scratch/job-7/train.npz")'
    check_epoch(saved, moved, [change], "here")
    with pytest.raises(OptionError, match=r"data\.source"):
        check_exact([change], "here")
    with pytest.raises(OptionError, match=r"data\.source"):
        check_epoch(saved, other, changes(saved, other), "here")


def test_another_pef_is_refused_with_what_differs() -> None:
    def refused(*parts: str, pef: Fields | None = None, **fields: Any) -> str:
        others = SAVED.pef.parts | dict.fromkeys(parts, "d" * 64)
        now = changed(pef={"digest": "b" * 64, "parts": others, **(pef or {})}, **fields)
        with pytest.raises(CheckpointError) as error:
            check_pef(SAVED, now, Path("out/net/net.pef"), "here")
        return f"{error.value.what} -> {error.value.remedy}"

    assert "than net: these differ: its graph, its initial weights -> run" in refused("weights", "graph")
    assert "these differ: the version of sambasim" in refused()
    assert 'these differ: loss.name: none → "l1"' in refused("training_defaults", loss={"name": "l1"})
    assert not any("the version of sambasim" in refused(part) for part in PARTS)
    assert 'name: "net" → "lenet"; batch size: 4 → 8' in refused(pef={"name": "lenet", "batch_size": 8})
    fewer = {name: tensor for name, tensor in SAVED.tensors.items() if name != "net__bias"}
    with pytest.raises(CheckpointError, match="does not hold the tensors of that PEF"):
        check_pef(SAVED, changed(tensors=fewer), Path("out/net/net.pef"), "here")


def compiled(folder: Path, name: str, **options: JsonValue) -> tuple[Manifest, Path]:
    """The manifest of a run of the PEF that it writes."""
    path = folder / name / f"{name}.pef"
    asked = {"pef_name": name, "data_parallel": True, **options}
    document = write(path, replace(sample_document(), compile_options=asked), sample_weights())
    return changed(pef={"name": name, "digest": document.digest, "compile_options": asked}), path


def test_the_pef_of_a_checkpoint_is_named_with_the_compile_options_that_differ(tmp_path: Path) -> None:
    saved, old = compiled(tmp_path, "old", dtype="fp32", num_tiles=4)
    now, new = compiled(tmp_path, "new", dtype="bf16")
    (tmp_path / "new" / "other.pef").write_text("no PEF")
    with pytest.raises(CheckpointError) as error:
        check_pef(saved, now, new, "here")
    assert error.value.what.endswith('PEF than new: name: "old" → "new"; dtype: "fp32" → "bf16"; num_tiles: 4 → none')
    assert f"run --pef {old}, the PEF that it was trained with" in str(error.value.remedy)
    old.unlink()
    with pytest.raises(CheckpointError, match=r'PEF than new: name: "old"'):
        check_pef(saved, now, new, "here")


def test_a_pef_of_the_same_model_for_another_mesh_goes_on_with_a_notice(tmp_path: Path) -> None:
    saved, _ = compiled(tmp_path, "old", pipeline_stages=2, opt_level="o1")
    now, new = compiled(tmp_path, "new", zero=3, opt_level="o3", tensor_plan={"layers.*.up": "colwise"})
    differing = check_pef(saved, now, new, "here")
    assert [change.name for change in differing] == ["pipeline_stages", "opt_level", "zero", "tensor_plan.layers.*.up"]
    with pytest.raises(OptionError, match="opt_level = "):
        check_exact(differing, "here")
    fewer = {name: tensor for name, tensor in now.tensors.items() if name != "net__bias"}
    reshaped = {"integers_sha256": "f" * 64}
    smaller = changed(now, pef=reshaped | {"batch_size": 2})
    assert check_pef(saved, smaller, new, "here"), "integers are those of a batch size"
    for other in (
        changed(now, tensors=fewer),
        changed(now, pef={"operators_sha256": "f" * 64}),
        changed(now, pef=reshaped),
        changed(now, training={"batch_size": 8, "accumulation_steps": 3}),
    ):
        with pytest.raises(CheckpointError, match="of another PEF than new"):
            check_pef(saved, other, new, "here")


def of_steps(before: Manifest, batch_size: int, accumulation: int, micro_batches: int) -> Manifest:
    """`before`, with steps of so many micro-steps."""
    training = {"batch_size": batch_size, "accumulation_steps": accumulation}
    return changed(before, pef={"batch_size": batch_size // micro_batches}, training=training)


def refused_by_exact(saved: Manifest, now: Manifest, pef: Path) -> bool:
    try:
        check_exact([*check_pef(saved, now, pef, "here"), *changes(saved, now)], "here")
    except OptionError:
        return True
    return False


def test_exact_allows_what_only_says_which_rank_computes_what(tmp_path: Path) -> None:
    """Stages, their schedule, recomputation and ZeRO, if micro-steps stay; not by another engine."""
    saved, _ = compiled(tmp_path, "old", pipeline_stages=2, micro_batches=4, schedule="1f1b")
    now, new = compiled(tmp_path, "new", recompute="full", zero=3, schedule="zb-h1", pipeline_stages=4)
    saved, alone = of_steps(saved, 16, 1, 4), of_steps(now, 4, 4, 1)
    assert {change.name for change in changes(saved, alone)} == {"training.batch_size", "training.accumulation_steps"}
    assert not refused_by_exact(saved, alone, new)
    assert refused_by_exact(saved, of_steps(now, 8, 2, 1), new), "the micro-steps are twice as large"
    before, after = (changed(manifest, run={"engine": "inductor"}) for manifest in (saved, alone))
    assert refused_by_exact(before, after, new)
    others: Fields = {"n_chips": 2, "opt_level": "o1", "gradient_groups": "parameter", "world_size": 2}
    for name, value in others.items():
        other, path = compiled(tmp_path, "other", zero=3, **{name: value})
        assert refused_by_exact(saved, of_steps(other, 4, 4, 1), path), name
