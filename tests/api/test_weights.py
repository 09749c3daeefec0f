"""Weights to start from, or to predict with, in each form that people have them; and what does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sambasim as ss
from sambasim.errors import OptionError, WeightsError
from tests.api.conftest import BATCH, HELD_OUT, TRAIN, compiled, net, trained


@pytest.fixture(scope="module")
def run(pef: ss.Pef, folder: Path) -> ss.Run:
    run = trained(pef, checkpoint_dir=folder / "ck", checkpoint_every="2steps", save=folder / "w.safetensors")
    state = run.load_into(net()).state_dict()
    torch.save(state, folder / "w.pt")
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"state": {0: {}}}}, folder / "w.pth")
    torch.save({f"module._orig_mod.{name}": value for name, value in state.items()}, folder / "w.bin")
    return run


FORMS: dict[str, Callable[[ss.Run, Path], Any]] = {
    "a run": lambda run, folder: run,
    "a model": lambda run, folder: run.load_into(nn.DataParallel(net())),
    "a state_dict": lambda run, folder: dict(run.weights),
    "a state_dict beside others": lambda run, folder: {"model": dict(run.weights), "step": 3},
    "a file of save=": lambda run, folder: str(folder / "w.safetensors"),
    "a state_dict of torch": lambda run, folder: folder / "w.pt",
    "of a trainer": lambda run, folder: folder / "w.pth",
    "of DDP and torch.compile": lambda run, folder: folder / "w.bin",
    "checkpoints": lambda run, folder: folder / "ck",
    "a checkpoint": lambda run, folder: folder / "ck" / "step-0000000004",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_starts_from_weights_in_any_form_and_predicts_with_them(
    form: str, pef: ss.Pef, run: ss.Run, folder: Path
) -> None:
    weights = FORMS[form](run, folder)
    begun = trained(pef, weights=weights, lr=0.0, weight_decay=0.0, steps=1)
    assert begun.summary.weights_sha256 == run.summary.weights_sha256
    predicted = ss.predict(pef, HELD_OUT, weights=weights)
    assert predicted.loss == ss.predict(pef, HELD_OUT, weights=run).loss
    told = any("module." in notice for notice in (*begun.summary.notices, *predicted.record.notices))
    assert told == (form == "of DDP and torch.compile")


def test_a_pef_gives_its_weights_and_an_earlier_checkpoint_its_own(pef: ss.Pef, run: ss.Run, folder: Path) -> None:
    ours = trained(pef, weights=pef)
    assert ours.summary.state_sha256 == run.summary.state_sha256
    early = ss.predict(pef, HELD_OUT, weights=folder / "ck" / "step-0000000002").loss
    assert early == ss.predict(pef, HELD_OUT, weights=trained(pef, steps=2)).loss


def test_what_fits_is_taken_if_not_strict_and_the_rest_keeps_the_weights_of_the_pef(pef: ss.Pef, run: ss.Run) -> None:
    other = {**run.weights, "2.weight": torch.zeros(7, 16), "head.bias": torch.zeros(7)}
    del other["2.bias"]
    why = (
        "missing 2.bias; not in the model head.bias; "
        r"2.weight is float32\[7, 16\] and not float32\[2, 16\]"
    )
    for call in (ss.predict, trained):
        with pytest.raises(WeightsError, match=f"the given weights do not fit the PEF net: {why}") as caught:
            call(pef, TRAIN, weights=other)
        assert caught.value.remedy == "use the weights of a run of this model, or take what fits: strict=False"
    taken = trained(pef, weights=other, strict=False, lr=0.0, weight_decay=0.0, steps=1)
    assert torch.equal(taken.weights["0.weight"], run.weights["0.weight"])
    assert torch.equal(taken.weights["2.weight"], pef.weights["2.weight"])
    notice = f"the given weights fit in 2 of 4 tensors: {why}; the PEF's stay there".replace("\\", "")
    assert notice in taken.summary.notices
    assert notice in ss.predict(pef, HELD_OUT, weights=other, strict=False).record.notices
    with pytest.raises(WeightsError, match=r"missing 0\.weight"):
        ss.predict(pef, HELD_OUT, weights={"other": torch.zeros(1)}, strict=False)


def test_wrong_weights_are_told(pef: ss.Pef, run: ss.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(net(), "whole.pt")
    torch.save({"a": run.weights, "b": run.weights}, "two.pt")
    Path("no.pt").write_text("weights")
    Path("empty").mkdir()
    for weights, kind, what in (
        ("whole.pt", WeightsError, "whole.pt is no file of torch.save with tensors, numbers and texts alone"),
        ("no.pt", WeightsError, "no.pt is no file of torch.save"),
        ("gone.pt", WeightsError, "gone.pt is not there"),
        ("two.pt", WeightsError, "two.pt hold several tables of tensors: a, b"),
        ("empty", OptionError, "empty is no checkpoint and holds none"),
        ("w.txt", OptionError, "must be a .safetensors, .pt, .pth, .bin or .ckpt file, or the folder of a checkpoint"),
        ({"lr": 3}, WeightsError, "the given weights hold no tables of tensors: lr"),
        (42, OptionError, "weights is of type int"),
    ):
        with pytest.raises(kind, match=what):
            ss.predict(pef, HELD_OUT, weights=weights)  # type: ignore[arg-type]  # tests a wrong type


def test_averages_are_loaded_into_a_model_too(folder: Path, run: ss.Run) -> None:
    averaged = trained(compiled(folder, net(), loss="cross_entropy", ema=0.5, name="averaged"), BATCH)
    loaded = averaged.load_into(net(), ema=True).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in averaged.ema.items())
    assert not torch.equal(loaded["0.weight"], averaged.weights["0.weight"])
    with pytest.raises(OptionError, match="net keeps no averages"):
        run.load_into(net(), ema=True)
