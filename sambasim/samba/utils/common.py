"""Functions of `samba.utils`: ranks, seeds, weight normalization, and `common_app_driver`."""

import os
from argparse import Namespace
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sambasim.errors import ModelError, OptionError, UserError
from sambasim.runtime.machine.process import seed_everything
from sambasim.samba import process
from sambasim.samba.flags import MEASURE_PERFORMANCE, MEASURING
from sambasim.samba.inputs import Inputs
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error, type_error
from sambasim.samba.request import Optimizer
from sambasim.samba.session import session
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils.measuring import measure_performance, measure_sections
from sambasim.samba.utils.parser import get_pef_info, get_pefmeta, get_pefmeta_dict

__all__ = [
    "common_app_driver", "compile", "get_file_dir", "get_pef_info", "get_pefmeta", "get_pefmeta_dict", "get_rank",
    "get_world_size", "is_main_process", "set_seed", "weight_norm_",
]  # fmt: skip


def get_rank() -> int:
    """The rank of this process; 0 before the ranks are connected, and in a single process."""
    return process.current().rank


def get_world_size() -> int:
    """The number of ranks; 1 before they are connected, and in a single process."""
    communicator = process.current().communicator
    return 1 if communicator is None else communicator.world_size


def is_main_process() -> bool:
    """Whether this is rank 0, which prints and writes shared files."""
    return get_rank() == 0


def set_seed(seed: int) -> None:
    """Seeds torch, numpy and random on this rank. The same seed on all ranks makes the same weights. Raises UserError
    unless `seed` is a whole number of at least 0."""
    if not isinstance(seed, Integral) or seed < 0:
        raise app_error(UserError, f"a seed is a whole number of at least 0, not {seed!r}", "utils.set_seed(1)")
    seed_everything(int(seed))


def seed_from_environment() -> None:
    """`set_seed` with the environment variable SAMBA_SEED, if it is set. Raises OptionError for a bad value."""
    text = os.environ.get("SAMBA_SEED")
    if text and not text.isdecimal():
        what = f"SAMBA_SEED is {text!r} in the environment, and a seed is a whole number of at least 0"
        raise OptionError(what, remedy="export SAMBA_SEED=256, or unset SAMBA_SEED")
    if text:
        set_seed(int(text))


def get_file_dir(file: str | os.PathLike[str]) -> str:
    """The absolute path of the folder that `file` is in: `get_file_dir(__file__)`."""
    return str(Path(file).resolve().parent)


def weight_norm_(module: nn.Module) -> nn.Module:
    """Replaces each weight in `module` (a parameter `weight` of two dimensions or more), in place, by a trained
    magnitude for each output and a trained direction. Call it before the optimizer is made. Returns `module`. Source:
    Salimans & Kingma, Weight Normalization, NeurIPS 2016, arXiv:1602.07868. Raises ModelError if `module` is no module
    or has no weight, or if two modules in it share one."""
    if not isinstance(module, nn.Module):
        raise type_error(ModelError, "weight_norm_ takes a torch.nn.Module", module, "weight_norm_(model.layer)")
    owners: dict[Tensor, str] = {}
    for path, inner in module.named_modules():
        weight = inner._parameters.get("weight")
        if weight is not None and weight.dim() > 1 and owners.setdefault(weight, path) != path:
            what = f"{owners[weight]} and {path} share one weight, and normalized they would have two"
            raise app_error(ModelError, what, "call weight_norm_ on the parts of the model that share nothing")
    if not owners:
        what = f"{type(module).__name__} has no weight to normalize"
        raise app_error(ModelError, what, "give weight_norm_ a module with Linear or convolution layers, once")
    for path in owners.values():
        parametrizations.weight_norm(module.get_submodule(path))
    return module


_MEASURED_BY = (
    "inference", "run_graph_only", "min_duration", "json", "bench_report_json", "compiled_stats_json", "data_parallel",
    "reduce_on_rdu",
)  # fmt: skip


@checks_keywords()
def common_app_driver(
    args: Namespace,
    model: nn.Module,
    inputs: Inputs,
    optim: Optimizer | Sequence[Optimizer] | None = None,
    name: str | None = None,
    app_dir: str | Path | None = None,
    init_output_grads: bool = True,
    squeeze_bs_dim: bool = False,
    get_output_grads: bool = True,
) -> None:
    """Does `args.command` if it is compile, measure-performance or measure-sections; run and test are left to the app.
    No effect: init_output_grads, squeeze_bs_dim, get_output_grads."""
    if args.command == "compile":
        compile(args, model, inputs, None if args.inference else optim, name, app_dir)
    elif args.command in MEASURING:
        # With --inference too: of a training PEF only the forward runs.
        trace_graph(model, inputs, optim, pef=args.pef, mapping=args.mapping)
        measure = measure_performance if args.command == MEASURE_PERFORMANCE else measure_sections
        options = {name: getattr(args, name) for name in _MEASURED_BY}
        measure(model, inputs, args.batch_size, n_iterations=args.num_iterations, **options)


@checks_keywords()
def compile(
    args: Namespace,
    model: nn.Module,
    inputs: Inputs,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    name: str | None = None,
    app_dir: str | Path | None = None,
) -> str:
    """`session.compile` with the arguments of the command line. Returns the absolute path of the PEF."""
    metadata = get_pefmeta(args, model)
    return session.compile(model, inputs, optimizer, name, app_dir, config_dict=vars(args), pef_metadata=metadata)
