"""PEFs of examples for tests of parallelism: each model is captured once, and then compiled in many ways."""

from functools import cache
from pathlib import Path

from torch import nn

from sambasim.compiler.build import Built
from sambasim.compiler.compile import Stopwatch, assemble, capture_model
from sambasim.compiler.front import build_model, example_batch
from tests.support.examples import example_options

MICRO_BATCH, MICRO_BATCHES = 4, 4
EXAMPLES = {
    "char_gpt": ("optimizer.name=adamw",),
    "resnet": ("optimizer.name=adamw", "optimizer.momentum=", "optimizer.nesterov=", "optimizer.lr=0.003"),
}


@cache
def captured(example: str) -> tuple[Built, nn.Module]:
    """Of one micro-batch: what one rank accumulates over, and what goes through a pipeline."""
    options = example_options(example, Path(), *EXAMPLES[example])
    model = build_model(options)
    inputs, by_keyword, _ = example_batch(model, options)
    watch = Stopwatch(lambda phase: None)
    return capture_model(model, inputs, options, by_keyword=by_keyword, watch=watch), model


def compiled(example: str, folder: Path, *overrides: str, batch_size: int = MICRO_BATCH) -> Path:
    options = example_options(example, folder, *EXAMPLES[example], *overrides)
    training = options.training.model_copy(update={"batch_size": batch_size})
    options = options.model_copy(update={"training": training})
    return assemble(*captured(example), options, Stopwatch(lambda phase: None)).path


def in_stages(example: str, folder: Path, *cut: str, stages: int = 2, schedule: str = "1f1b") -> Path:
    pipeline = (f"parallel.pipeline_stages={stages}", f"parallel.micro_batches={MICRO_BATCHES}")
    batch_size = MICRO_BATCHES * MICRO_BATCH
    return compiled(example, folder, *pipeline, f'parallel.schedule="{schedule}"', *cut, batch_size=batch_size)
