"""The examples of the product, compiled for tests: each captured once, then assembled with many optimizers."""

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sambasim.options.compile import CompileOptions, compile_options
from tests.support.compiled import compile_from_options
from tests.support.mpi import ROOT

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "digits": (),
    "logistic_regression": (),
    "char_gpt": (
        "model.args.layers=2", "model.args.width=32", "model.args.length=32", "data.args.length=32",
        "data.source=tests.support.text:text",
    ),
    "lstm_classifier": ("model.args.hidden=24",),
    "resnet": ("model.args.width=4", "loss.mean_over=elements"),
}  # fmt: skip
"""By name of the config: what makes the example small enough to be run many times."""

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01"),
    "adam": ("optimizer.name=adam", "optimizer.lr=0.003", "optimizer.weight_decay=0.01"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.003"),
}
_CLIPPING = {False: "optimizer.max_grad_norm=", True: "optimizer.max_grad_norm=0.05"}
ANY_OPTIMIZER = ("optimizer.momentum=", "optimizer.nesterov=", "optimizer.weight_decay=", "optimizer.lr=")
"""Takes away what a config says for its own optimizer."""

MICRO_BATCH, MICRO_BATCHES = 4, 4
ON_CHIPS = ("parallel.n_chips=2", 'parallel.tensor_parallel="weight"')
SEVERAL = ("parallel.data_parallel=true", "parallel.world_size=1")

VARIANTS = len(OPTIMIZERS) * len(_CLIPPING)
"""How many PEFs there are of each example."""


@dataclass(frozen=True, slots=True)
class CompiledExample:
    """One PEF of one example. `clipped` says whether it has a GRADNORM section."""

    example: str
    optimizer: str
    clipped: bool
    path: Path


def example_options(
    name: str, folder: Path, *overrides: str, data_parallel: bool = True, batch_size: int = 4
) -> CompileOptions:
    """The options of the small version of the example called `name`."""
    flags = {"output_folder": folder, "batch_size": batch_size, "data_parallel": data_parallel or None}
    return compile_options(ROOT / "configs" / f"{name}.toml", None, [*EXAMPLES[name], *overrides], flags)


def compiled(name: str, folder: Path, *overrides: str, batch_size: int = MICRO_BATCH) -> Path:
    """The PEF of an example with AdamW, of one micro-batch unless it says otherwise."""
    adamw = (*ANY_OPTIMIZER, *OPTIMIZERS["adamw"])
    return compile_from_options(example_options(name, folder, *adamw, *overrides, batch_size=batch_size)).path


def in_stages(name: str, folder: Path, *overrides: str, schedule: str = "1f1b") -> Path:
    settings = {"pipeline_stages": 2, "micro_batches": MICRO_BATCHES, "schedule": schedule}
    pipeline = [f"parallel.{name}={value}" for name, value in settings.items()]
    return compiled(name, folder, *pipeline, *overrides, batch_size=MICRO_BATCHES * MICRO_BATCH)


def shared_examples(folder: Path) -> list[CompiledExample]:
    """Every example with every optimizer, with and without clipping. The first process that asks compiles them."""
    folder.mkdir(exist_ok=True)
    examples = []
    for name, optimizer, clipped in product(EXAMPLES, OPTIMIZERS, _CLIPPING):
        pef = f"{name}-{optimizer}{'-clipped' * clipped}"
        examples.append(CompiledExample(name, optimizer, clipped, folder / pef / f"{pef}.pef"))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for one in examples:
                chosen = (*OPTIMIZERS[one.optimizer], _CLIPPING[one.clipped], f"compile.pef_name={one.path.stem}")
                compile_from_options(example_options(one.example, folder, *ANY_OPTIMIZER, *chosen), one.example)
            (folder / "complete").touch()
    return examples
