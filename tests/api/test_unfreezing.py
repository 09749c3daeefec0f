"""A checkpoint goes on in a PEF of the same model with other trained parameters, or other groups of them: optimizer
states are taken by the names of parameters, and the rest begins anew, with a notice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sambasim as ss
from sambasim.errors import CheckpointError, OptionError
from sambasim.options.given import as_table
from sambasim.runtime.checkpoint.content import Checkpoint
from tests.api.conftest import BATCH, TRAIN, compiled, net, trained

BF16: dict[str, Any] = {"dtype": "bf16", "master_weights": True, "data_parallel": True, "world_size": 2}


def of_model(folder: Path, name: str, frozen: str = "", groups: int = 1, **options: Any) -> ss.Pef:
    model = net()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and path.startswith(frozen)))
    parts = [[one for one in model.parameters() if one.requires_grad][at::groups] for at in range(groups)]
    optimizer = torch.optim.AdamW([{"params": part, "lr": 1e-2 / (at + 1)} for at, part in enumerate(parts)], lr=1e-2)
    return compiled(folder, model, loss="cross_entropy", optimizer=optimizer, name=name, check=0, **options)


def saved(run: ss.Run) -> dict[str, Tensor]:
    return dict(Checkpoint(Path(run.summary.checkpoint or "")).tensors())


@pytest.mark.parametrize("numerics", [{}, BF16], ids=["float32", "master weights, replicas"])
def test_what_is_unfrozen_begins_anew_and_all_else_goes_on(numerics: dict[str, Any], tmp_path: Path) -> None:
    pef = of_model(tmp_path, "frozen", "0.", **numerics)
    first = trained(pef, checkpoint_dir=tmp_path / "a")
    whole = of_model(tmp_path, "whole", **numerics)
    second = trained(whole, resume=str(tmp_path / "a"), checkpoint_dir=tmp_path / "b")  # which is at its end
    before, after = saved(first), saved(second)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    new = {name: tensor for name, tensor in after.items() if name not in before}
    assert {name.rsplit("__", 1)[1] for name in new} == {"exp_avg", "exp_avg_sq", *(["master"] if numerics else [])}
    for name, tensor in new.items():
        expected = before[name.rsplit("__", 2)[0]] if name.endswith("master") else torch.zeros(())
        assert torch.equal(tensor, expected.float().expand_as(tensor))
    notices = "\n".join(second.summary.notices)
    assert "changed since the checkpoint: optimizer states = 4 parameters (checkpoint: 2 parameters)" in notices
    assert "the optimizer states of sequential__0__bias, sequential__0__weight are new, and begin at zero" in notices
    third = trained(whole, resume=str(tmp_path / "b"), steps=5, exact=True)
    assert not torch.equal(third.weights["0.weight"], first.weights["0.weight"])
    assert torch.allclose(third.weights["0.weight"], first.weights["0.weight"], atol=0.05)
    with pytest.raises(OptionError, match="optimizer states = 4 parameters"):
        trained(whole, resume=str(tmp_path / "a"), steps=5, exact=True)
    back = trained(pef, resume=str(tmp_path / "b"), steps=6)
    assert back.weights["0.weight"].equal(second.weights["0.weight"])
    assert back.weights["2.weight"].equal(trained(pef, resume=str(tmp_path / "a"), steps=6).weights["2.weight"])


def test_other_groups_keep_the_states_and_another_optimizer_is_refused(tmp_path: Path) -> None:
    one, two = of_model(tmp_path, "one"), of_model(tmp_path, "two", groups=2)
    trained(one, checkpoint_dir=tmp_path / "a", steps=2, lr=0.02)
    whole = trained(one, lr=0.02)
    compiled_groups: Any = as_table(two.document.training_defaults["optimizer"])["groups"]
    groups = [{**group, "lr": 0.02} for group in compiled_groups]
    resumed = trained(two, resume=str(tmp_path / "a"), set={"optimizer.lr": 0.02, "optimizer.groups": groups})
    assert resumed.losses == whole.losses[2:]
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())
    assert not any("are new" in notice for notice in resumed.summary.notices)
    other = compiled(tmp_path, net(), BATCH, loss="cross_entropy", optimizer="sgd", momentum=0.9, check=0)
    with pytest.raises(CheckpointError, match="of another PEF than other"):
        trained(other, TRAIN, resume=str(tmp_path / "a"))
