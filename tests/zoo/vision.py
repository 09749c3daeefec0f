"""Models of torchvision and timm, with random weights and small pictures. `make zoo` installs the two."""

from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models.case import Case, MakeBatch, by_name, integers, numbers

CLASSES = 4


@cache
def _torchvision() -> Any:
    """torchvision, also beside a build of torch that it was not compiled for: then its operators in C++ are missing,
    which no model here uses, and it needs two of them to be imported."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision: start it by `make zoo`")
    try:
        torch.ops.load_library(next(Path(spec.origin).parent.glob("_C*")))  # type: ignore[no-untyped-call]
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return import_module("torchvision")


def _of_torchvision(path: str, config: dict[str, Any]) -> nn.Module:
    made: Any = _torchvision().models
    for name in path.split("."):
        made = getattr(made, name)
    model: nn.Module = made(num_classes=CLASSES, **config)
    return model


def _of_timm(name: str, config: dict[str, Any]) -> nn.Module:
    _torchvision()  # which timm imports
    model: nn.Module = import_module("timm").create_model(name, num_classes=CLASSES, **config)
    return model


def _pictures(size: int, *of_pixels: int) -> MakeBatch:
    return by_name(x=numbers(3, size, size), target=integers(CLASSES, *of_pixels))


def _classifier(path: str, size: int = 64, **config: Any) -> Case:
    build, name = partial(_of_torchvision, path, config), path.rpartition(".")[2].lower()
    return Case(name, build, _pictures(size), "cross_entropy", package="torchvision")


def _segmenter(name: str, size: int = 64) -> Case:
    build = partial(_of_torchvision, f"segmentation.{name}", {"weights_backbone": None})
    return Case(name, build, _pictures(size, size, size), "cross_entropy", package="torchvision")


def _of_another(name: str, size: int = 64, **config: Any) -> Case:
    build = partial(_of_timm, name, config)
    return Case(f"timm_{name}", build, _pictures(size), "cross_entropy", package="timm")


VISION = (
    _classifier("resnet18"),
    _classifier("resnet50"),
    _classifier("resnext50_32x4d"),
    _classifier("densenet121"),
    _classifier("googlenet", init_weights=False),
    _classifier("inception_v3", 96, init_weights=False, aux_logits=False),
    _classifier("mobilenet_v2"),
    _classifier("mobilenet_v3_small"),
    _classifier("shufflenet_v2_x0_5"),
    _classifier("squeezenet1_1"),
    _classifier("efficientnet_b0"),
    _classifier("mnasnet0_5"),
    _classifier("regnet_y_400mf"),
    _classifier("convnext_tiny"),
    _classifier("swin_t"),
    _classifier("swin_v2_t"),
    _classifier("VisionTransformer", 32, image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32,
                mlp_dim=64),
    _classifier("MaxVit", 64, input_size=(64, 64), stem_channels=16, partition_size=2, block_channels=[16, 32],
                block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.2),
    _segmenter("lraspp_mobilenet_v3_large"),
    _segmenter("deeplabv3_mobilenet_v3_large"),
    _of_another("resnet10t"),
    _of_another("vit_tiny_patch16_224", img_size=64),
    _of_another("mixer_s32_224", img_size=64),
    _of_another("convnext_atto"),
    _of_another("ghostnet_050"),
    _of_another("repvgg_a0"),
    _of_another("levit_128s", img_size=128, size=128),
    _of_another("xcit_nano_12_p16_224", img_size=64),
    _of_another("gmlp_ti16_224", img_size=64),
    _of_another("mobilevit_xxs"),
    _of_another("edgenext_xx_small"),
    _of_another("efficientnet_lite0"),
)  # fmt: skip
