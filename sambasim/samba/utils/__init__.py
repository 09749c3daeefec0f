"""`samba.utils`: what apps use beside the session. The command line is in `argparser`, metadata in `pef_utils`."""

from sambasim.samba.absent import no_such_name
from sambasim.samba.closeness import assert_close
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils import argparser, benchmark_acc, checkpoint, dataset, numeric, pef_utils, tensorboard_debug
from sambasim.samba.utils.common import compile
from sambasim.samba.utils.folders import get_file_dir
from sambasim.samba.utils.measuring import measure_performance
from sambasim.samba.utils.ranks import get_rank, get_world_size, is_main_process
from sambasim.samba.utils.section_measuring import measure_sections
from sambasim.samba.utils.seeds import set_seed
from sambasim.samba.utils.vendor_calls import create_mac_resource_report, fix_rdu_affinity
from sambasim.samba.utils.weight_norm import weight_norm_

__all__ = [
    "argparser",
    "assert_close",
    "benchmark_acc",
    "checkpoint",
    "compile",
    "create_mac_resource_report",
    "dataset",
    "fix_rdu_affinity",
    "get_file_dir",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "measure_performance",
    "measure_sections",
    "numeric",
    "pef_utils",
    "set_seed",
    "tensorboard_debug",
    "trace_graph",
    "weight_norm_",
]


def __getattr__(name: str) -> object:
    raise no_such_name("samba.utils", name, __all__)
