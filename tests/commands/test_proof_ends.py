"""How a proof may end beside a verdict, on which batches it is made, and what it leaves as it was. Models whose own
train() or eval() changes weights are refused at the method, and the remedy is equal."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import inspect
import os
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sambasim as ss
from sambasim.commands.proof.eager import _REMEDY, Eager
from sambasim.commands.proof.prove import FEWEST_STEPS, MOST_STEPS, equal, made_batches, steps_of
from sambasim.errors import CaptureError
from sambasim.pef import map_weights, read, write
from tests.commands.proving import BATCH, CLASSES, FEATURES, Net, checked, inputs, proved
from tests.support.compiled import Made


def test_compiling_twice_gives_the_same_bytes_and_changes_nothing_here(tmp_path: Path) -> None:
    model, shared = Net().eval(), Net().share_memory()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    paths = [proved(tmp_path / folder, one).path for folder, one in (("a", model), ("b", model), ("c", shared))]
    assert len({path.read_bytes() for path in paths}) == 1
    write(tmp_path / "again.pef", read(paths[0]), map_weights(paths[0]))
    assert (tmp_path / "again.pef").read_bytes() == paths[0].read_bytes(), "as one that is written at once"
    for net in (model, shared):
        assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert not model.training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)


def test_check_says_in_how_many_steps_and_large_ones_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = proved(tmp_path, check=0)
    assert done.checked is read(done.path).first.checked is None
    assert steps_of(done.program) == MOST_STEPS
    monkeypatch.setattr("sambasim.commands.proof.prove._FLOPS", 1e3)
    assert steps_of(done.program) == FEWEST_STEPS
    assert checked(tmp_path, check=11).steps == 11


def test_a_model_that_is_too_large_is_compiled_here_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sambasim.commands.proof.prove.available_bytes", lambda: 1000)
    done = proved(tmp_path)
    assert done.checked is None
    assert done.notices[-1].startswith("not compared with eager PyTorch: the model has ")


@cache
def _table(count: int) -> Tensor:
    return torch.arange(count) / 10


class Cached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _table(CLASSES)


class FirstCall(Net):
    is_first = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if FirstCall.is_first:
            FirstCall.is_first, y = False, y * 2
        return y


class Named(Net):
    """As models of transformers note the kind of their loss."""

    kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kind = "single"
        print(self.kind)
        return super().forward(x)


def test_a_large_model_is_observed_only_where_it_does_more_than_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sambasim.compiler.capture.state._MOST_PARAMETERS", 0)
    for model, is_observed in ((Named(), False), (Cached(), True)):
        phases: list[str] = []
        done = proved(tmp_path, model, given=inputs(), on_phase=phases.append)
        assert done.checked is not None
        assert done.checked.rounded == 0
        assert ("observe a step" in phases) is is_observed
        assert any("output, at" in notice for notice in done.notices) is isinstance(model, Named)
    with pytest.raises(CaptureError, match=r"FirstCall.is_first, which the first call sets"):
        proved(tmp_path, FirstCall(), given=inputs())


def test_batches_that_are_made_are_others_of_the_same_kind() -> None:
    example = {**inputs(), "mask": torch.arange(BATCH) < 3}
    for number in range(20):
        for made in made_batches(example, number):
            assert not equal(made, example)
            for name, one in made.items():
                assert (one.dtype, one.shape) == (example[name].dtype, example[name].shape)
                assert float(one.double().abs().max()) <= float(example[name].double().abs().max())


class First(Net):
    """It does something before it computes."""

    def __init__(self, does: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        self.does(x.detach())
        return super().forward(x)


def _refuses_others(x: Tensor) -> None:
    if not bool((x[0] >= 100).all()):
        raise ValueError("the first sample must be large")


def test_what_pytorch_refuses_is_no_difference(tmp_path: Path) -> None:
    given = inputs()
    given["x"][0] = 100.0
    assert checked(tmp_path, First(_refuses_others), given=given, check=2).steps == 2


def test_what_pytorch_cannot_run_at_all_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Eager, "forward_and_backward", fails)
    done = proved(tmp_path)
    assert done.checked is None
    assert "not compared with eager PyTorch: PyTorch takes no batch of this kind" in done.notices


_steps = [0]


def _ends_in_the_proof(x: Tensor) -> None:
    """PyTorch crashes on the second batch that is made for the proof."""
    if any(frame.function == "ask" for frame in inspect.stack()):
        _steps[0] += 1
        if _steps[0] > 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_crash_of_eager_pytorch_is_no_shorter_proof(tmp_path: Path) -> None:
    done = proved(tmp_path, First(_ends_in_the_proof), given=inputs())
    assert done.checked is None
    assert any("the process of eager PyTorch has ended" in one for one in done.notices)


def _sets_in_the_proof(x: Tensor) -> None:
    if any(frame.function == "ask" for frame in inspect.stack()):
        torch.set_flush_denormal(True)


@pytest.mark.parametrize("does", [_sets_in_the_proof, lambda x: torch.set_flush_denormal(True)])
def test_a_model_that_changes_what_kernels_compute_is_refused(does: Callable[[Tensor], object], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"torch\.set_flush_denormal, which is of the process"):
        proved(tmp_path, First(does), given=inputs())


def test_a_batch_that_a_run_would_refuse_is_told_or_the_model_is_refused(tmp_path: Path) -> None:
    """How many targets are in a cluster is a size in the graph."""
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(FEATURES, CLASSES, cutoffs=[2])
    model = Made(lambda net, x, target: net.loss(x, target).loss, loss=adaptive)
    try:
        done = proved(tmp_path, model, given=inputs(), loss=None)
    except CaptureError:
        return
    assert any(one.startswith("on batches with other values a run may end: ") for one in done.notices)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T


class Merges(Layer):
    def train(self, mode: bool = True) -> "Merges":
        if mode is self.merged:
            self.a.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        super().train(mode)
        return self


class Swaps(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("averaged", self.a.weight.detach().clone())

    def eval(self) -> "Swaps":
        self.a.weight.data.copy_(self.get_buffer("averaged"))
        super().eval()
        return self


class Fuses(Layer):
    fused: Tensor | None = None

    def train(self, mode: bool = True) -> "Fuses":
        self.fused = None if mode else (self.a.weight + self.up @ self.down).detach()
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.fused is None else functional.linear(x, self.fused, self.a.bias)


class Chooses(Layer):
    """What the remedy makes of each; a method that changes no tensor is no obstacle."""

    def train(self, mode: bool = True) -> "Chooses":
        self.switched = mode
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        return functional.linear(x, self.a.weight + self.up @ self.down, self.a.bias)


def _compiled(model: nn.Module, folder: Path, **more: Any) -> ss.Pef:
    example = (torch.ones(4, 4), *([torch.ones(4, 3)] if "loss" not in more else []))
    given = {"loss": "mse", "optimizer": "sgd", **more}
    return ss.compile(model, example, name="net", quiet=True, output_folder=folder, **given)


@pytest.mark.parametrize(
    ("make", "says", "line"),
    [
        (lambda: nn.Sequential(Merges()), "train() of Merges changes model.0.a.weight", "def train(self"),
        (Swaps, "eval() of Swaps changes model.a.weight", "def eval(self"),
        (Fuses, "train() of Fuses changes model.fused", "def train(self"),
    ],
)
def test_a_method_that_changes_weights_is_named(
    make: Callable[[], nn.Module], says: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError) as caught:
        _compiled(make(), tmp_path)
    assert says in caught.value.what
    assert line in (caught.value.where or "")
    assert caught.value.remedy == _REMEDY


def test_the_remedy_and_methods_that_change_no_tensor_are_equal(tmp_path: Path) -> None:
    pef = _compiled(Chooses(), tmp_path)
    assert pef.checked is not None
    assert not pef.checked.rounded


def test_for_inference_the_remedy_is_to_merge_before(tmp_path: Path) -> None:
    layer = Merges()
    inference = {"loss": None, "optimizer": None, "inference": True}
    with pytest.raises(CaptureError, match=r"call model\.eval\(\) before you compile"):
        _compiled(layer, tmp_path, **inference)
    _compiled(layer.eval(), tmp_path, **inference)
