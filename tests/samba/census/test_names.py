"""The import spellings of the census. Each is executed as it is typed."""

import pytest

from tests.samba.census.support import imported, refused

IMPORTS = [
    "from sambaflow import samba; samba.session",
    "import sambaflow.samba as samba; samba.session",
    "import sambaflow; import sambaflow.samba as samba; sambaflow.samba.optim.SGD",
    "import sambaflow.samba.utils as utils; utils.trace_graph",
    "import sambaflow.samba.utils as sn_utils; sn_utils.assert_close",
    "import sambaflow.samba.utils as samba_utils; samba_utils.set_seed(0)",
    "from sambaflow import samba; samba.utils.trace_graph; samba.utils.assert_close",
    "import sambaflow.samba.optim as optim; optim.AdamW",
    "import sambaflow.samba.nn as nn; nn.Module, nn.Sequential(nn.Conv2d(1, 1, 3), nn.ConvTranspose2d(1, 1, 2))",
    "import sambaflow.samba.nn as sn; sn.BatchNorm2d(1), sn.MaxPool2d(2), sn.ReLU(inplace=True)",
    "from sambaflow.samba import SambaTensor, to_torch",
    "from sambaflow.samba.sambatensor import SambaTensor, from_torch_tensor",
    "from sambaflow.samba.sambaloader import SambaLoader",
    "from sambaflow.samba.utils import assert_close, set_seed, trace_graph, get_rank, get_world_size, is_main_process",
    "from sambaflow.samba.utils import SNType, trace_multigraph",
    "from sambaflow.samba.utils.argparser import parse_app_args, parse_yaml_to_args, SambaConfig",
    "from sambaflow.samba.utils.common import common_app_driver",
    "from sambaflow.samba.utils.pef_utils import get_pefmeta, get_pefmeta_dict",
    "from sambaflow.samba.utils.benchmark_acc import AccuracyReport",
    "from sambaflow.samba.utils.dataset.mnist import dataset_transform",
    "import sambaflow.samba.utils.dataset.mnist as mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.dataset import mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.tensorboard_debug import dump_accuracy_debug_info",
    "from sambaflow.samba.utils.numeric import MAX_BF16_TRUNCATE_NORMAL_REL; assert MAX_BF16_TRUNCATE_NORMAL_REL > 0",
    "from sambaflow.samba.utils.checkpoint import load_sharded_checkpoint",
    "import sambaflow.samba.utils as utils; utils.checkpoint.save_tensors",
    "from sambaflow.samba.utils.trainer.samba import train as samba_train",
    "from sambaflow.samba.utils.trainer.torch import train as torch_train",
    "from sambaflow.samba.env import use_mock_samba_runtime; assert use_mock_samba_runtime() is False",
    "from sambaflow.samba.env import enable_conv_grad_accum_stoc, enable_addbias_grad_accum_stoc, disable_sgd_stoc",
    "from sambaflow.samba.test import TestWithGold, consistency_test",
    "from sambaflow.samba.schema.snconfig import SNConfig",
    "from sambaflow.samba.lazy_param import lazy_param, RNGProvider, RNGProviderFactory",
    "from sambaflow.samba.materialize import materialize",
    "from sambaflow.samba.nn.parameter import SambaParameter",
    "from sambaflow.samba.directives import op_fusion, sdpa_directives",
    "from sambaflow.samba.functional.stir import sn_imm, sn_iteridx, sn_select, sn_zipmapreduce",
    "from sambaflow.samba.graph import FwdGraph",
    "from sambaflow.samba.profiler import Profiler",
    "from sambaflow.samba.experiment_logger import AccMeter, DisplayMeter, CountMeter, Logger",
    "from sambaflow.mac.metadata import ConvTilingMetadata, TilingMetadata",
    "from sambaflow.models.unet import UNet",
    "from sambaflow.frameworks.quantized.quantized_linear import QuantizedLinear",
    "from sambaflow.online_inference_service.sn_sqs_handler import Queue",
    "from sambaflow import __version__, is_demo; assert __version__[0].isdigit()",
    "from sambaflow.sambacollections import OrderedSet",
    "from sambaflow.logging import samba_logger; samba_logger.info('ready')",
]


@pytest.mark.parametrize("spelling", IMPORTS)
def test_an_import_is_executed_as_it_is_typed(spelling: str) -> None:
    exec(spelling, {})


def test_imports_in_try_except_pass() -> None:
    names: dict[str, object] = {}
    exec("try:\n    from sambaflow import samba\n    from sambaflow.samba.nothing import it\nexcept:\n    pass", names)
    assert "samba" in names
    assert "it" not in names


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("samba.graph", "FwdGraph"),
        ("samba.utils", "trace_multigraph"),
        ("samba.utils.trainer.samba", "train"),
        ("samba.utils.trainer.torch", "train"),
        ("samba.lazy_param", "RNGProvider"),
        ("samba.lazy_param", "RNGProviderFactory"),
        ("samba.experiment_logger", "AccMeter"),
        ("samba.experiment_logger", "DisplayMeter"),
        ("samba.experiment_logger", "CountMeter"),
        ("samba.experiment_logger", "Logger"),
        ("models.unet", "UNet"),
        ("frameworks.quantized.quantized_linear", "QuantizedLinear"),
        ("online_inference_service.sn_sqs_handler", "Queue"),
    ],
)
def test_what_is_absent_says_so_at_its_first_use(module: str, name: str) -> None:
    absent = getattr(imported(module), name)
    with refused(f"sambaflow.{module}.{name}"):
        absent(1, size=2)


def test_an_absent_enumeration_says_so_at_its_first_use() -> None:
    with refused("sambaflow.samba.utils.SNType"):
        imported("samba.utils").SNType.BF16  # noqa: B018  # reading it is the use
