"""A replica of several chips in one process: what an app reads, sets and is refused, beside a replica of one chip."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, OptionError, PefError
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.samba import process
from sambasim.samba.session import session
from sambasim.samba.test import TestWithGold
from sambasim.samba.utils import measure_performance, measure_sections, trace_graph
from tests.samba.harness import Made, PefOf, compiled

BATCH, CHIPS = 6, 2
SPLITS = ("weight", "batch")


class Net(nn.Module):
    """A loss for each sample, and outputs of samples × words; the hidden values are cut by `weight`."""

    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        logits = self.second(hidden)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return losses.view_as(target).mean(1), logits.flatten(0, 1), hidden


class Mean(Net):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        losses, logits, hidden = super().forward(x, target)
        return losses.mean(), logits, hidden


class Column(Net):
    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        losses, logits, _ = super().forward(x, target)
        return losses.mean(), logits, self.second.weight.sum(0)


def made(kind: type[Net] = Net) -> Made:
    torch.manual_seed(0)
    model = kind()
    samba.from_torch_model_(model)
    return model, samba.optim.AdamW(model.parameters(), lr=0.01)


def inputs(number: int = 0) -> tuple[samba.SambaTensor, samba.SambaTensor]:
    generator = torch.Generator().manual_seed(number)
    x = samba.from_torch_tensor(torch.randn(BATCH, 4, 5, generator=generator), name="x", batch_dim=0)
    target = torch.randint(3, (BATCH, 4), generator=generator)
    x.requires_grad = True
    return x, samba.from_torch_tensor(target, name="target", batch_dim=0)


def made_mean() -> Made:
    return made(Mean)


def config_of(split: str | None) -> dict[str, Any]:
    return {"tensor_parallel": split or "none", "n_chips": CHIPS if split else 1}


@pytest.fixture
def pefs(pef_of: PefOf) -> Mapping[str | None, str]:
    return {split: pef_of(made, inputs(), **config_of(split)) for split in (None, *SPLITS)}


def everything(pef: str, kind: type[Net] = Net) -> Mapping[str, Tensor]:
    """What an app sees in a step of two batches, and in a whole one."""
    model, optimizer = made(kind)
    trace_graph(model, inputs(), optimizer, pef=pef)
    found: dict[str, Tensor] = {}
    for number in range(2):
        batch = inputs(number)
        outputs = session.run(batch, section_types=["FWD"])
        outputs[0].sn_grad = torch.linspace(0.1, 0.6, BATCH) if outputs[0].ndim else torch.tensor(0.3)
        session.run(section_types=["BCKWD"])
        found |= {f"{number} {one.sn_name}": samba.to_torch(one) for one in outputs}
        gradient = batch[0].sn_grad
        assert gradient is not None
        found[f"{number} x"] = gradient.clone()
    found |= {name: one.sn_data.clone() for name, one in session.tensor_dict["grads"].items()}  # type: ignore[attr-defined]
    session.run(section_types=["OPT"])
    for one in outputs:
        one.sn_grad = None
    whole = session.run(inputs(2))
    found |= {f"2 {one.sn_name}": samba.to_torch(one) for one in whole}
    machine = session.machine
    assert machine is not None
    kinds = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE)
    names = [name for name, symbol in machine.program.symbols.items() if symbol.kind in kinds]
    found |= {f"{one.sn_name} after": one.sn_data for one in session.get_tensors_by_name(names)}
    session.ctx.set_tensors({names[0]: torch.arange(40.0).view(8, 5)})
    assert session.get_tensors_by_name([names[0]])[0].sn_data.equal(torch.arange(40.0).view(8, 5))
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_an_app_sees_what_it_sees_of_one_chip(split: str, pefs: Mapping[str | None, str]) -> None:
    """Outputs, also those of which each chip has a part; gradients, of inputs too; weights and states."""
    assert next(one for one in read(Path(pefs["weight"])).program.symbols.values() if one.type.shape == (6, 4, 4)).cuts
    torch.testing.assert_close(everything(pefs[split]), everything(pefs[None]), rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_mean_over_chips(pef_of: PefOf) -> None:
    one, two = (everything(pef_of(made_mean, inputs(), **config_of(split)), Mean) for split in (None, "batch"))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_an_output_without_samples_cannot_be_joined(tmp_path: Path) -> None:
    words = r"the output column__outputs__1, float32\[8\], cannot be joined over the chips of a replica: it has neither"
    with pytest.raises(OptionError, match=words):
        compiled(made(Column), inputs(), tmp_path, "column", **config_of("batch"))


@pytest.mark.parametrize("split", SPLITS)
def test_a_pef_of_chips_predicts_too(split: str, pefs: Mapping[str | None, str]) -> None:
    """As with --inference; and its outputs are those of a gold file."""
    model, _ = made()
    expected = model.eval()(*(samba.to_torch(one) for one in inputs()))
    trace_graph(model, inputs(), pef=pefs[split])
    for found, gold in zip(session.run(inputs()), expected, strict=True):
        torch.testing.assert_close(samba.to_torch(found), gold)
    TestWithGold(Namespace(gold_file_path=None), "net", model, None, None).test()


@pytest.mark.parametrize("split", SPLITS)
def test_a_batch_that_fails_on_a_chip_leaves_nothing_behind(split: str, pefs: Mapping[str | None, str]) -> None:
    """Of `batch`, on the last chip alone; the other has begun a communication by then."""
    model, optimizer = made()
    trace_graph(model, inputs(), optimizer, pef=pefs[split])
    first = session.run(inputs(), section_types=["FWD"])
    x, target = inputs(1)
    target[-1, -1] = 3  # there are three classes
    with pytest.raises(DataError, match="Target 3 is out of bounds"):
        session.run([x, target], section_types=["FWD"])
    again = session.run(inputs(), section_types=["FWD"])
    assert all(samba.to_torch(one).equal(samba.to_torch(other)) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("split", SPLITS)
def test_steps_are_measured(split: str, pefs: Mapping[str | None, str], capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = made()
    trace_graph(model, inputs(), optimizer, pef=pefs[split])
    measure_performance(model, inputs(), BATCH, n_iterations=2, json="-")
    assert f'"batch_size": {BATCH}' in capsys.readouterr().out
    measure_sections(model, inputs(), BATCH, n_iterations=2)
    assert {"FWD", "BCKWD", "OPT"} <= set(capsys.readouterr().out.replace("+", " ").split())


@pytest.mark.parametrize("split", SPLITS)
def test_a_model_without_a_fingerprint_is_compared_as_it_was_cut(
    split: str, pefs: Mapping[str | None, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also to predict, where a search over the forward alone would cut other weights."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # the PEF is of another machine
    model, optimizer = made()
    for optim in (optimizer, None):
        trace_graph(model, inputs(), optim, pef=pefs[split])
    other, optimizer = made(Mean)
    with pytest.raises(PefError, match="another"):
        trace_graph(other, inputs(), optimizer, pef=pefs[split])


def test_a_command_line_with_other_chips_is_refused(pefs: Mapping[str | None, str]) -> None:
    process.current().arguments = Namespace(command="run", tensor_parallel="batch", n_chips=4)
    model, optimizer = made()
    words = "has --tensor-parallel batch --n-chips 4, and the PEF .* was compiled with --tensor-parallel none"
    with pytest.raises(OptionError, match=words):
        trace_graph(model, inputs(), optimizer, pef=pefs[None])


def test_chips_that_split_nothing_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = compiled(made(), inputs(), tmp_path, n_chips=2)
    assert "notice: --n-chips" in capsys.readouterr().err
    assert read(Path(path)).program.ranks_of_replica == 1
