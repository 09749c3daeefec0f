"""A model of a test, compiled into a PEF, and a PEF in device memory."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from sambasim.compiler.compile import compile_model
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.run.replica import place_inputs, place_weights
from sambasim.runtime.values.device import DeviceMemory, private_storage


def compile_net(model: nn.Module, inputs: Mapping[str, Tensor], folder: Path, **changes: object) -> Path:
    """The PEF of `model` with cross_entropy, SGD and the batch size of `inputs`, unless `changes` say otherwise."""
    options: dict[str, object] = {
        "model": {"target": "net:Net"},
        "loss": {"name": "cross_entropy"},
        "optimizer": {"name": "sgd"},
        "training": {"batch_size": len(next(iter(inputs.values())))},
        "pef_name": "net",
        "output_folder": folder,
    }
    return compile_model(model, inputs, CompileOptions.model_validate(options | changes), by_keyword=False).path


def loaded(path: Path, inputs: Mapping[str, Tensor]) -> tuple[Program, DeviceMemory]:
    """The program, and its memory with weights and `inputs` in place."""
    program = read(path).program
    memory = DeviceMemory(program, private_storage(program.device_bytes))
    place_weights(program, memory, map_weights(path))
    place_inputs(memory, inputs)
    return program, memory
