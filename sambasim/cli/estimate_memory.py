"""`sambasim estimate-memory`: the memory of one rank, before any weights are made."""

import click

from sambasim.bounded import LARGEST_COUNT, MOST_REPLICAS
from sambasim.cli import shared
from sambasim.terminal.output import phases, show


@click.command("estimate-memory")
@click.argument("subject", metavar="MODEL|CONFIG")
@shared.overrides("Set any field of the config.")
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
    from sambasim.commands.subject import options_of_estimate
    from sambasim.report.memory import memory_json, memory_report

    options = options_of_estimate(subject, overrides, batch_size)
    with shared.kept_imports():
        from sambasim.commands.memory import memory_choices

    with phases(quiet=as_json) as on_phase:
        choices, asked = memory_choices(options, replicas, on_phase)
    if as_json:
        print(memory_json(choices, asked))
    else:
        show(*memory_report(choices, asked))
