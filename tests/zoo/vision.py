"""Models of torchvision and timm, with random weights and small pictures. `make zoo` installs the two."""

from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case, MakeBatch, by_name, integers, numbers

CLASSES = 4


@cache
def _torchvision() -> Any:
    """torchvision, also beside a build of torch that it was not compiled for: then its operators in C++ are missing,
    which no model here uses, and it needs two of them to be imported."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchvision: start it by `make zoo`")
    try:
        torch.ops.load_library(next(Path(spec.origin).parent.glob("_C*")))  # type: ignore[no-untyped-call]  # torch's
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return import_module("torchvision")


def _of_torchvision(path: str, config: dict[str, Any]) -> nn.Module:
    model: nn.Module = attrgetter(path)(_torchvision().models)(num_classes=CLASSES, **config)
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


_PLAIN = (
    "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "mobilenet_v2", "mobilenet_v3_small",
    "shufflenet_v2_x0_5", "squeezenet1_1", "efficientnet_b0", "mnasnet0_5", "regnet_y_400mf", "convnext_tiny", "swin_t",
    "swin_v2_t",
)  # fmt: skip
_OF_TIMM = (
    "resnet10t", "convnext_atto", "ghostnet_050", "repvgg_a0", "mobilevit_xxs", "edgenext_xx_small",
    "efficientnet_lite0",
)  # fmt: skip
_SIZED = ("vit_tiny_patch16_224", "mixer_s32_224", "xcit_nano_12_p16_224", "gmlp_ti16_224")

VISION = (
    *map(_classifier, _PLAIN),
    _classifier("googlenet", init_weights=False),
    _classifier("inception_v3", 96, init_weights=False, aux_logits=False),
    _classifier("VisionTransformer", 32, image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32,
                mlp_dim=64),
    _classifier("MaxVit", 64, input_size=(64, 64), stem_channels=16, partition_size=2, block_channels=[16, 32],
                block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.2),
    *map(_segmenter, ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large")),
    *map(_of_another, _OF_TIMM),
    *(_of_another(name, img_size=64) for name in _SIZED),
    _of_another("levit_128s", img_size=128, size=128),
)  # fmt: skip
