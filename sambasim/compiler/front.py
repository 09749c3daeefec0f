"""From options to a PEF or a program: find the model and the data, take one batch, compile.

A model may be a class of the package `transformers`, or one that is made likewise: `model.args` are then fields of its
config, and no weights are read or downloaded."""

import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sambasim.compiler.capture.arguments import kept_default, left_to_run, parameters_of, skipped
from sambasim.compiler.capture.recording import forward_line
from sambasim.compiler.capture.step import NAMED_LOSSES, Example, Loss, by_place, named_losses
from sambasim.compiler.capture.tensors import inputs_in
from sambasim.compiler.capture.trial import with_values
from sambasim.compiler.compile import capture_model
from sambasim.compiler.passes import Fits, pipeline, run_pipeline
from sambasim.data.batches import ONE_TENSOR, Batch, batch_of, bind, each_value, flat, is_list_of_numbers
from sambasim.data.datasets import DEFAULT_SAMPLES, Source, open_source
from sambasim.data.user_code import check_arguments, load_object, summary, user_line
from sambasim.errors import DataError, ModelError, OptionError, SambasimError
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.grammar import SYNTHETIC, TARGET, InputSpec, synthetic_data
from sambasim.options.problem import did_you_mean, nearest
from sambasim.units import counted

_LONGEST_TEXT = 2048
"""The most tokens of a text that nobody gave: some models take a million, and few are trained on that."""

_OF_EVERY_CONFIG = frozenset({
    "attn_implementation", "experts_implementation", "num_labels", "output_attentions", "per_layer_config",
    "rope_scaling", "rope_theta", "torch_dtype", "bos_token_id", "decoder_start_token_id", "eos_token_id",
    "pad_token_id", "tie_word_embeddings", "use_cache", "head_dim",
})  # fmt: skip
"""What configs take beside the fields of their classes, or models read where a config has it."""

_EXAMPLE_SHAPES: Mapping[str, tuple[int, ...]] = {"input_values": (16000,), "input_features": (80, 3000)}
"""Of sound, where an error shows how inputs are given: a second at 16 kHz, and the spectrum of half a minute."""


def shapes_from_options(options: CompileOptions, on_phase: Callable[[str], None] = lambda phase: None) -> Program:
    """Compile what `options` name as `compile_shapes` does. One sample of the data is read, whatever the batch size."""
    return _with_passes(*captured_from_options(options, on_phase), options, on_phase)


def captured_from_options(
    options: CompileOptions,
    on_phase: Callable[[str], None] = lambda phase: None,
    *,
    dtype: torch.dtype | None = None,
    quick: bool = False,
) -> tuple[Program, nn.Module]:
    """What `shapes_from_options` captures, before any pass, and the model. `dtype`: that of its inputs, where it is not
    their own; `quick`: see `capture_model`."""
    on_phase("build the model")
    model, example = model_of_shapes(
        lambda: build_model(options), lambda model: example_of_one(model, options), options.micro_batch_size
    )
    example = example._replace(inputs=inputs_in(dtype, example.inputs))
    return capture_model(model, example, options, on_phase, quick=quick).program, model


def compile_shapes(
    make: Callable[[], nn.Module], example: Callable[[nn.Module], Example], options: CompileOptions
) -> Program:
    """The program of the model that `make` returns, for the batch of `example`; `make` runs on fake tensors, so any
    size is possible: whether it fits is not checked. Raises ModelError and CaptureError."""
    model, shapes = model_of_shapes(make, example, None)
    return _with_passes(capture_model(model, shapes, options).program, model, options, lambda title: None)


def _with_passes(program: Program, model: nn.Module, options: CompileOptions, before: Callable[[str], None]) -> Program:
    passes = [step for step in pipeline(options, model=model) if not isinstance(step, Fits)]
    return run_pipeline(program, passes, before)


def model_of_shapes(
    make: Callable[[], nn.Module], example: Callable[[nn.Module], Example], batch_size: int | None
) -> tuple[nn.Module, Example]:
    """The model that `make` returns and a batch for it, on fake tensors. `batch_size` replaces that of the example."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A model may copy layers: copy.deepcopy asks for this, and would make each copy another mode.
    mode.__dict__["__deepcopy__"] = lambda memo: mode
    # torch.nn.init.trunc_normal_ draws again until no value is too large, and a fake tensor has no values.
    no_draws = with_values([(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **_: tensor)])
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
        inputs, tokens = _sample_of(type(model), model.config)
        for token, number in tokens.items():  # which they are changes no shape
            setattr(model.config, token, number)
        shapes = {name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in inputs.items()}
        zeros = {name: torch.zeros(1, *shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        return Example(zeros, by_keyword=True)
    training = options.training.model_copy(update={"batch_size": 1})
    return example_batch(model, options.model_copy(update={"training": training, "micro_batches": 1, "n_chips": 1}))


def build_model(options: CompileOptions) -> nn.Module:
    """The model that `options` name, its weights by `training.seed`. Raises ModelError if it cannot be built."""
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
    if not is_configured(factory):
        check_arguments(factory, args, target, "model")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    failed, mend = f"the model {target} cannot be built", "correct that line, or build it otherwise"
    given: Mapping[str, object] = args
    if is_configured(factory):
        config = _config(factory, args, target)
        failed, mend = f"{failed} from this {type(config).__name__}", "give fields that fit together"
        given = {"config": config}
    try:
        model = factory(**given)
    except SambasimError:
        raise
    except (Exception, SystemExit) as error:
        what, mend = f"{failed}: {summary(error)}", f"{mend}: --set model.args.NAME=VALUE"
        raise ModelError(what, where=user_line(error), remedy=mend) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{target} gives a {type(model).__name__}, not a torch.nn.Module", remedy=remedy)
    refuse_torchscript(model)
    return model


def refuse_torchscript(model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        remedy = "give it as it was before torch.jit.script or trace"
        raise ModelError("the model is, or contains, one of TorchScript", remedy=remedy)


def is_configured(factory: object) -> TypeGuard[type[nn.Module]]:
    """Whether it is a class of models that take a config object of its `config_class`, and nothing else."""
    if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
        return False
    takes_config = next(iter(inspect.signature(factory).parameters), None) == "config"
    return takes_config and isinstance(getattr(factory, "config_class", None), type)


def _config(factory: Any, args: Mapping[str, object], target: str) -> Any:
    """The config with the fields `args`. Raises ModelError for a field that it does not have, or that it refuses."""
    kind = factory.config_class
    # By keyword it takes its own fields, and other names of them.
    makers = [vars(owner)["__init__"] for owner in kind.__mro__[:-1] if "__init__" in vars(owner)]
    fields = [field for maker in makers for field in inspect.signature(maker).parameters.values()]
    known = {field.name for field in fields if field.kind in (field.POSITIONAL_OR_KEYWORD, field.KEYWORD_ONLY)}
    known = (known | set(getattr(kind, "attribute_map", {})) | _OF_EVERY_CONFIG) - {"self"}
    if unknown := next((name for name in args if name not in known), None):
        guess, what = nearest(unknown, known), f"{kind.__name__}, the config of {target}, has no field {unknown}"
        remedy = did_you_mean(f"model.args.{guess}" if guess else None) or f"it has {', '.join(sorted(known))}"
        raise ModelError(what, remedy=remedy)
    try:
        return kind(**args)
    except Exception as error:
        values = ", ".join(f"{name} = {value!r}" for name, value in args.items())
        said = str(error).strip().rpartition("\n")[2].strip() or repr(error)
        what = f"{kind.__name__}({values}), the config of {target}, cannot be made: {said}"
        raise ModelError(what, remedy="correct it: --set model.args.NAME=VALUE") from error


def inferred_options(options: CompileOptions) -> Mapping[str, object]:
    """`data` and `model` of `options` as they follow from the config of the model, if it has one and no data source is
    named: synthetic samples, enough for one step. They compile what is captured otherwise on tensors without memory."""
    target = options.model.target
    if options.data.source is not None or target is None or not is_configured(factory := load_object(target, "model")):
        return {}
    sample, tokens = _sample_of(factory, _config(factory, options.model.args, target))
    step = options.training.batch_size * options.training.accumulation_steps * options.world_size
    inputs = {name: str(spec) for name, spec in sample.items()}
    data = {"source": SYNTHETIC, "inputs": inputs, "samples": step if step > DEFAULT_SAMPLES else None}
    return {
        "data": options.data.model_copy(update=data),
        "model": options.model.model_copy(update={"args": {**options.model.args, **tokens}}),
    }


def _sample_of(kind: type[nn.Module], config: Any) -> tuple[Mapping[str, InputSpec], Mapping[str, int]]:
    """A sample of the length, or with the picture, that `config` is for, and its labels; and the special tokens that
    the model reads and its config lacks. Raises DataError if models of `kind` do not take such inputs."""
    name, main = kind.__name__, str(getattr(kind, "main_input_name", "x"))
    if not _takes_labels(kind):
        what = f"{name} takes no labels, so it returns no loss, and no data source is named"
        remedy = "name a class, or a function that returns a model, with a loss: path/file.py:NAME"
        raise DataError(what, remedy=_class_with_a_loss(kind) or remedy)
    is_text, has_classes = main == "input_ids", "Classification" in name and "Token" not in name
    picture = getattr(config, "vision_config", config)
    size = getattr(picture, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    words = getattr(config.get_text_config(), "vocab_size", None)
    first = InputSpec(main, "float32", _EXAMPLE_SHAPES.get(main, (16,)))
    if is_text:
        # The most tokens that it takes, rounded down to a power of two: positions may begin at 2.
        longest = getattr(config, "max_position_embeddings", None)
        longest = longest if isinstance(longest, int) and longest > 0 else 512
        first = InputSpec(main, "int64", (min(_LONGEST_TEXT, 1 << (longest.bit_length() - 1)),), words)
    elif main == "pixel_values":
        first = InputSpec(main, "float32", (getattr(picture, "num_channels", 3), *(sides or (224, 224))))
    of_labels = first.shape if is_text else (16,)
    if has_classes or "Segmentation" in name:
        of_labels = () if has_classes else first.shape[1:]
    are_words = words is not None and "Classification" not in name and main != "pixel_values"
    inputs = {main: first, "labels": InputSpec("labels", "int64", of_labels, words if are_words else config.num_labels)}
    if not (is_text or (main == "pixel_values" and has_classes and sides)):
        what = f"no data source is named, and the inputs of {name} do not follow from its config: it takes {main}"
        raise DataError(what, remedy=f"say what one sample is: {synthetic_data(inputs)}")
    # Not every config has the tokens that its model reads.
    reads = {"pad_token_id": has_classes, "decoder_start_token_id": config.is_encoder_decoder}
    return inputs, {token: 0 for token, read in reads.items() if read and getattr(config, token, None) is None}


def _takes_labels(kind: type[nn.Module]) -> bool:
    return "labels" in inspect.signature(kind.forward).parameters


def _class_with_a_loss(kind: type[nn.Module]) -> str | None:
    beside = vars(sys.modules[kind.__module__]).items()
    losing = [name for name, other in beside if is_configured(other) and _takes_labels(other)]
    usual = f"{kind.__name__.removesuffix('Model')}ForSequenceClassification"
    return f"name a class with a loss, such as {usual if usual in losing else losing[0]}" if losing else None


def example_batch(
    model: nn.Module,
    options: CompileOptions,
    notice: Callable[[str], None] = lambda text: None,
    source: Source | None = None,
) -> Example:
    """The first batch of the training data, which is `source` if it is open already. Raises DataError if samples are
    too few, or do not fit together, or model and loss."""
    source = source or open_source(options.data, None)
    batch_size = options.training.batch_size
    if len(source.train) < batch_size and not source.train.is_stream:
        what = f"the training data has {len(source.train)} samples, fewer than one batch of {batch_size}"
        raise DataError(what, remedy=f"--batch-size {len(source.train)} or less")
    batch = batch_of(source.train, range(options.micro_batch_size))
    sample = None if source.train.collate or source.train.is_stream else source.train[0]
    for name, value in sample.items() if isinstance(sample, Mapping) else ():
        if name in inspect.signature(model.forward).parameters and is_list_of_numbers(value):
            raise DataError(f"{name} of a sample is a list of numbers, as many inputs", remedy=ONE_TENSOR)
    return inputs_of(batch, model, options.loss.name if options.loss else None, options, notice)


def inputs_of(
    batch: Batch,
    model: nn.Module,
    loss: str | None,
    options: CompileOptions,
    notice: Callable[[str], None] = lambda text: None,
    function: Loss | None = None,
) -> Example:
    """The inputs of a batch by name, the targets last if there is a `loss`: that of a user, or a `function`, takes
    several as a loop would give them, `x, *targets = batch`, or of a dict those that `forward` does not take, by its
    parameters if they have their names, else in a dict. Raises DataError if they do not fit."""
    if isinstance(batch, DataError):
        raise batch
    by_keyword, table = isinstance(batch, Mapping), options.arguments
    takes = inspect.signature(model.forward).parameters
    takes_any = any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in takes.values())
    is_named = loss in NAMED_LOSSES and function is None
    may_be_several = loss is not None and not is_named and not takes_any
    targets, rest, by_name = dict[str, Any](), list[object](), False
    if isinstance(batch, Mapping):
        beside = list[inspect.Parameter]()
        if loss is not None:
            called = function or named_losses(loss, options.loss.args if options.loss else {})[0]
            beside = [*parameters_of(called)[1:]]
        known = {TARGET, *takes, *(one.name for one in beside)}
        values = {str(name): value for name, value in batch.items() if name in known or _is_of_tensors(value)}
        if loss is not None:
            others = [name for name in values if name not in takes] if may_be_several else []
            required = {one.name for one in beside if one.default is one.empty}
            others = [name for name in others if name in known] if required and required <= {*others} else others
            needs = [name for name in values if name in required]
            if needs and not (others or TARGET in values):
                notice(f"of a sample, the loss takes {', '.join(needs)}, and not forward()")
                others = needs
            by_name = others not in ([], [TARGET]) and {*others} <= {one.name for one in beside}
            others = others if by_name or len(others) > 1 else [TARGET]
            targets = {name: values.pop(name) for name in others if name in values}
        if not takes_any and (targets or loss is None):
            values = {name: value for name, value in values.items() if name in takes}
        if dropped := [str(name) for name in batch if name not in {*values, *targets}]:
            notice(f"columns that neither forward() nor the loss takes are dropped: {', '.join(dropped)}")
    else:
        parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        wanted = len(parts) - (loss is not None)
        wanted = min(wanted, len(takes.keys() - table.keys())) if may_be_several else wanted
        values, rest = by_place(model, parts[:wanted], skipped(model, wanted, table)), parts[wanted:]
        if loss is not None:
            targets = {TARGET: rest[0] if len(rest) == 1 else rest}
    of_run = left_to_run(model, table, values)
    by_keyword |= bool(of_run) and all(one.kind is not one.VAR_POSITIONAL for one in takes.values())
    if name := kept_default(model, {*values, *of_run}):
        notice(f"forward() keeps the default of {name}: --set arguments.{name}={name} gives it that of the training")
    _check_inputs(model, [*values], [*targets], loss, of_run, by_keyword=by_keyword)
    values |= targets
    names = [name for top, value in values.items() for name, _ in flat(value, top)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"two values of a sample are both called {twice[0]}", remedy="give them keys without dots")
    inputs = bind(batch, names)
    # NumPy makes float64 of everything; a model without float64 parameters takes it as float32, as a run will.
    wide = [name for name, tensor in inputs.items() if tensor.dtype is torch.float64]
    if wide and all(parameter.dtype is not torch.float64 for parameter in model.parameters()):
        notice(f"float64 samples become float32, as the model is: {', '.join(wide)}")
        inputs |= {name: inputs[name].float() for name in wide}
    given = {top: each_value(value, lambda _, name: names.index(name), top) for top, value in values.items()}
    of_loss = {top: given.pop(top) for top in targets}
    is_one = [*of_loss] == [TARGET] and isinstance(of_loss[TARGET], int)
    if is_named and not is_one:
        what = f"the target of {loss} is one tensor, and a sample gives several"
        raise DataError(what, remedy="give one, or for (x, y, w) a loss function of your own, f(outputs, y, w)")
    if options.inference:  # only the loss would read them
        own = (flat(value, top) for top, value in values.items() if top not in targets)
        inputs = {name: inputs[name] for each in own for name, _ in each}
    is_flat = all(isinstance(position, int) for position in given.values())
    whole: Any = of_loss.get(TARGET, of_loss) if len(of_loss) == 1 else of_loss
    several = None if is_one or not targets else whole if by_name or len(rest) > 1 else [whole]
    return Example(inputs, by_keyword, None if is_flat else given, of_run, targets=several)


def _is_of_tensors(value: object) -> bool:
    return all(isinstance(one, Tensor) for _, one in flat(value, ""))


def _check_inputs(
    model: nn.Module,
    called: Sequence[str],
    targets: Sequence[str],
    loss: str | None,
    of_run: Sequence[str],
    *,
    by_keyword: bool,
) -> None:
    """Raises DataError unless `model.forward` takes the values of a sample that are `called` so, and beside them
    `of_run`, and there is a target for the `loss`."""
    if loss is not None and not (targets and called):
        only = f"{', '.join([*called, *targets])} by name" if by_keyword else "one value"
        wanted = f'{{"x": x, "{TARGET}": label}}' if by_keyword else "(x, label)"
        what = f"the loss {loss} needs a target, and a sample gives {only}"
        raise DataError(what, remedy=f"give {wanted} in the dataset, or name no loss for a model that returns its own")
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
        return
    takes = [name for name in parameters if name not in of_run]
    begin = 0 if by_keyword else len(called)
    needed = [name for name in takes[begin:] if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in called]
    extra = [name for name in called if name not in takes] if by_keyword else called[len(takes) :]
    if not missing and not extra:
        return
    gives, remedy = ", ".join(called), "name the loss that takes the last value as its target: --loss cross_entropy"
    if loss is not None:
        remedy = "leave it out of the samples, or take it in forward() or in a loss function: f(outputs, y, w)"
    if missing:
        problem = f"needs {', '.join(missing)}"
        remedy = "give it in every sample, or give it a default in forward(), or a number in [arguments]: "
        remedy += f'arguments={{"{missing[0]}": 0.1}}'
    elif by_keyword:
        problem = f"does not take {', '.join(extra)}"
    else:
        problem, gives = f"takes {counted(len(takes), 'input')}", counted(len(called), "input")
    gives += " and the target of the loss" if loss is not None else ""
    what = f"forward({', '.join(takes)}) {problem}, and a sample gives {gives}"
    raise DataError(what, where=forward_line(model), remedy=remedy)
