"""From captures to symbols: kinds, names, constants, and tensors that a PEF cannot hold."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.build import Built
from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import assemble, capture_model
from sambasim.compiler.names import prefix_of
from sambasim.errors import InvariantError, ModelError
from sambasim.ir.graph import Output
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import Progress, verify
from sambasim.options.compile import CompileOptions
from sambasim.pef import read
from sambasim.pef.document import Compiled
from tests.support.compiled import Made, net_options

INPUTS = {"x": torch.randn(4, 3)}


def _options(folder: Path = Path("out"), **changes: object) -> CompileOptions:
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.9}, "training": {"batch_size": 4}}
    return net_options(folder, **(sgd | changes))


def built(model: nn.Module, inputs: Mapping[str, Tensor] = INPUTS, options: CompileOptions | None = None) -> Built:
    return capture_model(model, Example(inputs), options or _options())


def constants(built: Built) -> dict[str, list[float]]:
    symbols = built.program.symbols.values()
    return {s.name: built.weights[s.name].tolist() for s in symbols if s.kind is SymbolKind.CONSTANT}


def _assembled(model: nn.Module, folder: Path, inputs: Mapping[str, Tensor] = INPUTS, **changes: object) -> Compiled:
    options = _options(folder, **changes)
    return assemble(built(model, inputs, options), model, options)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss_of(self.lin(x))

    def loss_of(self, y: Tensor) -> Tensor:
        return y.square().mean()


class Counting(Net):
    """Changes a buffer that is not saved and a plain attribute; leaves a mask as it is."""

    hidden: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.plain = torch.zeros(())

    def loss_of(self, y: Tensor) -> Tensor:
        if self.training:
            self.hidden.add_(1)
            self.plain.add_(1)
        return (y * self.mask).square().mean() + self.hidden.sum() + self.plain


def test_what_training_changes_is_a_buffer_and_outputs_are_kept_where_they_may_be() -> None:
    model = Counting()
    program = built(model).program
    assert "plain" in vars(model), "the model is as it was"
    kept = {output.symbol for output in program.step.outputs}
    for name in ("counting__hidden", "counting__plain"):
        assert (program.symbols[name].kind, program.symbols[name].torch_names) == (SymbolKind.BUFFER, ())
        assert name in kept
        assert name in program.evaluation.inputs
    assert program.symbols["counting__mask"].kind is SymbolKind.CONSTANT
    for name in ("x", "counting__lin__weight", "counting__mask"):
        evaluation = replace(program.evaluation, outputs=(Output(program.evaluation.outputs[0].value, name),))
        with pytest.raises(InvariantError, match=rf"keeps .* in {name}, a (input|parameter|constant)") as refused:
            verify(replace(program, evaluation=evaluation), Progress.CAPTURED)
        assert refused.value.number == 15


class Lifted(Net):
    """Makes one constant in both modes, and one whose value depends on the mode and the batch."""

    def loss_of(self, y: Tensor) -> Tensor:
        other = torch.tensor([1.0, 2.0, 3.0]) if self.training else torch.tensor([float(len(y)), 2.0, 3.0])
        return (y * other + torch.tensor([7.0, 8.0, 9.0])).square().mean()


def test_equal_constants_share_a_symbol_and_different_ones_do_not() -> None:
    lifted = built(Lifted())
    values = constants(lifted)
    assert sorted(values.values()) == [[1.0, 2.0, 3.0], [4.0, 2.0, 3.0], [7.0, 8.0, 9.0]]
    assert lifted.program.single is not None
    for graph, first in ((lifted.program.evaluation, 4.0), (lifted.program.single, 1.0)):
        assert sorted(values[name] for name in graph.inputs if name in values) == [[first, 2.0, 3.0], [7.0, 8.0, 9.0]]


class Two(Net):
    """Of its two layers, only the first gets a gradient if `cut`: a Variable is cut off from what computed it."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.other, self.cut = nn.Linear(3, 3), cut

    def loss_of(self, y: Tensor) -> Tensor:
        other: Tensor = self.other(y)
        return (y + torch.autograd.Variable(other)).mean() if self.cut else other.square().mean()


def _in_one_memory(net: Any) -> None:
    net.other.weight.data = net.lin.weight.data


def _overlapping(net: Any, start: int = 7) -> None:
    flat = torch.randn(start + 9)
    net.lin.weight.data, net.other.weight.data = flat[:9].view(3, 3), flat[start:].view(3, 3)


def _with_a_view(net: Any) -> None:
    net.view = net.lin.weight.detach()


@pytest.mark.parametrize(
    ("change", "second"),
    [
        (_in_one_memory, "the parameter other.weight"), (_overlapping, "the parameter other.weight"),
        (_with_a_view, "the buffer view"),
    ],
)  # fmt: skip
def test_tensors_in_the_same_memory_are_refused_by_name(change: Callable[[Two], None], second: str) -> None:
    model = Two()
    change(model)
    with pytest.raises(ModelError) as refused:
        built(model)
    assert f"the parameter lin.weight and {second} are two tensors in the same" in refused.value.what
    assert f"model.{second.rpartition(' ')[2]} = model.lin.weight" in str(refused.value.remedy)


def test_neighbours_in_memory_are_two_and_weights_tied_as_one_are_one_symbol() -> None:
    model = Two()
    _overlapping(model, start=9)
    assert "two__other__weight" in built(model).program.symbols
    model.other.weight = model.lin.weight
    assert built(model).program.symbols["two__lin__weight"].torch_names == ("lin.weight", "other.weight")


@pytest.mark.parametrize(("name", "dtype"), [("weight", "fp32"), ("weird", "bf16")])
def test_tensors_with_gaps_in_memory_are_stored_contiguously(name: str, dtype: str, tmp_path: Path) -> None:
    """And gaps are no part of the program: a model that is contiguous when it is traced is the same one."""
    model = Net()
    strided = torch.randn(3, 4)[:, :3]
    if name == "weight":
        model.lin.weight = nn.Parameter(strided)
    else:
        model.lin.register_buffer("weird", strided)
    tensor = getattr(model.lin, name)
    address = tensor.data_ptr()
    captured = built(model, options=_options(dtype=dtype))
    stored = captured.weights[f"net__lin__{name}"]
    assert stored.is_contiguous()
    assert torch.equal(stored, tensor.to(stored.dtype))
    assert (tensor.stride(), tensor.data_ptr(), tensor.dtype) == ((4, 1), address, torch.float32), "the model's own"
    done = assemble(captured, model, _options(tmp_path, dtype=dtype, arch="sn20"))
    notice, of_arch = done.notices
    assert f"stored contiguously in the PEF: lin.{name};" in notice
    assert "sn20 is priced as sn30" in of_arch
    assert read(done.path).metadata["stored_contiguously"] == f"lin.{name}"
    if name == "weight":
        assert captured.program == built(Net()).program


class Colliding(nn.Module):
    """Names that come out the same, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.parts = nn.ModuleDict({"a-b": nn.Linear(3, 3), "a_b": nn.Linear(3, 3)})
        self.w = nn.Parameter(torch.ones(3))
        self.lower: Any = nn.Module()
        self.lower.x = nn.Parameter(torch.ones(3))
        for name in ("loss", "loss__grad", "outputs__0", "w__grad", "w__sgd0__momentum"):
            self.register_buffer(name, torch.full((3,), 0.5))

    def forward(
        self, x: Tensor, colliding__lower__x: Tensor, accum_dummy_0_reduce_buf: Tensor
    ) -> tuple[Tensor, Tensor]:
        y = self.lin(x) * self.w + self.lower.x * colliding__lower__x + accum_dummy_0_reduce_buf
        for part in self.parts.values():
            y = part(y)
        y = y + sum(self.buffers())
        return y.square().mean(), y


def test_names_that_collide_get_numbers(tmp_path: Path) -> None:
    inputs = {name: torch.randn(4, 3) for name in ("x", "colliding__lower__x", "accum_dummy_0_reduce_buf")}
    model = Colliding()
    program = _assembled(model, tmp_path, inputs, data_parallel=True).program
    by_torch_name = {torch_name: s for s in program.symbols.values() for torch_name in s.torch_names}
    assert set(by_torch_name) == set(model.state_dict())
    assert len({symbol.name for symbol in by_torch_name.values()}) == len(model.state_dict())
    assert [s.name for s in program.symbols.values() if s.kind is SymbolKind.INPUT] == list(inputs)
    members = [member for group in program.groups for member in group.members]
    trained = {program.symbols[m.parameter].torch_names[0] for m in members}
    assert trained == {name for name, _ in model.named_parameters()}
    assert {program.symbols[m.gradient].kind for m in members} == {SymbolKind.GRADIENT}
    assert program.loss is not None
    assert program.symbols[program.loss].kind is SymbolKind.OUTPUT
    assert prefix_of(program.loss) == "colliding"
    assert program.symbols["colliding__lower__x_1"].torch_names == ("lower.x",)
    assert program.symbols["colliding__w__grad_1"].torch_names == ("w__grad",)
    assert program.optimizers[0].name == "sgd1"
    assert program.reduce_buffer == "accum_dummy_0_reduce_buf_1"


def bare(loss: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Its loss is a parameter, or hardly more."""
    w, v = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    return Made(loss, w=w, v=v, one=nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("loss", "what"),
    [(lambda net, x: net.w, "the parameter w itself"), (lambda net, x: net.one.reshape(()), "a view of a parameter")],
)
def test_a_loss_that_is_a_parameter_is_refused(loss: Callable[[Any, Tensor], Tensor], what: str) -> None:
    with pytest.raises(ModelError, match=f"the loss is {what}") as refused:
        built(bare(loss))
    assert "computed from the inputs and the parameters" in str(refused.value)


@pytest.mark.parametrize(("loss", "trained"), [(lambda net, x: net.w + x.mean(), 1), (lambda net, x: net.w + net.v, 2)])
def test_a_backward_without_operators_compiles(
    loss: Callable[[Any, Tensor], Tensor], trained: int, tmp_path: Path
) -> None:
    program = _assembled(bare(loss), tmp_path, data_parallel=True).program
    assert sum(len(group.members) for group in program.groups) == trained
    assert [section.kind.value for section in program.step.sections] == ["FWD", "REDUCE", "OPT", "GATHER"]


def test_a_variable_is_cut_off_from_what_computed_it() -> None:
    model = Two(cut=True)
    model(INPUTS["x"]).backward()
    assert model.other.weight.grad is None
    gradients = [s.name for s in built(model).program.symbols.values() if s.kind is SymbolKind.GRADIENT]
    assert gradients == ["two__lin__weight__grad", "two__lin__bias__grad"]
