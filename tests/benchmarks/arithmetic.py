"""Forward and backward of one replica, gradients in their groups, against the same module in eager PyTorch.

Both run in this process, in turn, at one thread. Eager's old gradients are dropped before each pass, as
`zero_grad(set_to_none=True)` does.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.char_gpt import ALPHABET, CharGPT
from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import LossOptions, ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.engine.allocation import keep_freed_memory
from sambasim.runtime.engine.inductor import Inductor
from sambasim.runtime.executor import Executable, tangent_of
from sambasim.runtime.replica import place_inputs, place_weights
from tests.benchmarks.measure import Action, Figure, compare

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 6, 6, 384, 128, 2
FEATURES, CLASSES = 784, 10
MANY = 2000

Inputs = Mapping[str, Tensor]


def _compile(model: nn.Module, inputs: Inputs, loss: str | None, folder: Path) -> Path:
    options = CompileOptions(
        model=ModelOptions(target="net:Net"),
        loss=LossOptions(name=loss) if loss else None,
        optimizer=OptimizerOptions(name="adamw"),
        training=TrainingOptions(batch_size=next(iter(inputs.values())).shape[0]),
        pef_name="net",
        output_folder=folder,
        data_parallel=True,
    )
    return compile_model(model, inputs, options, by_keyword=False).path


def _pass(path: Path, inputs: Inputs, engine: Inductor | None = None) -> Callable[[], object]:
    """Forward and backward of what is in the PEF."""
    program = read(path).program
    if program.training is None:
        raise ValueError("a PEF without a training step")
    memory = DeviceMemory(program, private_storage(program.device_bytes))
    place_weights(program, memory, map_weights(path))
    place_inputs(memory, inputs)
    executable = Executable(program.training, program, memory.tensor, engine)
    tangent = tangent_of(program, 1.0)
    return lambda: executable.run(tangent)


def _eager(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], object]:
    def differentiate() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_of())

    return differentiate


def _repeated(action: Callable[[], object], times: int) -> Action:
    """The processor's seconds for `times` calls: what other processes do counts less."""

    def timed() -> float:
        began_s = time.process_time()
        for _ in range(times):
            action()
        return time.process_time() - began_s

    return timed


def figures() -> Iterator[Figure]:
    """A GPT of 10.7 million parameters by both engines, and a logistic regression at batch 1, many times over."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        yield from _gpt(Path(folder) / "gpt")
        yield _logistic_regression(Path(folder) / "logistic_regression")


def _gpt(folder: Path) -> Iterator[Figure]:
    model = CharGPT(LAYERS, HEADS, WIDTH, LENGTH)
    windows = torch.randint(0, len(ALPHABET), (BATCH, LENGTH + 1))
    inputs = {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
    path = _compile(model, inputs, None, folder)
    peer = ("eager PyTorch", _repeated(_eager(model, lambda: model(*inputs.values())[0]), 1))
    plain = ("plain engine", _repeated(_pass(path, inputs), 1))
    yield compare("forward and backward of a GPT", plain, peer, "ratio at most 1.01", runs=25)
    compiled = ("inductor", _repeated(_pass(path, inputs, Inductor()), 1))
    yield compare("forward and backward of a GPT", compiled, peer, "ratio at most 0.92", runs=25)


def _logistic_regression(folder: Path) -> Figure:
    model = nn.Linear(FEATURES, CLASSES)
    inputs = {"input": torch.randn(1, FEATURES), "target": torch.tensor([3])}
    path = _compile(model, inputs, "cross_entropy", folder)
    x, target = inputs.values()
    peer = _eager(model, lambda: functional.cross_entropy(model(x), target))
    return compare(
        f"{MANY} times forward and backward of a logistic regression at batch 1",
        ("plain engine", _repeated(_pass(path, inputs), MANY)),
        ("eager PyTorch", _repeated(peer, MANY)),
        "ratio below 0.3",
        runs=7,
    )
