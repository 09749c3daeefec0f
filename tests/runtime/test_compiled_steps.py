"""A compiled step draws and loses what eager PyTorch does; with inductor, it is close to that of the plain engine."""

# Calling a module gives Any; torch.backends is untyped.
# mypy: no-warn-return-any, no-disallow-untyped-calls

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from sambasim.compiler.capture.step import named_losses
from sambasim.errors import MachineError
from sambasim.ir.graph import Node, Ref, Section
from sambasim.ir.program import Program
from sambasim.ir.types import TensorType
from sambasim.runtime.engine import inductor as module
from sambasim.runtime.engine.executor import Executor, outputs_in_order, tangent_of
from sambasim.runtime.engine.inductor import Inductor, decompositions, fake_values, rebuild
from sambasim.runtime.machine.kernels import INDUCTOR_CACHE_VARIABLE, find_cpp_compiler, use_inductor_cache
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.runtime.watch.observer import StepObserver
from tests.support.compiled import Made, compile_net, loaded, outputs_of
from tests.support.whole import whole

BATCH, SEED, IGNORED = 3, 11, -100


def with_unread_draws(net: Any, x: Tensor) -> Tensor:
    torch.randn_like(x)
    functional.dropout(x, 0.5, net.training)
    return net.last(functional.dropout(x + torch.randn_like(x), 0.5, net.training))


def recurrent(net: Any, x: Tensor) -> Tensor:
    """With a layer that is not compiled, two dropouts, and a draw in between that nobody reads."""
    x = functional.dropout(net.lstm(x.transpose(0, 1))[0].sum(0), 0.2, net.training)
    torch.randn_like(x)
    return net.last(functional.dropout(functional.gelu(x), 0.5, net.training))


def evaluated(program: Program, memory: DeviceMemory) -> list[Tensor]:
    torch.manual_seed(SEED)
    return outputs_in_order(program.evaluation, outputs_of(Executor(program.evaluation, program, memory.tensor)))


@pytest.mark.parametrize("level", ["o0", "o1", "o3"])
def test_what_nobody_reads_is_drawn_as_in_eager(level: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = Made(with_unread_draws, last=nn.Linear(4, 5)), torch.randn(BATCH, 4), torch.tensor([0, 4, 2])
    inputs = {"x": x, "target": target}
    program, memory = loaded(compile_net(model, inputs, tmp_path, opt_level=level), inputs)

    torch.manual_seed(SEED)
    executor = Executor(program.step, program, memory.tensor)
    ours = outputs_of(executor, tangent_of(program, 1.0))[program.loss or ""]
    ours_then = torch.get_rng_state()
    torch.manual_seed(SEED)
    assert ours.equal(functional.cross_entropy(model.train()(x), target))
    assert ours_then.equal(torch.get_rng_state())

    per_sample, outputs = evaluated(program, memory)
    torch.manual_seed(SEED)
    eager = model.eval()(x)
    assert outputs.equal(eager)
    assert per_sample.equal(functional.cross_entropy(eager, target, reduction="none"))


@pytest.mark.parametrize("args", [{}, {"ignore_index": 2}])
@pytest.mark.parametrize("name", ["cross_entropy", "nll"])
def test_the_loss_of_a_sample_is_the_sum_of_its_counted_elements(name: str, args: dict[str, Any]) -> None:
    total, by_sample = named_losses(name, args, counts=True)
    assert by_sample is not None
    torch.manual_seed(0)
    scores = torch.randn(3, 4, 3, 2).log_softmax(1)
    target = torch.tensor([[[2, 2], [2, 1], [2, 0]], [[2, 2], [2, 2], [2, 2]], [[3, 0], [1, 1], [0, 2]]])
    target[target == 2] = args.get("ignore_index", IGNORED)
    found = by_sample(scores, target)
    expected = [total(scores[i : i + 1], target[i : i + 1])[0] for i in range(3)]
    assert found.shape == (3,)
    assert float(found[1]) == 0
    torch.testing.assert_close(found, torch.stack(expected))
    assert total(scores, target)[1] == target.ne(2 if args else IGNORED).sum()


def test_probabilities_as_target_have_nothing_to_ignore() -> None:
    _, by_sample = named_losses("cross_entropy", {})
    assert by_sample is not None
    scores, target = torch.randn(2, 4, 3), torch.rand(2, 4, 3).softmax(1)
    elements = functional.cross_entropy(scores, target, reduction="none")
    assert by_sample(scores, target).equal(elements.mean(1))


class Sections(StepObserver):
    ended = 0

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        self.ended += len(sections)


@whole
def test_gradients_and_draws_are_those_of_the_plain_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR_CACHE_VARIABLE, str(tmp_path / "cache"))
    try:
        find_cpp_compiler()
    except MachineError:
        pytest.skip("inductor needs a C++ compiler, and there is none")
    torch.manual_seed(0)
    model = Made(recurrent, lstm=nn.LSTM(6, 5), last=nn.Linear(5, 3))
    inputs = {"x": torch.randn(4, 7, 6), "target": torch.tensor([0, 2, 1, 1])}
    program, memory = loaded(compile_net(model, inputs, tmp_path), inputs)
    names = [member.gradient for group in program.groups for member in group.members]
    progress: list[tuple[int, int]] = []
    plain = Executor(program.step, program, memory.tensor)
    inductor = Inductor(lambda done, parts, elapsed_s: progress.append((done, parts)))
    compiled = Executor(program.step, program, memory.tensor, inductor)
    assert [done for done, _ in progress] == list(range(progress[0][1] + 1))
    written = "".join(path.read_text() for path in (tmp_path / "cache").rglob("*.py"))
    assert "torch.ops.aten.gelu.default(" in written
    assert "torch.ops.aten.gelu_backward.default(" in written
    parts, loads = progress[0][1], counters["inductor"]["fxgraph_cache_hit"]
    Executor(program.step, program, memory.tensor, inductor)
    assert len(progress) == parts + 1, "another replica takes what is compiled"
    Executor(program.step, program, memory.tensor, Inductor())
    assert counters["inductor"]["fxgraph_cache_hit"] == loads + parts, "and another process loads it"

    def differentiate(executable: Executor, *, accumulate: bool = False) -> tuple[float, list[Tensor], Tensor, int]:
        torch.manual_seed(SEED)
        executable.observer = sections = Sections()
        outputs = outputs_of(executable, tangent_of(program, 1.0), accumulate=accumulate)
        gradients = [memory.tensor(name).clone() for name in names]
        return float(outputs[program.loss or ""]), gradients, torch.get_rng_state(), sections.ended

    loss, gradients, drawn, sections = differentiate(plain)
    first, second, added = (differentiate(compiled, accumulate=adds) for adds in (False, False, True))
    assert first[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(first[1], gradients)
    assert first[2].equal(drawn)
    assert (first[3], second[0]) == (sections, first[0])
    assert all(map(torch.equal, second[1], first[1]))
    assert all(torch.equal(both, 2 * once) for both, once in zip(added[1], first[1], strict=True))


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


def test_keys_of_the_cache_have_the_decompositions_by_name() -> None:
    assert pickle.loads(pickle.dumps(decompositions())) is decompositions()


@pytest.mark.parametrize("onednn", [True, False])
def test_a_product_with_a_bias_keeps_its_value(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    monkeypatch.setattr(module, "by_onednn", lambda x, weight: onednn)
    torch.manual_seed(0)
    symbols = {"bias": torch.randn(SIDE), "x": torch.randn(SIDE, SIDE), "weight": torch.randn(SIDE, SIDE)}
    types = {name: TensorType("float32", tuple(tensor.shape)) for name, tensor in symbols.items()}
    node = Node("linear", "aten.addmm.default", tuple(Ref(name) for name in symbols), (), ("y",))
    built = rebuild([node], list(symbols), ["y"], *fake_values([node], types))
    called = [str(call.target) for call in built.graph.nodes if call.op == "call_function"]
    apart = ["aten.t.default", "sambasim.linear.default", "aten.add.Tensor"]
    assert called == (apart if onednn else ["aten.addmm.default"])
    # Two libraries add 256 products of standard normal numbers in two orders.
    torch.testing.assert_close(built(*symbols.values())[0], torch.addmm(*symbols.values()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("swapped", "others"), [((1, 2), ()), ((1, 3), ()), ((1, 2), ("empty",))])
def test_values_have_the_strides_that_the_graph_has(swapped: tuple[int, int], others: tuple[str, ...]) -> None:
    """Inductor makes a copy of the only tensor in `cat` as it lies, of which the view that follows is impossible."""
    symbols = {"x": torch.randn(2, 3, 4, 5), "empty": torch.empty(0)}
    types = {name: TensorType("float32", tuple(tensor.shape)) for name, tensor in symbols.items()}
    joined = tuple(map(Ref, (*others, "swapped")))
    nodes = [
        Node("swap", "aten.transpose.int", (Ref("x"), *swapped), (), ("swapped",)),
        Node("join", "aten.cat.default", (joined, 1), (), ("joined",)),
        Node("view", "aten.view.default", (Ref("joined"), (2, 60)), (), ("flat",)),
    ]
    fakes, strayed = fake_values(nodes, types)
    assert strayed == {"joined"}
    built = rebuild(nodes, list(symbols), ["joined", "flat"], fakes, strayed)
    traced = make_fx(built, decomposition_table=decompositions())(*symbols.values())
    for made, name in zip(traced(*symbols.values()), ("joined", "flat"), strict=True):
        assert made.stride() == fakes[name].stride()
        assert made.flatten().equal(symbols["x"].transpose(*swapped).flatten())
