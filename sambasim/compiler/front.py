"""From options to a PEF or a program: find the model and the data, take one batch, compile."""

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sambasim.compiler.capture.names import forward_line, user_line
from sambasim.compiler.capture.step import TARGET, Example, forward_parameters
from sambasim.compiler.capture.trial import replaced
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.compiler.configured import example_of, is_configured, make_configured
from sambasim.compiler.passes import Fits, pipeline, run_pipeline
from sambasim.data.batches import Batch, bind, collate, flat, in_place_of_values
from sambasim.data.datasets import Failure, Source, open_source
from sambasim.data.user_code import check_arguments, load_object, summary
from sambasim.errors import DataError, ModelError, OptionError, SambasimError
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.units import counted


def shapes_from_options(options: CompileOptions, on_phase: Callable[[str], None] = lambda phase: None) -> Program:
    """Compile what `options` name on fake tensors, and write no file: see `compile_shapes`. One sample of the data is
    read, whatever the batch size."""
    return _with_passes(*captured_from_options(options, on_phase), options, Stopwatch(on_phase))


def captured_from_options(
    options: CompileOptions, on_phase: Callable[[str], None] = lambda phase: None
) -> tuple[Program, nn.Module]:
    """What `shapes_from_options` captures, before any pass, and the model."""
    on_phase("build the model")
    model, example = model_of_shapes(
        lambda: build_model(options), lambda model: example_of_one(model, options), options.micro_batch_size
    )
    return capture_model(model, example, options, Stopwatch(on_phase)).program, model


def compile_shapes(
    make: Callable[[], nn.Module], example: Callable[[nn.Module], Example], options: CompileOptions
) -> Program:
    """The program of the model that `make` returns, for the batch of `example`; `make` runs on fake tensors, so any
    size is possible: whether it fits is not checked. Raises ModelError and CaptureError."""
    model, shapes = model_of_shapes(make, example, None)
    watch = Stopwatch(lambda phase: None)
    return _with_passes(capture_model(model, shapes, options, watch).program, model, options, watch)


def _with_passes(captured: Program, model: nn.Module, options: CompileOptions, watch: Stopwatch) -> Program:
    passes = [step for step in pipeline(options, model=model) if not isinstance(step, Fits)]
    return run_pipeline(captured, passes, watch.begin)


def model_of_shapes(
    make: Callable[[], nn.Module], example: Callable[[nn.Module], Example], batch_size: int | None
) -> tuple[nn.Module, Example]:
    """The model that `make` returns and a batch for it, on fake tensors. `batch_size` replaces that of the example."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A model may copy layers: copy.deepcopy asks for this, and would make each copy another mode.
    mode.__dict__["__deepcopy__"] = lambda memo: mode
    # torch.nn.init.trunc_normal_ draws again until no value is too large, and a fake tensor has no values.
    no_draws = replaced(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **_: tensor)
    with mode, warnings.catch_warnings(), no_draws:
        # Torch reads the address of a copied tensor, and warns itself that a fake one has none.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        model = make()
    batch = example(model)
    shapes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in batch.inputs.items()}
    if batch_size is not None:
        shapes = {name: shape.new_empty((batch_size, *shape.shape[1:])) for name, shape in shapes.items()}
    return model, batch._replace(inputs=shapes)


def example_of_one(model: nn.Module, options: CompileOptions) -> Example:
    """As `example_batch`, of one sample. Where no data source is named, it follows from the config of the model, if it
    has one: only shapes are wanted."""
    if options.data.source is None and is_configured(type(model)):
        return Example(example_of(model), by_keyword=True)
    training = options.training.model_copy(update={"batch_size": 1})
    return example_batch(model, options.model_copy(update={"training": training, "micro_batches": 1, "n_chips": 1}))


def build_model(options: CompileOptions) -> nn.Module:
    """The model that `options` name, its weights drawn from `training.seed`. Raises ModelError if it cannot be
    built."""
    target, args, seed = options.model.target, options.model.args, options.training.seed
    if target is None:
        raise OptionError("no model was named", remedy="sambasim compile package.module:Name")
    factory = load_object(target, "model")
    if isinstance(factory, nn.Module):
        return factory
    remedy = "name an nn.Module class, or a function that returns one"
    if not callable(factory):
        kind = type(factory).__name__
        what = f"{target} is of type {kind}, neither an nn.Module class nor a function that returns one"
        raise ModelError(what, remedy=remedy)
    configured = is_configured(factory)
    if not configured:
        check_arguments(factory, args, target, "model")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if configured:
        return make_configured(factory, args, target)
    try:
        model = factory(**args)
    except SambasimError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"the model {target} cannot be built: {summary(error)}",
            where=user_line(error),
            remedy="correct that line, or build it otherwise: --set model.args.NAME=VALUE",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{target} gives a {type(model).__name__}, not a torch.nn.Module", remedy=remedy)
    refuse_torchscript(model)
    return model


def refuse_torchscript(model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        remedy = "give it as it was before torch.jit.script or trace"
        raise ModelError("the model is, or contains, one of TorchScript", remedy=remedy)


def example_batch(
    model: nn.Module,
    options: CompileOptions,
    notice: Callable[[str], None] = lambda text: None,
    source: Source | None = None,
) -> Example:
    """The first batch of the training data, which is `source` if it is open already, by input name, and whether the
    model takes its inputs by name. Raises DataError if samples are too few, or do not fit together, or model and
    loss."""
    source = source or open_source(options.data, None)
    batch_size = options.training.batch_size
    if len(source.train) < batch_size:
        raise DataError(
            f"the training data has {len(source.train)} samples, fewer than one batch of {batch_size}",
            remedy=f"--batch-size {len(source.train)} or less",
        )
    batch = collate(source.train.__getitems__(range(options.micro_batch_size)))
    loss = options.loss.name if options.loss else None
    return inputs_of(batch, model, loss, inference=options.inference, notice=notice)


def inputs_of(
    batch: Batch,
    model: nn.Module,
    loss: str | None,
    *,
    inference: bool,
    notice: Callable[[str], None] = lambda text: None,
) -> Example:
    """The inputs of a batch by name, the target last if there is a `loss`. Raises DataError if they do not fit."""
    if isinstance(batch, Failure):
        raise batch.error()
    by_keyword = isinstance(batch, Mapping)
    if isinstance(batch, Mapping):
        values = {str(name): value for name, value in batch.items()}
        if loss and TARGET in values:
            values[TARGET] = values.pop(TARGET)
    else:
        parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        wanted, parameters = len(parts) - (loss is not None), [*forward_parameters(model)]
        called = parameters[:wanted] + [f"input_{index}" for index in range(len(parameters), wanted)]
        values = dict(zip([*called, *([TARGET] if loss is not None else [])], parts, strict=True))
    _check_inputs(model, list(values), loss, by_keyword=by_keyword)
    names = [name for top, value in values.items() for name, _ in flat(value, top)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"two values of a sample are both called {twice[0]}", remedy="give them keys without dots")
    inputs = _narrowed(bind(batch, names), model, notice)
    if loss and names[-1] != TARGET:
        raise DataError("the target of a loss is one tensor, and a sample gives several", remedy="give one, or no loss")
    if inference and loss:
        inputs.pop(TARGET)  # only the loss would read it
    arguments = {top: in_place_of_values(value, top) for top, value in values.items() if not loss or top != TARGET}
    is_flat = all(top == name for top, name in arguments.items())
    return Example(inputs, by_keyword, None if is_flat else arguments)


def _narrowed(inputs: dict[str, Tensor], model: nn.Module, notice: Callable[[str], None]) -> dict[str, Tensor]:
    """NumPy makes float64 of everything; a model without float64 parameters takes it as float32, as a run will."""
    wide = [name for name, tensor in inputs.items() if tensor.dtype is torch.float64]
    if not wide or any(parameter.dtype is torch.float64 for parameter in model.parameters()):
        return inputs
    notice(f"float64 samples become float32, as the model is: {', '.join(wide)}")
    return inputs | {name: inputs[name].float() for name in wide}


def _check_inputs(model: nn.Module, names: Sequence[str], loss: str | None, *, by_keyword: bool) -> None:
    """Raises DataError unless `model.forward` takes what a sample gives, by name, of which the last one is the target
    where the config names a `loss`."""
    if loss is not None and (names[-1] != TARGET or len(names) == 1):
        only = f"{', '.join(names)} by name" if by_keyword else "one value"
        wanted = f'{{"x": x, "{TARGET}": label}}' if by_keyword else "(x, label)"
        raise DataError(
            f"the loss {loss} needs a target, and a sample gives {only}",
            remedy=f"give {wanted} in the dataset, or name no loss for a model that returns its own",
        )
    called = names[:-1] if loss is not None else names
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
        return
    takes = list(parameters)
    needed = [
        name
        for name in takes[0 if by_keyword else len(called) :]
        if parameters[name].default is inspect.Parameter.empty
    ]
    missing = [name for name in needed if name not in called]
    extra = [name for name in called if name not in takes] if by_keyword else called[len(takes) :]
    if not missing and not extra:
        return
    gives, remedy = ", ".join(called), "leave it out of the samples, or take it in forward()"
    if missing:
        problem = f"needs {', '.join(missing)}"
        remedy = "give it in every sample, or give it a default in forward()"
    elif by_keyword:
        problem = f"does not take {', '.join(extra)}"
    else:
        problem, gives = f"takes {counted(len(takes), 'input')}", counted(len(called), "input")
    if not missing and loss is None:
        remedy = "name the loss that takes the last value as its target: --loss cross_entropy"
    target = " and the target of the loss" if loss is not None else ""
    raise DataError(
        f"forward({', '.join(takes)}) {problem}, and a sample gives {gives}{target}",
        where=forward_line(model),
        remedy=remedy,
    )
