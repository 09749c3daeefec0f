"""The proof: a PEF beside its model, for each form of loss, each layout and each type; wrong PEFs."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sambasim as ss
from sambasim.commands.compile import compile_live, compile_proved
from sambasim.commands.proof.eager import LiveModel
from sambasim.commands.proof.prove import MOST_STEPS, prove
from sambasim.compiler.capture.step import Example
from sambasim.errors import CaptureError, ModelError, OptionError
from sambasim.pef import map_weights, read, write
from tests.cli.typed import invoked, printed, record, refused
from tests.commands.proving import CLASSES, FEATURES, Net, Quarter, checked, halved, inputs, options, proved
from tests.support.compiled import Made

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "clipped": {"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1, "max_grad_norm": 0.01}},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "recomputed": {"recompute": "full"},
    "two replicas": {"data_parallel": True, "world_size": 2},
    "ZeRO 3": {"data_parallel": True, "world_size": 2, "zero": 3},
    "pipeline": {"pipeline_stages": 2, "micro_batches": 4},
    "zero bubble": {"pipeline_stages": 2, "micro_batches": 4, "schedule": "zb-h1"},
    "ZeRO 2 of a pipeline": {"data_parallel": True, "pipeline_stages": 2, "micro_batches": 2, "zero": 2},
    "batch on chips": {"tensor_parallel": "batch", "n_chips": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_equal_bit_for_bit(layout: str, tmp_path: Path) -> None:
    phases: list[str] = []
    done = proved(tmp_path, on_phase=phases.append, **LAYOUTS[layout])
    assert phases[-1] == "compare with eager PyTorch"
    assert done.checked is not None
    assert (done.checked.steps, done.checked.rounded, done.checked.exceptions) == (MOST_STEPS, 0, ())
    assert done.checked.compared > MOST_STEPS * 8
    assert read(done.path).first.checked == done.checked


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proved(tmp_path_factory.mktemp("proved")).path


def test_weights_that_are_cut_differ_by_rounding_which_is_told(tmp_path: Path) -> None:
    done = proved(tmp_path, tensor_parallel="weight", n_chips=2)
    assert done.checked is not None
    assert 0 < done.checked.rounded <= 12
    assert 0 < done.checked.exceptions[0].difference < 1e-5
    assert str(done.checked).startswith("8 steps equal to eager PyTorch but for rounding in ")
    told = [one for one in done.notices if one.startswith("differs from eager PyTorch by rounding: ")]
    assert len(told) == len({one.source for one in done.checked.exceptions})
    assert all(any(str(one) in notice for notice in told) for one in done.checked.exceptions)


class Summing(nn.Module):
    """The gradients of the norm are sums over samples; `scale` is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.scale = torch.full((FEATURES,), 1 / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x) * self.scale)


def test_sums_of_many_samples_in_16_bits_are_added_up_as_in_the_pef(tmp_path: Path) -> None:
    x = torch.randn(4096, FEATURES, generator=torch.Generator().manual_seed(1))
    given = {"x": x, "target": torch.arange(4096) % CLASSES}
    assert checked(tmp_path, Summing(), given=given, dtype="bf16", training={"batch_size": 4096}).rounded == 0


CONSTANTS = [torch.linspace(0, 1 / 3, 16)]


def mixed(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """It makes numbers of the default type, has a constant in float32, a block with settings of its own, and a loss."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        h = net.first(x) * torch.rand(16) / torch.arange(1, 17) + CONSTANTS[0].bfloat16()
    logits = net.last(h) * CONSTANTS[0][:1]
    return functional.cross_entropy(logits, target) + functional.mse_loss(h, torch.zeros_like(h))


def test_what_a_model_does_in_16_bits_is_what_its_pef_does(tmp_path: Path) -> None:
    model = Made(mixed, first=nn.Linear(FEATURES, 16), last=nn.Linear(16, CLASSES))
    assert checked(tmp_path, model, given=inputs(), dtype="bf16", loss=None).rounded == 0


def test_an_evaluation_graph_alone_is_equal(tmp_path: Path) -> None:
    pef = ss.compile(Net(), inputs()["x"], inference=True, output_folder=tmp_path, quiet=True, check=2)
    assert pef.checked is not None
    assert (pef.checked.steps, pef.checked.compared) == (2, 2)


def test_a_loss_that_is_no_mean_over_micro_batches_is_told(tmp_path: Path) -> None:
    without_draws = Net()
    without_draws.drop.p = 0.0
    done = proved(tmp_path, without_draws, pipeline_stages=2, micro_batches=4)
    (notice,) = done.notices
    assert notice.startswith("the loss of the example batch is ")
    assert "the mean over its 4 parts" in notice


def test_a_wrong_constant_is_found_with_its_line(pef: Path, tmp_path: Path) -> None:
    document, wrong = read(pef), tmp_path / "wrong.pef"
    program, training = document.program, document.program.step
    scales = [one for one in training.nodes if one.operator == "aten.mul.Tensor" and one.args[1] == 0.5]
    nodes = [replace(one, args=(one.args[0], 0.25)) if one in scales else one for one in training.nodes]
    changed = replace(program, training=replace(training, nodes=tuple(nodes)))
    write(wrong, document.only(program=changed), map_weights(pef))
    with pytest.raises(CaptureError) as caught:
        prove(wrong, LiveModel(Net(), Example(inputs())), options(tmp_path))
    assert "in step 1 " in caught.value.what
    assert "aten.mul.Tensor gives a result that eager PyTorch has nowhere" in caught.value.what
    assert (caught.value.where or "").startswith(f"{Path(__file__).with_name('proving.py')}:")
    assert (caught.value.where or "").endswith("h = h * self.scale")
    assert caught.value.remedy == "please report it, with the model"


def test_a_difference_of_a_later_step_has_another_remedy(pef: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = iter(range(1000)), Net.forward  # as if each call asked the clock
    monkeypatch.setattr(Net, "forward", lambda net, x: forward(net, x) * (1.0 if next(calls) < 1 else 2.0))
    with pytest.raises(CaptureError, match="in step 2 ") as caught:
        prove(pef, LiveModel(Net(), Example(inputs())), options(pef.parent))
    assert "keep what changes from call to call in a buffer" in (caught.value.remedy or "")


def test_a_part_under_torch_compile_is_compared(tmp_path: Path) -> None:
    part: Any = torch.compile(nn.Linear(8, CLASSES), backend="eager")
    assert checked(tmp_path, nn.Sequential(nn.Linear(FEATURES, 8), part)).steps == MOST_STEPS


def test_after_a_difference_there_is_no_pef_or_the_one_of_before(pef: Path, tmp_path: Path) -> None:
    subject, chosen = LiveModel(Net(), Example(inputs())), options(tmp_path)
    other, folder = replace(subject, model=Quarter()), chosen.pef_path.parent
    for before in ([], [pef]):
        folder.mkdir(exist_ok=True)
        for path in before:
            shutil.copy(path, folder)
        with pytest.raises(CaptureError, match="the graph does not compute what the model does"):
            compile_proved(subject, chosen, work=lambda phase, path: compile_live(other, chosen, phase, path))
        assert [path.read_bytes() for path in folder.iterdir()] == [path.read_bytes() for path in before]


def test_a_step_of_an_optimizer_in_bfloat16_is_told_with_its_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = (inputs()["x"].bfloat16(), inputs()["target"])
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)
    given: dict[str, Any] = {"optimizer": optimizer, "output_folder": tmp_path, "quiet": True}
    pef = ss.compile(model, example, loss="cross_entropy", name="narrow", **given)
    assert pef.checked is not None
    assert {one.name for one in pef.checked.exceptions} == {
        f"the parameter 0.{name} after a step of the optimizer" for name in ("weight", "bias")
    }
    assert pef.checked.exceptions[0].difference < 2**-7


def test_the_evaluation_with_a_loss_of_ones_own_is_compared_too(tmp_path: Path) -> None:
    done = proved(tmp_path, loss={"name": "tests.commands.proving:halved"})
    assert (done.checked is not None, done.notices) == (True, ())


NET = f"{Path(__file__).with_name('proving.py')}:Net"


def test_verify_compares_with_a_model_later(pef: Path) -> None:
    output, said = printed("verify", str(pef), "--against", NET, "--check", "3"), "equal to eager PyTorch, bit for bit"
    assert f"against {NET}: 3 steps {said}" in output
    assert "checked         8 steps equal" in output
    assert f"checked          8 steps {said} (1 thread, torch 2.13.0)" in printed("inspect", str(pef))
    assert record("inspect", str(pef))["checked"]["steps"] == 8
    error = refused("verify", str(pef), "--against", NET.replace("Net", "Quarter"), kind=CaptureError)
    assert (error.where or "").endswith("h = h * self.scale")
    assert "name the model that was compiled" in (error.remedy or "")


def test_verify_refuses_what_it_cannot_compare(pef: Path, tmp_path: Path) -> None:
    wrong = refused("verify", str(pef), "--against", NET.replace("Net", "Plain"), kind=ModelError)
    assert "the model has no parameter first.weight of float32[16, 6]" in wrong.what
    refused("verify", str(pef), "--check", "3", kind=OptionError)
    for malformed in ("net.toml", "Net"):
        error = refused("verify", str(pef), "--against", malformed, kind=OptionError)
        assert error.where == f"--against {malformed}"
    example = tuple(inputs().values())
    live = ss.compile(Net(), example, loss=halved, name="live", quiet=True, check=0, output_folder=tmp_path)
    refused("verify", str(live.path), "--against", NET, kind=OptionError)


def test_a_model_is_compared_with_the_arguments_of_its_compile_wherever_its_file_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Path(NET.partition(":")[0])
    done = proved(tmp_path, Net(0.25), model={"target": f"{written}:Net", "args": {"scale": 0.25}}, check=0)
    monkeypatch.chdir(written.parent)
    verify = ["verify", str(done.path), "--check", "2", "--against"]
    assert "steps equal to eager PyTorch, bit for bit" in printed(*verify, f"{written.name}:Net")
    slip = refused(*verify, f"{written.name}:Nett", kind=ModelError)
    assert slip.remedy == "did you mean Net?"
    monkeypatch.chdir(tmp_path)  # another model of the same name gets no arguments
    for name, parameters in (("plain", "self"), ("needs", "self, other")):
        text = f"class Net(Other):\n    def __init__({parameters}):\n        super().__init__(0.25)\n"
        Path(f"{name}.py").write_text(f"from tests.commands.proving import Net as Other\n\n{text}", encoding="utf-8")
    assert invoked(*verify, "plain.py:Net").exception is None
    error = refused(*verify, "needs.py:Net", kind=ModelError)
    assert "a function without arguments" in (error.remedy or "")
