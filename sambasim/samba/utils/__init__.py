"""`samba.utils`: the command line (`argparser`), measuring, checkpoints, and helpers."""

from sambasim.samba.notices import create_mac_resource_report, fix_rdu_affinity
from sambasim.samba.test import assert_close
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils import argparser, checkpoint
from sambasim.samba.utils.common import (
    compile,
    get_file_dir,
    get_rank,
    get_world_size,
    is_main_process,
    set_seed,
    weight_norm_,
)
from sambasim.samba.utils.measuring import measure_performance, measure_sections

__all__ = [
    "argparser", "assert_close", "checkpoint", "compile", "create_mac_resource_report", "fix_rdu_affinity",
    "get_file_dir", "get_rank", "get_world_size", "is_main_process", "measure_performance", "measure_sections",
    "set_seed", "trace_graph", "weight_norm_",
]  # fmt: skip
