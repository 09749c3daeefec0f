"""`sambasim estimate-memory`: the memory of one rank, before any weights are made."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sambasim.cli import shared
from sambasim.cli.terminal import phases, show
from sambasim.options.flags import LARGEST_COUNT, MOST_REPLICAS

if TYPE_CHECKING:
    from sambasim.options.compile import CompileOptions
    from sambasim.simulation.memory_choices import Choice

_DEFAULT_OPTIMIZER = "adamw"


@click.command("estimate-memory")
@click.argument("subject", metavar="MODEL|CONFIG")
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="Set any field of the config.")
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1, LARGEST_COUNT),
    help="Samples of a pass.  [default: as configured, or 1]",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, MOST_REPLICAS),
    default=8,
    show_default=True,
    help="Replicas over which ZeRO cuts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line, in bytes.")
def estimate_memory_command(
    subject: str, overrides: tuple[str, ...], batch_size: int | None, replicas: int, as_json: bool
) -> None:
    """Estimate the memory of one rank of a training step, by part.

    The first line is the total for the dtype, optimizer, ZeRO and recomputation asked for: as configured, else fp32,
    AdamW, ZeRO 1 and none. Tables show what others would need. No weights are made: MODEL can have any size.

    A class of the package transformers is made from its config, whose fields are model.args. If no data source is
    named, a sample has the length that the config is for, up to 2,048 tokens, or its image size.

    \b
    Examples:
      sambasim estimate-memory transformers:GPT2LMHeadModel
      sambasim estimate-memory transformers:GPT2LMHeadModel --set model.args.n_layer=4 -b 8 --replicas 16
      sambasim estimate-memory transformers:LlamaForCausalLM --set compile.dtype=bf16 --set parallel.zero=3
      sambasim estimate-memory configs/char_gpt.toml --set parallel.recompute=full --json
    """
    options = _options(subject, overrides, batch_size)

    with shared.kept_imports():
        from sambasim.commands.fewer_layers import training_shapes
        from sambasim.report.memory import memory_json, memory_report
        from sambasim.simulation.memory_choices import Choices

    with phases(quiet=as_json) as report:
        shapes = training_shapes(options, report)
    passes = options.training.accumulation_steps
    choices = Choices(shapes.program, shapes.graphs, shapes.dtype, replicas=replicas, passes=passes)
    asked = _asked(options)
    if as_json:
        print(memory_json(choices, asked))
    else:
        show(*memory_report(choices, asked))


def _options(subject: str, overrides: tuple[str, ...], batch_size: int | None) -> "CompileOptions":
    """Raises OptionError for what is neither a model nor a config, for inference, and for a replica of several
    ranks."""
    from sambasim.cli.prediction import is_model, refuse_script
    from sambasim.errors import OptionError
    from sambasim.options.compile import compile_options
    from sambasim.options.load import read_toml

    refuse_script(subject)
    if not is_model(subject):
        raise OptionError(
            f"{subject} is neither a model nor a config",
            remedy=f"file.py:NAME, module:NAME or FILE.toml; for a PEF: sambasim inspect {subject}",
        )
    config, target = (Path(subject), None) if subject.endswith(".toml") else (None, subject)
    flags: dict[str, object] = {"batch_size": batch_size}
    in_config = config is not None and "optimizer" in read_toml(config)
    if not in_config and not any(one.startswith("optimizer.name") for one in overrides):
        flags["optimizer"] = _DEFAULT_OPTIMIZER
    if compile_options(config, target, [*overrides, "parallel.zero=1"], flags).inference:
        raise OptionError(
            "the estimate is for training, and compile.inference is true", remedy="--set compile.inference=false"
        )
    options = compile_options(config, target, overrides, {**flags, "data_parallel": True})
    if options.n_chips > 1 or options.pipeline_stages > 1:
        field = "n_chips" if options.n_chips > 1 else "pipeline_stages"
        fitting = "--set parallel.n_chips=1 --set parallel.tensor_parallel=" if field == "n_chips" else None
        raise OptionError(
            f"parallel.{field} = {getattr(options, field)}: the estimate is for a replica of one rank",
            remedy=fitting or "--set parallel.pipeline_stages=1 --set parallel.micro_batches=1",
        )
    return options


def _asked(options: "CompileOptions") -> "Choice":
    from sambasim.optimizers import OPTIMIZERS
    from sambasim.simulation.memory_choices import DTYPES, RECOMPUTATIONS, Choice

    kept = options.keeps_master_weights
    dtype = next(one for one in DTYPES if (one.name, one.master) == (options.dtype, kept))
    (recompute,) = (one for one in RECOMPUTATIONS if one == options.recompute)
    optimizer = options.optimizer
    name = _DEFAULT_OPTIMIZER if optimizer is None else optimizer.name
    states = OPTIMIZERS[name].kept_states({} if optimizer is None else optimizer.hyperparameters())
    return Choice(dtype, recompute, name, states, options.zero)
