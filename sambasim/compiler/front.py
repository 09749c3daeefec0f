"""From options to a PEF: find the model and the data, take one batch, compile."""

import random
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sambasim.compiler.compile import Compiled, check_model, compile_model
from sambasim.compiler.fit import check_inputs
from sambasim.compiler.shapes import compile_shapes
from sambasim.compiler.step import TARGET, forward_parameters, user_line
from sambasim.data.batches import bind, collate
from sambasim.data.blame import summary
from sambasim.data.resolve import check_arguments, load_object
from sambasim.data.sources import open_source
from sambasim.errors import DataError, ModelError, OptionError, SambasimError
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.load import check_output_file


def compile_from_options(options: CompileOptions, hear: Callable[[str], None] = lambda phase: None) -> Compiled:
    """Compile what `options` name. `hear` is told each phase as it begins.

    Raises OptionError, before anything else, if the PEF could not be written.
    """
    check_output_file(options.pef_path, "the PEF", "--output-folder FOLDER")
    hear("build the model")
    model = build_model(options)
    hear("read an example batch")
    inputs, by_keyword = example_batch(model, options)
    return compile_model(model, inputs, options, by_keyword=by_keyword, hear=hear)


def shapes_from_options(options: CompileOptions, hear: Callable[[str], None] = lambda phase: None) -> Program:
    """The program of what `options` name, compiled for its shapes alone: of weights there are none, and no PEF. One
    sample of the data is read, whatever the batch size."""
    hear("build the model")
    of_one = options.model_copy(update={"training": options.training.model_copy(update={"batch_size": 1})})
    return compile_shapes(
        lambda: build_model(options),
        lambda model: example_batch(model, of_one),
        options,
        hear,
        batch_size=options.training.batch_size,
    )


def build_model(options: CompileOptions) -> nn.Module:
    """The model that `options` name, its weights drawn from `training.seed`. Raises ModelError if it cannot be
    built."""
    target = options.model.target
    if target is None:
        raise OptionError("no model was named", remedy="sambasim compile package.module:Name")
    factory = load_object(target, "model")
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ModelError(
            f"{target} is of type {type(factory).__name__}, neither an nn.Module class nor a function that returns one",
            remedy="name an nn.Module class, or a function that returns one",
        )
    check_arguments(factory, options.model.args, target, "model")
    torch.manual_seed(options.training.seed)
    np.random.seed(options.training.seed % 2**32)
    random.seed(options.training.seed)
    try:
        return check_model(factory(**options.model.args), target)
    except SambasimError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"the model {target} cannot be built: {summary(error)}",
            where=user_line(error),
            remedy="correct that line, or build it otherwise: --set model.args.NAME=VALUE",
        ) from error


def example_batch(model: nn.Module, options: CompileOptions) -> tuple[dict[str, Tensor], bool]:
    """The first batch of the training data, by input name, and whether the model takes its inputs by name.

    Raises DataError if there are fewer samples than a batch, or if samples, model and loss do not go together.
    """
    source = open_source(options.data, None)
    batch_size = options.training.batch_size
    if len(source.train) < batch_size:
        raise DataError(
            f"the training data has {len(source.train)} samples, fewer than one batch of {batch_size}",
            remedy=f"--batch-size {len(source.train)} or less",
        )
    batch = collate(source.train.__getitems__(range(batch_size)))
    by_keyword = isinstance(batch, Mapping)
    names = list(batch) if isinstance(batch, Mapping) else _positional_names(model, batch, options)
    if isinstance(batch, Mapping) and options.loss and TARGET in batch:
        names = [name for name in names if name != TARGET] + [TARGET]
    inputs = _narrowed(bind(batch, names), model)
    check_inputs(model, inputs, options.loss.name if options.loss else None, by_keyword=by_keyword)
    if options.inference and options.loss:
        inputs.pop(TARGET)  # what only the loss would read
    return inputs, by_keyword


def _narrowed(inputs: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """NumPy makes float64 of everything; a model without float64 parameters takes it as float32, as a run will."""
    if any(parameter.dtype is torch.float64 for parameter in model.parameters()):
        return inputs
    return {name: tensor.float() if tensor.dtype is torch.float64 else tensor for name, tensor in inputs.items()}


def _positional_names(model: nn.Module, batch: object, options: CompileOptions) -> list[str]:
    count = len(batch) if isinstance(batch, (tuple, list)) else 1
    parameters = [*forward_parameters(model)]
    wanted = count - 1 if options.loss else count
    names = parameters[:wanted] + [f"input_{index}" for index in range(len(parameters), wanted)]
    return [*names, TARGET] if options.loss else names
