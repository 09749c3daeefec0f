"""From compile options to passes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from sambasim.compiler.passes import Fits, Partition, Pass, Place
from sambasim.compiler.pipeline.pipeline_parallel import PipelineParallel
from sambasim.compiler.recompute import Recompute
from sambasim.compiler.sharding.named_plan import tp_plan_of
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.compiler.update import AddDataParallel, AttachOptimizers, Update
from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.schedule import Schedule, make, read_csv
from sambasim.options.compile import CompileOptions
from sambasim.units import counted

_SLICED_GRADIENTS = 2
"""The level of ZeRO from which replicas keep gradients in slices."""


def pipeline(
    options: CompileOptions,
    updates: Sequence[Update] | None = None,
    model: nn.Module | None = None,
    tell: Callable[[str], None] = lambda notice: None,
    samples: int | None = None,
) -> Sequence[Pass]:
    """The passes that `options` ask for. `model` may have a plan for tensor parallelism; `tell` gets notices. Sections
    are cut for a pass of `samples`, by default those of the program."""
    budget = budget_of(load_device(options.arch), load_calibration(), options.num_tiles)
    passes: list[Pass] = [Partition(options.opt_level, budget, samples)]
    if options.recompute != "none" and not options.inference:
        sections = [Partition(options.opt_level, budget, samples)] if options.recompute == "sections" else []
        passes = [*sections, Recompute(options.recompute), *passes]
    if updates is None and options.optimizer is not None:
        updates = [Update(options.optimizer.name, options.optimizer.hyperparameters())]
    optimizers = None
    if updates and not options.inference:
        optimizers = AttachOptimizers(
            tuple(updates),
            options.stochastic_rounding,
            options.gradient_groups,
            scales_loss=options.dtype == "fp16",
            master_weights=options.keeps_master_weights,
        )
    if (schedule := schedule_of(options)) is not None:
        of_tied = optimizers if options.zero < _SLICED_GRADIENTS else None  # slices need no balance
        shards = options.world_size * options.chips if options.zero else 1
        passes.insert(0, PipelineParallel(schedule, budget, of_tied, shards, samples))
    if options.tensor_parallel == "weight":
        of_model = {} if model is None else tp_plan_of(model)
        passes.insert(0, TensorParallel(options.n_chips, options.tensor_plan or {}, of_model, tell))
    if optimizers is not None:
        passes.append(optimizers)
    if options.data_parallel or options.chips > 1:
        passes.append(AddDataParallel(options.world_size, options.chips, options.zero, several=options.data_parallel))
    return [*passes, Place(), Fits(budget)]


def schedule_of(options: CompileOptions) -> Schedule | None:
    """None without a pipeline. Raises OptionError for a schedule that cannot be."""
    ranks, micro_batches = options.pipeline_stages, options.micro_batches
    if ranks == 1:
        return None
    if not options.schedule.endswith(".csv"):
        return make(options.schedule, ranks, micro_batches)
    found = read_csv(Path(options.schedule))
    if (found.ranks, found.micro_batches) != (ranks, micro_batches):
        fitting = f"--pipeline-stages {found.ranks} --micro-batches {found.micro_batches}"
        raise OptionError(
            f"{options.schedule} has {counted(found.ranks, 'rank')} and {found.micro_batches} micro-batches, not "
            f"{ranks} and {micro_batches}",
            remedy=fitting if found.ranks > 1 else f"write a row for each of the {ranks} ranks",
        )
    return found
