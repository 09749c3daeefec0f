"""PEFs of models for tests, compiled in this process and without a comparison; and a PEF in device memory."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sambasim.commands.compile import Stopwatch, named_in
from sambasim.compiler.build import Built
from sambasim.compiler.capture.step import Example, Losses
from sambasim.compiler.compile import assemble, capture_model
from sambasim.compiler.update import Update
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.pef import map_weights, read
from sambasim.pef.document import Compiled
from sambasim.runtime.engine.executor import Executor, Tangent, tangent_of
from sambasim.runtime.transports.in_process import finished
from sambasim.runtime.values.memory import DeviceMemory, place_inputs, place_weights

_Captured: TypeAlias = tuple[Built, nn.Module, tuple[str, ...]]
_CAPTURES: dict[str, _Captured] = {}
"""By all that a capture depends on, the content of files included."""


def compile_from_options(options: CompileOptions, captured_as: str | None = None) -> Compiled:
    """What `options` name. All options that differ only in optimizer, parallelism and passes share one capture, also
    under several names if they are `captured_as` one."""
    built, model, notices = _captured(options.model_copy(update={"pef_name": captured_as or options.name}))
    watch = Stopwatch(lambda phase: None)
    done = assemble(built, model, options, watch.begin)
    watch.end()
    return replace(done, notices=(*notices, *done.notices), phases_s=watch.phases_s)


def _captured(options: CompileOptions) -> _Captured:
    what = {"model", "data", "loss", "dtype", "inference", "pef_name"}
    targets = (options.model.target, options.data.source, options.loss and options.loss.name)
    files = [Path(str(target).partition(":")[0]) for target in targets]
    contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    named = options.model_dump_json(include=what)
    key = f"{named} {contents} {options.micro_batch_size} {options.training.seed}"
    if key not in _CAPTURES:
        model, example, _, notices = named_in(options)
        _CAPTURES[key] = capture_model(model, example, options), model, notices
    return _CAPTURES[key]


class Made(nn.Module):
    """A module with `parts`, of which tensors are buffers; its forward is `then` of itself and the inputs."""

    def __init__(self, then: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.then = then
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.then(self, *args, **kwargs)


def net_options(folder: Path, **changes: object) -> CompileOptions:
    """Of a model in this process, with SGD unless `changes` say otherwise."""
    plain = {"model": {"target": "net:Net"}, "optimizer": {"name": "sgd"}, "pef_name": "net", "output_folder": folder}
    return CompileOptions.model_validate(plain | changes)


def compile_model(
    model: nn.Module,
    example: Example,
    options: CompileOptions,
    updates: Sequence[Update] | None = None,
    losses: Losses | None = None,
) -> Compiled:
    return assemble(capture_model(model, example, options, losses=losses), model, options, updates=updates)


def compile_net(model: nn.Module, inputs: Mapping[str, Tensor], folder: Path, **changes: object) -> Path:
    """The PEF of `model` with cross_entropy, SGD and the batch size of `inputs`, unless `changes` say otherwise."""
    plain = {"loss": {"name": "cross_entropy"}, "training": {"batch_size": len(next(iter(inputs.values())))}}
    return compile_model(model, Example(inputs), net_options(folder, **(plain | changes))).path


def loaded(path: Path, inputs: Mapping[str, Tensor]) -> tuple[Program, DeviceMemory]:
    """The program, and its memory with weights and `inputs` in place."""
    program = read(path).program
    memory = DeviceMemory.private(program)
    place_weights(memory, map_weights(path))
    place_inputs(memory, inputs)
    return program, memory


def outputs_of(executor: Executor, tangent: Tangent = None, *, accumulate: bool = False) -> dict[str, Tensor]:
    """What one pass returns, of a rank that is alone in its process."""
    (outputs,) = finished(executor.run(tangent, accumulate=accumulate))
    return outputs


def step_of(program: Program, memory: DeviceMemory, seed: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one step on `memory`, and the gradients by the first names of their parameters in the model."""
    torch.manual_seed(seed)
    loss = outputs_of(Executor(program.step, program, memory.tensor), tangent_of(program, 1.0))[program.loss or ""]
    members = [member for group in program.groups for member in group.members]
    return loss, {program.symbols[m.parameter].torch_names[0]: memory.tensor(m.gradient) for m in members}
