"""The inductor engine: close to the plain engine, repeatable, with the same random numbers, and clear errors."""

# Calling a module gives Any; torch.backends is untyped.
# mypy: no-warn-return-any, no-disallow-untyped-calls

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.errors import MachineError
from sambasim.ir.graph import Node, Ref, Section
from sambasim.ir.types import TensorType
from sambasim.runtime.engine import inductor as module
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.engine.inductor import Inductor, fake_values, rebuild
from sambasim.runtime.machine.kernels import INDUCTOR_CACHE_VARIABLE, find_cpp_compiler, use_inductor_cache
from sambasim.runtime.watch.observer import StepObserver
from tests.support.compiled import compile_net, loaded, outputs_of
from tests.support.whole import whole

SEED = 3
BATCH = 4


class Net(nn.Module):
    """Has a recurrent layer, which is not compiled, drops out twice, and draws in between what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.recurrent(x.transpose(0, 1))[0].sum(0), 0.2, self.training)
        torch.randn_like(x)
        return self.last(functional.dropout(functional.gelu(x), 0.5, self.training))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(INDUCTOR_CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@whole
def test_gradients_and_draws_are_those_of_the_plain_engine(tmp_path: Path, cache: Path) -> None:
    try:
        find_cpp_compiler()
    except MachineError:
        pytest.skip("there is no C++ compiler here")
    torch.manual_seed(0)
    model = Net()
    inputs = {"x": torch.randn(BATCH, 7, 6), "target": torch.tensor([0, 2, 1, 1])}
    program, memory = loaded(compile_net(model, inputs, tmp_path), inputs)
    assert program.training is not None
    assert program.loss is not None
    names = [member.gradient for group in program.groups for member in group.members]
    progress: list[tuple[int, int]] = []
    plain = Executor(program.training, program, memory.tensor)
    inductor = Inductor(lambda done, parts, elapsed_s: progress.append((done, parts)))
    compiled = Executor(program.training, program, memory.tensor, inductor)
    assert [done for done, _ in progress] == list(range(progress[0][1] + 1))
    written = "".join(path.read_text() for path in cache.rglob("*.py"))
    assert "torch.ops.aten.gelu.default(" in written
    assert "torch.ops.aten.gelu_backward.default(" in written

    def differentiate(executable: Executor, *, accumulate: bool = False) -> tuple[float, list[Tensor], Tensor, int]:
        torch.manual_seed(SEED)
        sections = _Sections()
        executable.observer = sections
        outputs = outputs_of(executable, tangent_of(program, 1.0), accumulate=accumulate)
        gradients = [memory.tensor(name).clone() for name in names]
        return float(outputs[program.loss or ""]), gradients, torch.get_rng_state(), sections.ended

    loss, gradients, drawn, sections = differentiate(plain)
    first = differentiate(compiled)
    assert first[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(first[1], gradients)
    assert first[2].equal(drawn)
    assert first[3] == sections
    second = differentiate(compiled)
    assert second[0] == first[0]
    assert all(map(torch.equal, second[1], first[1]))
    added = differentiate(compiled, accumulate=True)
    assert all(torch.equal(both, 2 * one) for both, one in zip(added[1], first[1], strict=True))


class _Sections(StepObserver):
    ended = 0

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        self.ended += len(sections)


def test_a_missing_compiler_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match=r"needs a C\+\+ compiler, and there is no g\+\+ in PATH") as caught:
        find_cpp_compiler()
    assert "apt install g++" in (caught.value.remedy or "")


def test_compiled_code_is_kept_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(INDUCTOR_CACHE_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_inductor_cache()
    folder = Path(os.environ[INDUCTOR_CACHE_VARIABLE])
    assert folder.parent == tmp_path / "sambasim" / "inductor"
    assert folder.is_dir()


SIDE = 256


@pytest.mark.parametrize("onednn", [True, False])
def test_a_product_with_a_bias_keeps_its_value(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    monkeypatch.setattr(module, "by_onednn", lambda x, weight: onednn)
    torch.manual_seed(0)
    symbols = {"bias": torch.randn(SIDE), "x": torch.randn(SIDE, SIDE), "weight": torch.randn(SIDE, SIDE)}
    types = {name: TensorType("float32", tuple(tensor.shape)) for name, tensor in symbols.items()}
    node = Node("linear", "aten.addmm.default", tuple(Ref(name) for name in symbols), (), ("y",))
    built = rebuild([node], list(symbols), ["y"], fake_values([node], types))
    called = [str(call.target) for call in built.graph.nodes if call.op == "call_function"]
    apart = ["aten.t.default", "sambasim.linear.default", "aten.add.Tensor"]
    assert called == (apart if onednn else ["aten.addmm.default"])
    # Two libraries add 256 products of standard normal numbers in two orders.
    torch.testing.assert_close(built(*symbols.values())[0], torch.addmm(*symbols.values()), rtol=1e-5, atol=1e-4)
