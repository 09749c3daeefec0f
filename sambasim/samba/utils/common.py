"""`common_app_driver`, which compiles or measures as the command line says, and the older `compile`."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.inputs import Inputs
from sambasim.samba.request import Optimizer
from sambasim.samba.session import session
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils.flags import MEASURE_PERFORMANCE, MEASURING
from sambasim.samba.utils.measuring import measure_performance, measure_sections
from sambasim.samba.utils.pef_utils import get_pefmeta


@checks_keywords
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

    No effect: init_output_grads, squeeze_bs_dim, get_output_grads.
    Raises what `session.compile`, `trace_graph` and the functions that measure raise.
    """
    if args.command == "compile":
        compile(args, model, inputs, None if args.inference else optim, name, app_dir)
    elif args.command in MEASURING:
        # With --inference too: of a training PEF only the forward runs.
        trace_graph(model, inputs, optim, pef=args.pef, mapping=args.mapping)
        measure = measure_performance if args.command == MEASURE_PERFORMANCE else measure_sections
        measure(
            model,
            inputs,
            args.batch_size,
            inference=args.inference,
            run_graph_only=args.run_graph_only,
            n_iterations=args.num_iterations,
            min_duration=args.min_duration,
            json=args.json,
            bench_report_json=args.bench_report_json,
            compiled_stats_json=args.compiled_stats_json,
            data_parallel=args.data_parallel,
            reduce_on_rdu=args.reduce_on_rdu,
        )


@checks_keywords
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
