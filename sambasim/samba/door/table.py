"""What `sambaflow` and the modules below it are here: one row a module.

A module that an app can import has a row; so has every package above it. Names inside a module need none: they are
whatever our module has.
"""

from collections.abc import Mapping

ROOT = "sambaflow"

_EMPTY = "sambasim.samba.door.outside.empty"

MODULES: Mapping[str, str] = {
    "sambaflow": "sambasim.samba.door.outside",
    "sambaflow.frameworks": _EMPTY,
    "sambaflow.frameworks.quantized": _EMPTY,
    "sambaflow.frameworks.quantized.quantized_linear": _EMPTY,
    "sambaflow.logging": "sambasim.samba.door.outside.logging",
    "sambaflow.logging.samba_logger": "sambasim.samba.door.outside.logging.samba_logger",
    "sambaflow.mac": "sambasim.samba.door.outside.mac",
    "sambaflow.mac.metadata": "sambasim.samba.door.outside.mac.metadata",
    "sambaflow.models": _EMPTY,
    "sambaflow.models.unet": _EMPTY,
    "sambaflow.online_inference_service": _EMPTY,
    "sambaflow.online_inference_service.sn_sqs_handler": _EMPTY,
    "sambaflow.samba": "sambasim.samba",
    "sambaflow.samba.directives": "sambasim.samba.directives",
    "sambaflow.samba.env": "sambasim.samba.env",
    "sambaflow.samba.experiment_logger": _EMPTY,
    "sambaflow.samba.functional": "sambasim.samba.functional",
    "sambaflow.samba.functional.stir": "sambasim.samba.stir",
    "sambaflow.samba.graph": _EMPTY,
    "sambaflow.samba.lazy_param": "sambasim.samba.lazy_param",
    "sambaflow.samba.materialize": "sambasim.samba.materialize",
    "sambaflow.samba.nn": "sambasim.samba.nn",
    "sambaflow.samba.nn.parameter": "sambasim.samba.nn.parameter",
    "sambaflow.samba.optim": "sambasim.samba.optim",
    "sambaflow.samba.profiler": "sambasim.samba.profiler",
    "sambaflow.samba.sambaloader": "sambasim.samba.sambaloader",
    "sambaflow.samba.sambatensor": "sambasim.samba.sambatensor",
    "sambaflow.samba.schema": "sambasim.samba.schema",
    "sambaflow.samba.schema.snconfig": "sambasim.samba.schema.snconfig",
    "sambaflow.samba.test": "sambasim.samba.test",
    "sambaflow.samba.utils": "sambasim.samba.utils",
    "sambaflow.samba.utils.argparser": "sambasim.samba.utils.argparser",
    "sambaflow.samba.utils.benchmark_acc": "sambasim.samba.utils.benchmark_acc",
    "sambaflow.samba.utils.checkpoint": "sambasim.samba.utils.checkpoint",
    "sambaflow.samba.utils.common": "sambasim.samba.utils.common",
    "sambaflow.samba.utils.dataset": "sambasim.samba.utils.dataset",
    "sambaflow.samba.utils.dataset.mnist": "sambasim.samba.utils.dataset.mnist",
    "sambaflow.samba.utils.numeric": "sambasim.samba.utils.numeric",
    "sambaflow.samba.utils.pef_utils": "sambasim.samba.utils.pef_utils",
    "sambaflow.samba.utils.tensorboard_debug": "sambasim.samba.utils.tensorboard_debug",
    "sambaflow.samba.utils.trainer": _EMPTY,
    "sambaflow.samba.utils.trainer.samba": _EMPTY,
    "sambaflow.samba.utils.trainer.torch": _EMPTY,
    "sambaflow.sambacollections": "sambasim.samba.door.outside.sambacollections",
}
"""By the name that an app imports: the module of ours that answers. `_EMPTY` has no names but those of ABSENT."""

_OWN_LOOP = "write the loop of session.run calls in the app, as examples/ does"
_METER = (
    "SambaFlow's logger of experiments",
    "keep the figures in the app, or samba.utils.benchmark_acc.AccuracyReport",
)
_TRAIN = ("a training loop of SambaFlow's own", _OWN_LOOP)
_RANDOM = ("draws random numbers for lazy parameters", "samba.materialize(model), which draws from torch's generator")

ABSENT: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "sambaflow.frameworks.quantized.quantized_linear": {
        "QuantizedLinear": ("a Linear layer with int8 weights", "torch.nn.Linear, in fp32, or in bf16 by --dtype bf16"),
    },
    "sambaflow.models.unet": {"UNet": ("a model of SambaFlow's own", "define the model in the app, with torch.nn")},
    "sambaflow.online_inference_service.sn_sqs_handler": {
        "Queue": ("a queue of SambaFlow's inference service", "queue.Queue, or one request after another"),
    },
    "sambaflow.samba": {
        "groupby": ("an operator of the RDU whose arguments are not public", "write it with torch operators"),
    },
    "sambaflow.samba.experiment_logger": dict.fromkeys(("AccMeter", "CountMeter", "DisplayMeter", "Logger"), _METER),
    "sambaflow.samba.graph": {
        "FwdGraph": ("one graph of a PEF of several", "compile a PEF for each graph: a PEF holds one graph here"),
    },
    "sambaflow.samba.lazy_param": dict.fromkeys(("RNGProvider", "RNGProviderFactory"), _RANDOM),
    "sambaflow.samba.utils": {
        "SNType": ("an enumeration of the RDU's number types", "dtypes of torch, and --dtype at the compile"),
        "trace_multigraph": (
            "loads a PEF of several graphs", "samba.utils.trace_graph for each model, with a PEF of its own",
        ),
    },
    "sambaflow.samba.utils.trainer.samba": {"train": _TRAIN},
    "sambaflow.samba.utils.trainer.torch": {"train": _TRAIN},
}  # fmt: skip
"""Names that apps import and sambasim does not have: what each is, and what to do instead. The import succeeds and the
use raises AbsentNameError."""


def children(package: str) -> tuple[str, ...]:
    """The last parts of the names of the modules directly below `package`, without those that have no names here."""
    below = [name.rpartition(".") for name, ours in MODULES.items() if ours != _EMPTY]
    return tuple(child for parent, _, child in below if parent == package)
