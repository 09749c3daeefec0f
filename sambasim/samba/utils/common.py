"""`common_app_driver`: what every app does alike, so that the app need not."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from sambasim.errors import OptionError
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.request import Inputs, Optimizer
from sambasim.samba.session import session
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils.flag import MEASURE_PERFORMANCE, MEASURING
from sambasim.samba.utils.measuring import measure_performance
from sambasim.samba.utils.pef_utils import get_pefmeta
from sambasim.samba.utils.section_measuring import measure_sections


@checks_keywords
def common_app_driver(
    args: Namespace,
    model: nn.Module,
    inputs: Inputs,
    optim: Optimizer | Sequence[Optimizer] | None = None,
    name: str | None = None,
    app_dir: str | Path | None = None,
    **others: object,
) -> None:
    """Do what `args.command` asks for, if that is compile, measure-performance or measure-sections. Other keywords of
    the vendor change nothing.

    Raises OptionError for another command, which is for the app itself to do; KeywordError for a keyword that is
    nearly one of these.
    """
    if args.command == "compile":
        config, metadata = vars(args), get_pefmeta(args, model)
        optimizers = None if args.inference else optim
        session.compile(model, inputs, optimizers, name, app_dir, config_dict=config, pef_metadata=metadata)
    elif args.command in MEASURING:
        # With --inference too: a training PEF is the same graph then, of which the forward alone runs.
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
    else:
        raise OptionError(
            f"common_app_driver does not do {args.command}",
            remedy="do it in the app; common_app_driver is for compile and for measuring",
        )
