"""Models that are made from a config object, as those of the package `transformers`: `transformers:GPT2LMHeadModel`.
`model.args` are fields of the class's config, and no weights are read or downloaded."""

import inspect
import shlex
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from sambasim.data.datasets import DEFAULT_SAMPLES
from sambasim.data.user_code import load_object, summary, user_line
from sambasim.errors import DataError, ModelError, SambasimError
from sambasim.options.base import did_you_mean, nearest
from sambasim.options.compile import CompileOptions
from sambasim.options.grammar import SYNTHETIC, InputSpec

LONGEST_TEXT = 2048
"""The most tokens of a text that nobody gave: some models take a million, and few are trained on that."""

_OF_EVERY_CONFIG = frozenset({
    "attn_implementation", "experts_implementation", "num_labels", "output_attentions", "per_layer_config",
    "rope_scaling", "rope_theta", "torch_dtype",
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache",
    "head_dim",
})  # fmt: skip
"""What configs take beside the fields of their classes, or models read where a config has it."""

_EXAMPLE_SHAPES: Mapping[str, tuple[int, ...]] = {"input_values": (16000,), "input_features": (80, 3000)}
"""Of sound, where an error shows how inputs are given: a second at 16 kHz, and the spectrum of half a minute."""


def is_configured(factory: object) -> TypeGuard[type[nn.Module]]:
    """Whether it is a class of models that take a config object of its `config_class`, and nothing else."""
    if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
        return False
    takes_config = next(iter(inspect.signature(factory).parameters), None) == "config"
    return takes_config and isinstance(getattr(factory, "config_class", None), type)


def make_configured(factory: Any, args: Mapping[str, object], target: str) -> nn.Module:
    """The model of a class for which `is_configured`, with `args` as the fields of its config. Raises ModelError for a
    field that the config does not have, or that it refuses."""
    config = _config(factory, args, target)
    try:
        model: nn.Module = factory(config)
    except SambasimError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model {target} cannot be built from this {type(config).__name__}: {summary(error)}",
            where=user_line(error),
            remedy="give fields that fit together: --set model.args.NAME=VALUE",
        ) from error
    return model


def _config(factory: Any, args: Mapping[str, object], target: str) -> Any:
    kind = factory.config_class
    known = _fields(kind)
    if unknown := next((name for name in args if name not in known), None):
        guess = nearest(unknown, known)
        raise ModelError(
            f"{kind.__name__}, the config of {target}, has no field {unknown}",
            remedy=did_you_mean(f"model.args.{guess}" if guess else None) or f"it has {', '.join(sorted(known))}",
        )
    try:
        return kind(**args)
    except Exception as error:
        fields = ", ".join(f"{name} = {value!r}" for name, value in args.items())
        said = str(error).strip().rpartition("\n")[2].strip() or repr(error)
        raise ModelError(
            f"{kind.__name__}({fields}), the config of {target}, cannot be made: {said}",
            remedy="correct it: --set model.args.NAME=VALUE",
        ) from error


def _fields(kind: Any) -> set[str]:
    """What a config class takes by keyword: its own fields, and other names of them."""
    makers = [vars(owner)["__init__"] for owner in kind.__mro__[:-1] if "__init__" in vars(owner)]
    parameters = [parameter for maker in makers for parameter in inspect.signature(maker).parameters.values()]
    taken = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return (taken | set(getattr(kind, "attribute_map", {})) | _OF_EVERY_CONFIG) - {"self"}


class Sample(NamedTuple):
    """One sample of a model that is made from a config: its inputs by name, and the special tokens that the model reads
    and its config lacks."""

    inputs: Mapping[str, InputSpec]
    tokens: Mapping[str, int]


def example_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, a batch of one sample that follows from the config of `model`: for a model on tensors without memory,
    for which no data source is named. Raises DataError if the model does not take such inputs."""
    sample = sample_of(type(model), model.config)
    for token, number in sample.tokens.items():  # which they are changes no shape
        setattr(model.config, token, number)
    return {name: torch.zeros(1, *spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in sample.inputs.items()}


def inferred_options(options: CompileOptions) -> Mapping[str, object]:
    """`data` and `model` of `options` as they follow from the config of the model, if it has one and no data source is
    named: synthetic samples, enough for one step. They compile what is captured otherwise on tensors without memory."""
    target = options.model.target
    if options.data.source is not None or target is None or not is_configured(factory := load_object(target, "model")):
        return {}
    sample = sample_of(factory, _config(factory, options.model.args, target))
    step = options.training.batch_size * options.training.accumulation_steps * options.world_size
    inputs = {name: str(spec) for name, spec in sample.inputs.items()}
    data = {"source": SYNTHETIC, "inputs": inputs, "samples": step if step > DEFAULT_SAMPLES else None}
    return {
        "data": options.data.model_copy(update=data),
        "model": options.model.model_copy(update={"args": {**options.model.args, **sample.tokens}}),
    }


def sample_of(kind: type[nn.Module], config: Any) -> Sample:
    """A sample of the length, or with the picture, that `config` is for, and its labels. Raises DataError if models of
    `kind` do not take such inputs."""
    name, main = kind.__name__, str(getattr(kind, "main_input_name", "x"))
    if not _takes_labels(kind):
        raise DataError(
            f"{name} takes no labels, so it returns no loss, and no data source is named",
            remedy=_class_with_a_loss(kind)
            or "name a class, or a function that returns a model, with a loss: path/file.py:NAME",
        )
    is_text, has_classes = main == "input_ids", "Classification" in name and "Token" not in name
    picture = getattr(config, "vision_config", config)
    size = getattr(picture, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    words = getattr(config.get_text_config(), "vocab_size", None)
    if is_text:
        first = InputSpec(main, "int64", (text_length(config),), words)
    elif main == "pixel_values":
        first = InputSpec(main, "float32", (getattr(picture, "num_channels", 3), *(sides or (224, 224))))
    else:
        first = InputSpec(main, "float32", _EXAMPLE_SHAPES.get(main, (16,)))
    of_labels = first.shape if is_text else (16,)
    if has_classes or "Segmentation" in name:
        of_labels = () if has_classes else first.shape[1:]
    are_words = words is not None and "Classification" not in name and main != "pixel_values"
    labels = InputSpec("labels", "int64", of_labels, words if are_words else config.num_labels)
    inputs = {main: first, "labels": labels}
    if not (is_text or (main == "pixel_values" and has_classes and sides)):
        table = ", ".join(f'{name} = "{spec}"' for name, spec in inputs.items())
        typed = f"--set data.source=synthetic --set {shlex.quote(f'data.inputs={{{table}}}')}"
        raise DataError(
            f"no data source is named, and the inputs of {name} do not follow from its config: it takes {main}",
            remedy=f"say what one sample is: {typed}",
        )
    # Not every config has the tokens that its model reads.
    reads = {"pad_token_id": has_classes, "decoder_start_token_id": config.is_encoder_decoder}
    return Sample(inputs, {token: 0 for token, read in reads.items() if read and getattr(config, token, None) is None})


def _takes_labels(kind: type[nn.Module]) -> bool:
    return "labels" in inspect.signature(kind.forward).parameters


def _class_with_a_loss(kind: type[nn.Module]) -> str | None:
    beside = vars(sys.modules[kind.__module__]).items()
    losing = [name for name, other in beside if is_configured(other) and _takes_labels(other)]
    usual = f"{kind.__name__.removesuffix('Model')}ForSequenceClassification"
    return f"name a class with a loss, such as {usual if usual in losing else losing[0]}" if losing else None


def text_length(config: Any) -> int:
    """The most tokens that the model takes, rounded down to a power of two (positions may begin at 2), and at most
    LONGEST_TEXT."""
    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else 512
    return min(LONGEST_TEXT, 1 << (longest.bit_length() - 1))
