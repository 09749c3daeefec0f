"""From captures to symbols: kinds, names, constants, and tensors that a PEF cannot hold."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.build import Built
from sambasim.compiler.capture.names import prefix_of
from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import Stopwatch, assemble, capture_model
from sambasim.errors import InvariantError, ModelError
from sambasim.ir.graph import Output
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import Progress, verify
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions

INPUTS = {"x": torch.randn(4, 3)}


def _options(folder: Path = Path("out"), **changes: object) -> CompileOptions:
    plain: dict[str, object] = {
        "model": ModelOptions(target="tests.compiler.test_build:Net"),
        "optimizer": OptimizerOptions(name="sgd", momentum=0.9),
        "training": TrainingOptions(batch_size=4),
        "output_folder": folder,
    }
    return CompileOptions.model_validate({**plain, **changes})


def built(model: nn.Module, inputs: Mapping[str, Tensor] = INPUTS, options: CompileOptions | None = None) -> Built:
    return capture_model(model, Example(inputs), options or _options(), Stopwatch(print))


def constants(built: Built) -> dict[str, list[float]]:
    symbols = built.program.symbols.values()
    return {s.name: built.weights[s.name].tolist() for s in symbols if s.kind is SymbolKind.CONSTANT}


def _assembled(model: nn.Module, folder: Path, inputs: Mapping[str, Tensor] = INPUTS, **changes: object) -> Program:
    options = _options(folder, **changes)
    return assemble(built(model, inputs, options), model, options, Stopwatch(print)).program


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


def test_what_training_changes_is_a_buffer_also_if_it_is_not_saved() -> None:
    program = built(Counting()).program
    kept = {output.symbol for output in program.step.outputs}
    for name in ("counting__hidden", "counting__plain"):
        symbol = program.symbols[name]
        assert (symbol.kind, symbol.torch_names) == (SymbolKind.BUFFER, ())
        assert name in kept
        assert name in program.evaluation.inputs
    assert program.symbols["counting__mask"].kind is SymbolKind.CONSTANT


def test_an_output_is_kept_where_outputs_may_be_kept() -> None:
    program = built(Counting()).program
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
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)

    def loss_of(self, y: Tensor) -> Tensor:
        result: Tensor = self.other(y).square().mean()
        return result


def test_parameters_in_the_same_memory_are_refused_by_name() -> None:
    model = Two()
    model.other.weight.data = model.lin.weight.data
    with pytest.raises(ModelError) as refused:
        built(model)
    assert "the parameter lin.weight and the parameter other.weight are two tensors in the same" in str(refused.value)
    assert "model.other.weight = model.lin.weight" in str(refused.value)


def test_parameters_that_overlap_are_refused_and_neighbours_are_not() -> None:
    flat = torch.randn(16)
    model = Two()
    model.lin.weight.data, model.other.weight.data = flat[:9].view(3, 3), flat[7:].view(3, 3)
    with pytest.raises(ModelError, match=r"parameter lin\.weight and the parameter other\.weight"):
        built(model)
    flat = torch.randn(18)
    model.lin.weight.data, model.other.weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
    assert "two__other__weight" in built(model).program.symbols


def test_a_plain_view_of_a_parameter_is_refused() -> None:
    model = Net()
    model.view = model.lin.weight.detach()
    with pytest.raises(ModelError, match=r"the parameter lin\.weight and the buffer view are two tensors"):
        built(model)


def test_weights_tied_as_one_are_one_symbol() -> None:
    model = Two()
    model.other.weight = model.lin.weight
    symbol = built(model).program.symbols["two__lin__weight"]
    assert symbol.torch_names == ("lin.weight", "other.weight")


def _strided(parameter: bool = True) -> Net:
    """Net with a parameter, or a buffer, that is not contiguous."""
    model = Net()
    if parameter:
        model.lin.weight = nn.Parameter(torch.randn(3, 3).t())
    else:
        model.lin.register_buffer("weird", torch.randn(3, 3).t())
    return model


@pytest.mark.parametrize("parameter", [True, False], ids=["parameter", "buffer"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_that_are_not_contiguous_are_stored_contiguously(parameter: bool, dtype: str, tmp_path: Path) -> None:
    model = _strided(parameter)
    tensor = model.lin.weight if parameter else model.lin.get_buffer("weird")
    address = tensor.data_ptr()
    built = capture_model(model, Example(INPUTS), _options(dtype=dtype), Stopwatch(print))
    stored = built.weights["net__lin__weight" if parameter else "net__lin__weird"]
    assert stored.is_contiguous()
    assert torch.equal(stored, tensor.to(stored.dtype))
    assert (tensor.stride(), tensor.data_ptr(), tensor.dtype) == ((1, 3), address, torch.float32), "the model's own"
    (notice,) = assemble(built, model, _options(tmp_path, dtype=dtype), Stopwatch(print)).notices
    assert f"stored contiguously in the PEF: lin.{'weight' if parameter else 'weird'};" in notice


def test_strides_are_no_part_of_the_program() -> None:
    """So a model that is contiguous when it is compiled, and not when it is traced, is the same one."""
    assert built(_strided()).program == built(Net()).program


class Lower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(3))


class Colliding(nn.Module):
    """Names that come out the same, each in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.parts = nn.ModuleDict({"a-b": nn.Linear(3, 3), "a_b": nn.Linear(3, 3)})
        self.w = nn.Parameter(torch.ones(3))
        self.lower = Lower()
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
    program = _assembled(model, tmp_path, inputs, data_parallel=True)
    by_torch_name = {torch_name: s for s in program.symbols.values() for torch_name in s.torch_names}
    assert set(by_torch_name) == set(model.state_dict())
    assert len({symbol.name for symbol in by_torch_name.values()}) == len(model.state_dict())
    assert [s.name for s in program.symbols.values() if s.kind is SymbolKind.INPUT] == list(inputs)
    parameters = {name for name, _ in model.named_parameters()}
    members = [member for group in program.groups for member in group.members]
    assert {program.symbols[m.parameter].torch_names[0] for m in members} == parameters
    assert {program.symbols[m.gradient].kind for m in members} == {SymbolKind.GRADIENT}
    assert program.loss is not None
    assert program.symbols[program.loss].kind is SymbolKind.OUTPUT
    assert prefix_of(program.loss) == "colliding"
    assert program.symbols["colliding__lower__x_1"].torch_names == ("lower.x",)
    assert program.symbols["colliding__w__grad_1"].torch_names == ("w__grad",)
    assert program.optimizers[0].name == "sgd1"
    assert program.reduce_buffer == "accum_dummy_0_reduce_buf_1"


class Bare(nn.Module):
    """Its loss is a parameter, or hardly more: `form` says which."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.v = nn.Parameter(torch.ones(()))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "bare":
            return self.w
        if self.form == "view":
            return self.one.reshape(())
        return self.w + x.mean() if self.form == "input" else self.w + self.v


def test_a_loss_that_is_a_parameter_is_refused() -> None:
    for form, message in (("bare", "the parameter w itself"), ("view", "a view of a parameter")):
        with pytest.raises(ModelError, match=f"the loss is {message}") as refused:
            built(Bare(form))
        assert "computed from the inputs and the parameters" in str(refused.value)


@pytest.mark.parametrize(("form", "trained"), [("input", 1), ("sum", 2)])
def test_a_backward_without_operators_compiles(form: str, trained: int, tmp_path: Path) -> None:
    program = _assembled(Bare(form), tmp_path, data_parallel=True)
    assert sum(len(group.members) for group in program.groups) == trained
    assert [section.kind.value for section in program.step.sections] == ["FWD", "REDUCE", "OPT", "GATHER"]


class CutOff(Net):
    """Of its two layers, only `lin` gets a gradient: in PyTorch, a Variable is cut off from what computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.lin(x) + torch.autograd.Variable(self.other(x))).mean()
        return loss


def test_a_variable_is_cut_off_from_what_computed_it() -> None:
    model = CutOff()
    model(INPUTS["x"]).backward()
    assert model.other.weight.grad is None
    gradients = [s.name for s in built(model).program.symbols.values() if s.kind is SymbolKind.GRADIENT]
    assert len(gradients) == 2
    assert all("lin" in name for name in gradients)
