"""A replica of several chips in one process: what an app reads, sets and is refused, beside a replica of one chip."""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

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

BATCH = 6

Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """A loss for each sample, and outputs of samples × words; the hidden values are cut by `weight`."""

    output_tensors: Any

    def __init__(self, then: Callable[..., Outputs] = lambda net, *outputs: outputs) -> None:
        super().__init__()
        self.first, self.second, self.then = nn.Linear(5, 8), nn.Linear(8, 3), then

    def forward(self, x: Tensor, target: Tensor) -> Outputs:
        hidden = torch.relu(self.first(x))
        logits = self.second(hidden)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return self.then(self, losses.view_as(target).mean(1), logits.flatten(0, 1), hidden)


def mean_loss(net: Net, losses: Tensor, logits: Tensor, hidden: Tensor) -> Outputs:
    return losses.mean(), logits, hidden


def column(net: Net, losses: Tensor, logits: Tensor, hidden: Tensor) -> Outputs:
    return losses.mean(), logits, net.second.weight.sum(0)


def made(*then: Callable[..., Outputs]) -> Made:
    torch.manual_seed(0)
    model = samba.from_torch_model_(Net(*then))
    return model, samba.optim.AdamW(model.parameters(), lr=0.01)


made_mean = functools.partial(made, mean_loss)


def inputs(number: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(number)
    x = samba.from_torch_tensor(torch.randn(BATCH, 4, 5, generator=generator), name="x", batch_dim=0)
    x.requires_grad = True
    target = torch.randint(3, (BATCH, 4), generator=generator)
    return x, samba.from_torch_tensor(target, name="target", batch_dim=0)


@pytest.fixture
def pef_for(pef_of: PefOf) -> Callable[..., str]:
    """The PEF for two chips that share `split`, or for one chip."""
    return lambda split, make=made: pef_of(make, inputs(), tensor_parallel=split, n_chips=1 if split == "none" else 2)


@functools.cache
def everything(make: Callable[[], Made], pef: str) -> Mapping[str, Tensor]:
    """What an app sees in a step of two batches, and in a whole one."""
    model, optimizer = make()
    trace_graph(model, inputs(), optimizer, pef=pef)
    found: dict[str, Tensor] = {}
    for number in range(2):
        batch = inputs(number)
        outputs = session.run(batch, section_types=["FWD"])
        outputs[0].sn_grad = torch.linspace(0.1, 0.6, BATCH) if outputs[0].ndim else torch.tensor(0.3)
        session.run(section_types=["BCKWD"])
        gradient = batch[0].sn_grad
        assert gradient is not None
        found |= {f"{number} {one.sn_name}": samba.to_torch(one) for one in outputs} | {f"{number} x": gradient.clone()}
    found |= {name: one.sn_data.clone() for name, one in session.tensor_dict["grads"].items()}  # type: ignore[attr-defined]
    session.run(section_types=["OPT"])
    outputs[0].sn_grad = None
    found |= {f"2 {one.sn_name}": samba.to_torch(one) for one in session.run(inputs(2))}
    machine = session.machine
    assert machine is not None
    names = machine.program.names_of(SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE)
    found |= {f"{one.sn_name} after": one.sn_data for one in session.get_tensors_by_name(names)}
    session.ctx.set_tensors({names[0]: torch.arange(40.0).view(8, 5)})
    assert session.get_tensors_by_name([names[0]])[0].sn_data.equal(torch.arange(40.0).view(8, 5))
    return found


@pytest.mark.parametrize(("split", "make"), [("weight", made), ("batch", made), ("batch", made_mean)])
def test_an_app_sees_what_it_sees_of_one_chip(split: str, make: Any, pef_for: Callable[..., str]) -> None:
    """Outputs, also those of which each chip has a part; gradients, of inputs too; weights and states."""
    pef = pef_for(split, make)
    if split == "weight":
        assert next(one for one in read(Path(pef)).program.symbols.values() if one.type.shape == (6, 4, 4)).cuts
    one_chip = everything(make, pef_for("none", make))
    torch.testing.assert_close(everything(make, pef), one_chip, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", ["weight", "batch"])
def test_an_app_fails_measures_and_predicts(
    split: str, pef_for: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = made()
    expected = model.eval()(*map(samba.to_torch, inputs()))
    trace_graph(model, inputs(), optimizer, pef=pef_for(split))
    first: Any = session.run(inputs(), section_types=["FWD"])
    x, target = inputs(1)
    target[-1, -1] = 3  # there are three classes
    # Of `batch`, on the last chip alone; the other has begun a communication by then.
    with pytest.raises(DataError, match="Target 3 is out of bounds"):
        session.run([x, target], section_types=["FWD"])
    again: Any = session.run(inputs(), section_types=["FWD"])
    assert all(map(torch.equal, map(samba.to_torch, first), map(samba.to_torch, again))), "nothing is left behind"
    trace_graph(model, inputs(), pef=pef_for(split))
    for found, gold in zip(session.run(inputs()), expected, strict=True):
        torch.testing.assert_close(samba.to_torch(found), gold)
    TestWithGold(Namespace(gold_file_path=None), "net", model, None, None).test()
    trace_graph(model, inputs(), optimizer, pef=pef_for(split))
    capsys.readouterr()
    measure_performance(model, inputs(), BATCH, n_iterations=2, json="-")
    assert f'"batch_size": {BATCH}' in capsys.readouterr().out
    measure_sections(model, inputs(), BATCH, n_iterations=2)
    assert {"FWD", "BCKWD", "OPT"} <= set(capsys.readouterr().out.replace("+", " ").split())


@pytest.mark.parametrize("split", ["weight", "batch"])
def test_a_model_without_a_fingerprint_is_compared_as_it_was_cut(
    split: str, pef_for: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also to predict, where a search over the forward alone would cut other weights."""
    pef = pef_for(split)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # the PEF is of another machine
    model, optimizer = made()
    for optim in (optimizer, None):
        trace_graph(model, inputs(), optim, pef=pef)
    other, optimizer = made_mean()
    with pytest.raises(PefError, match="another"):
        trace_graph(other, inputs(), optimizer, pef=pef)


def test_a_command_line_with_other_chips_is_refused(pef_for: Callable[..., str]) -> None:
    process.current().arguments = Namespace(command="run", tensor_parallel="batch", n_chips=4)
    model, optimizer = made()
    words = "has --tensor-parallel batch --n-chips 4, and the PEF .* was compiled with --tensor-parallel none"
    with pytest.raises(OptionError, match=words):
        trace_graph(model, inputs(), optimizer, pef=pef_for("none"))


def test_what_cannot_be_split_is_told_by_the_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = r"the output net__outputs__1, float32\[8\], cannot be joined over the chips of a replica: it has neither"
    with pytest.raises(OptionError, match=words):
        compiled(made(column), inputs(), tmp_path, tensor_parallel="batch", n_chips=2)
    path = compiled(made(), inputs(), tmp_path, n_chips=2)
    assert "notice: --n-chips" in capsys.readouterr().err
    assert read(Path(path)).program.ranks_of_replica == 1
