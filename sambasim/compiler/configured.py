"""Models that are made from a config object, as those of the package `transformers`: `transformers:GPT2LMHeadModel`.
`model.args` are fields of the class's config, and no weights are read or downloaded."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sambasim.data.user_code import summary, user_line
from sambasim.errors import DataError, ModelError, SambasimError
from sambasim.options.load import did_you_mean, nearest

LONGEST_TEXT = 2048
"""The most tokens of a text that nobody gave: some models take a million, and few are trained on that."""

_DEFAULT_TEXT = 512
_OF_EVERY_CONFIG = frozenset({
    "attn_implementation", "experts_implementation", "num_labels", "output_attentions", "per_layer_config",
    "rope_scaling", "rope_theta", "torch_dtype",
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache",
    "head_dim",
})  # fmt: skip
"""What configs take beside the fields of their classes, or models read where a config has it."""

_GIVE_INPUTS = """--set data.source=synthetic --set 'data.inputs={x = "float32[784]", target = "int64[] < 10"}'"""


def is_configured(factory: object) -> TypeGuard[type[nn.Module]]:
    """Whether it is a class of models that take a config object of its `config_class`, and nothing else."""
    if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
        return False
    takes_config = next(iter(inspect.signature(factory).parameters), None) == "config"
    return takes_config and isinstance(getattr(factory, "config_class", None), type)


def make_configured(factory: Any, args: Mapping[str, object], target: str) -> nn.Module:
    """The model of a class for which `is_configured`, with `args` as the fields of its config. Raises ModelError for a
    field that the config does not have, or that it refuses."""
    kind = factory.config_class
    known = _fields(kind)
    for name in args:
        if name not in known:
            guess = nearest(name, known)
            raise ModelError(
                f"{kind.__name__}, the config of {target}, has no field {name}",
                remedy=did_you_mean(f"model.args.{guess}" if guess else None) or f"it has {', '.join(sorted(known))}",
            )
    try:
        config = kind(**args)
    except Exception as error:
        given = ", ".join(f"{name} = {value!r}" for name, value in args.items())
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(
            f"{kind.__name__}({given}), the config of {target}, cannot be made: {lines[-1] if lines else error!r}",
            remedy="correct it: --set model.args.NAME=VALUE",
        ) from error
    try:
        model: nn.Module = factory(config)
    except SambasimError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model {target} cannot be built from this {kind.__name__}: {summary(error)}",
            where=user_line(error),
            remedy="give fields that fit together: --set model.args.NAME=VALUE",
        ) from error
    return model


def _fields(kind: Any) -> set[str]:
    """What a config class takes by keyword: its own fields, and other names of them."""
    taken = {
        name
        for owner in kind.__mro__
        if owner is not object and "__init__" in vars(owner)
        for name, one in inspect.signature(owner.__init__).parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    return (taken | set(getattr(kind, "attribute_map", {})) | _OF_EVERY_CONFIG) - {"self"}


def sample_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, a batch of one sample of the length, or with the pictures, that the config of `model` is for, and its
    labels: for a model on tensors without memory, for which no data source is named. Raises DataError if the model does
    not take such inputs."""
    config: Any = model.config
    taken = inspect.signature(model.forward).parameters
    name = type(model).__name__
    main = getattr(model, "main_input_name", None)
    if "labels" not in taken:
        raise DataError(
            f"{name} takes no labels, so it returns no loss, and no data source is named",
            remedy=f"name a class with a loss, such as {name.removesuffix('Model')}ForSequenceClassification, or data "
            f"and loss: {_GIVE_INPUTS} --set loss.name=cross_entropy",
        )
    of_classes = "Classification" in name and "Token" not in name
    # Not every config has the tokens that its model reads, and which they are changes no shape.
    for token, is_read in (("pad_token_id", of_classes), ("decoder_start_token_id", config.is_encoder_decoder)):
        if is_read and getattr(config, token, None) is None:
            setattr(config, token, 0)
    one_label = torch.zeros(1, dtype=torch.int64)
    if main == "input_ids":
        words = torch.zeros(1, text_length(config), dtype=torch.int64)
        return {main: words, "labels": one_label if of_classes else words.clone()}
    if main == "pixel_values" and of_classes and isinstance(size := getattr(config, "image_size", None), int):
        return {main: torch.zeros(1, getattr(config, "num_channels", 3), size, size), "labels": one_label}
    raise DataError(
        f"no data source is named, and the inputs of {name} do not follow from its config: it takes {main}",
        remedy=f"say what one sample is: {_GIVE_INPUTS}",
    )


def text_length(config: Any) -> int:
    """The most tokens that the model takes, rounded down to a power of two (positions may begin at 2), and at most
    LONGEST_TEXT."""
    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else _DEFAULT_TEXT
    return min(LONGEST_TEXT, 1 << (longest.bit_length() - 1))
