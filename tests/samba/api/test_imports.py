"""The import lines of public apps, as their authors typed them."""

import pytest

from sambasim.samba.absent import AbsentNameError

IMPORTS = """
from sambaflow import samba
import sambaflow; import sambaflow.samba as samba; sambaflow.samba.optim.SGD
import sambaflow.samba.utils as utils; utils.trace_graph, utils.assert_close
import sambaflow.samba.optim as optim; optim.AdamW
import sambaflow.samba.nn as nn; nn.Module, nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d, nn.ReLU(True)
from sambaflow.samba import SambaTensor, to_torch
from sambaflow.samba.sambatensor import SambaTensor, from_torch_tensor
from sambaflow.samba.sambaloader import SambaLoader
from sambaflow.samba.utils import assert_close, set_seed, trace_graph, get_rank, get_world_size, is_main_process
from sambaflow.samba.utils import SNType, trace_multigraph
from sambaflow.samba.utils.argparser import parse_app_args, parse_yaml_to_args, SambaConfig
from sambaflow.samba.utils.common import common_app_driver
from sambaflow.samba.utils.pef_utils import get_pefmeta, get_pefmeta_dict
from sambaflow.samba.utils.benchmark_acc import AccuracyReport
from sambaflow.samba.utils.dataset.mnist import dataset_transform
import sambaflow.samba.utils.dataset.mnist as mnist
from sambaflow.samba.utils.tensorboard_debug import dump_accuracy_debug_info
from sambaflow.samba.utils.numeric import MAX_BF16_TRUNCATE_NORMAL_REL
from sambaflow.samba.utils.checkpoint import load_sharded_checkpoint
from sambaflow.samba.utils.trainer.samba import train as samba_train
from sambaflow.samba.utils.trainer.torch import train as torch_train
from sambaflow.samba.env import use_mock_samba_runtime, enable_conv_grad_accum_stoc, disable_sgd_stoc
from sambaflow.samba.env import enable_addbias_grad_accum_stoc
from sambaflow.samba.test import TestWithGold, consistency_test
from sambaflow.samba.schema.snconfig import SNConfig
from sambaflow.samba.lazy_param import lazy_param, RNGProvider, RNGProviderFactory
from sambaflow.samba.materialize import materialize
from sambaflow.samba.nn.parameter import SambaParameter
from sambaflow.samba.directives import op_fusion, sdpa_directives
from sambaflow.samba.functional.stir import sn_imm, sn_iteridx, sn_select, sn_zipmapreduce
import sambaflow.samba.functional as F; F.relu, F.stir.sn_imm
from sambaflow.samba.graph import FwdGraph
from sambaflow.samba.profiler import Profiler
from sambaflow.samba.experiment_logger import AccMeter, DisplayMeter, CountMeter, Logger
from sambaflow.mac.metadata import ConvTilingMetadata, TilingMetadata
from sambaflow.models.unet import UNet
from sambaflow.frameworks.quantized.quantized_linear import QuantizedLinear
from sambaflow.online_inference_service.sn_sqs_handler import Queue
from sambaflow import __version__, is_demo
from sambaflow.sambacollections import OrderedSet
from sambaflow.logging import samba_logger
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_an_import_of_a_public_app_works(line: str) -> None:
    exec(line, {})


def test_a_name_that_is_only_imported_is_refused_when_it_is_called() -> None:
    names: dict[str, object] = {}
    exec("from sambaflow.samba.utils.trainer.samba import train as samba_train", names)
    with pytest.raises(
        AbsentNameError, match=r"^sambasim has no sambaflow\.samba\.utils\.trainer\.samba\.train: "
    ) as caught:
        names["samba_train"]("model")  # type: ignore[operator]
    assert str(caught.value.where).startswith(f"{__file__}:")
    assert caught.value.remedy is not None
    assert "session.run" in caught.value.remedy
