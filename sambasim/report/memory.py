"""The output of `sambasim estimate-memory`: the memory of one rank, and what each change of dtype, recomputation,
optimizer and ZeRO would make of it. Everything is an estimate."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sambasim.ir.types import SymbolKind
from sambasim.report.output import add_row, json_line, labelled, plain_table
from sambasim.simulation.memory_choices import Choice, Choices, Estimate, in_dtype
from sambasim.units import counted, format_bytes, format_count

_PARTS = ("parameters", "gradients", "states", "activations", "temporaries", "buffers")
_SLICED = ("nothing", "states", "states, gradients", "states, gradients, parameters")

LEFT_OUT = (
    "workspaces inside operators, such as those of convolutions and matrix products",
    "fragmentation and caches of an allocator",
    "buffers of communication, but for the reduce operand and groups that ZeRO 2 and 3 have whole for a while",
    "the framework, its kernels and the process",
    "float32 copies that compile --dtype bf16 and fp16 keep for losses and sums, which PyTorch does not",
)


def memory_json(choices: Choices, asked: Choice) -> str:
    """One line. Sizes are of one rank."""
    record = {
        "name": choices.program.name,
        "parameters": _parameters(choices),
        "inputs": _inputs(choices, asked),
        "batch_size": choices.program.batch_size,
        "replicas": choices.replicas,
        "passes_per_step": choices.passes,
        "captured_in": choices.dtype,
        "asked": _fields(choices.estimate(asked)),
        "least": _fields(choices.least(asked)),
        "by_dtype": [_fields(one) for one in choices.by_dtype(asked)],
        "by_optimizer": [_fields(one) for one in choices.by_optimizer(asked)],
        "by_zero": [_fields(one) for one in choices.by_zero(asked)],
        "left_out": LEFT_OUT,
    }
    return json_line(record)


def _fields(one: Estimate) -> dict[str, object]:
    choice = one.choice
    return {
        "dtype": choice.dtype.name,
        "master_weights": choice.dtype.master,
        "recompute": choice.recompute,
        "optimizer": choice.optimizer,
        "states_per_parameter": len(choice.states),
        "zero": choice.zero,
        "total_bytes": one.total_bytes,
        **{f"{part}_bytes": size for part, size in _sizes(one).items()},
    }


def memory_report(choices: Choices, asked: Choice) -> list[RenderableType]:
    now, least = choices.estimate(asked), choices.least(asked)
    sizes = _sizes(now)
    largest = max(sizes, key=lambda part: sizes[part])
    head = f"{format_bytes(now.total_bytes)} a rank, estimated: {_in_words(now)}, {_replicas(choices)}"
    rows = [
        ("model", f"{choices.program.name}: {format_count(_parameters(choices))} parameters"),
        ("one pass", f"batch {choices.program.batch_size}: {', '.join(_inputs(choices, asked))}"),
        ("most of it", f"{largest}, {format_bytes(sizes[largest])} ({sizes[largest] / now.total_bytes:.0%})"),
        ("least", f"{format_bytes(least.total_bytes)} with the same optimizer: {_in_words(least)}"),
    ]
    dtypes = plain_table("dtype and recomputation", ["dtype", "recompute"], ["total", "change", *_PARTS])
    for one in choices.by_dtype(asked):
        _add(dtypes, one, now, [one.choice.dtype.title, one.choice.recompute], _PARTS)
    optimizers = plain_table("optimizer", ["optimizer"], ["states per parameter", "total", "change", "states"])
    for one in choices.by_optimizer(asked):
        count = str(len(one.choice.states))
        _add(optimizers, one, now, [one.choice.optimizer, count], ("states",))
    levels = plain_table(
        f"ZeRO, {_replicas(choices)}", ["ZeRO", "in slices"], ["total", "change", *_PARTS[:3], "buffers"]
    )
    for one in choices.by_zero(asked):
        _add(levels, one, now, [str(one.choice.zero), _SLICED[one.choice.zero]], (*_PARTS[:3], "buffers"))
    left_out = f"a sum of the peaks of its parts, without: {'; '.join(LEFT_OUT)}"
    return [
        Text(f"{head}\n", style="bold"),
        labelled(rows),
        Text(),
        dtypes,
        optimizers,
        levels,
        Text(left_out),
        *_notes(choices),
    ]


def _notes(choices: Choices) -> list[RenderableType]:
    notes = []
    if choices.passes > 1:
        notes.append(f"with {choices.passes} passes in a step, gradients stay whole until the last, with any ZeRO")
    if choices.dtype == "float32":
        notes.append(
            "the model cannot be captured in bfloat16: what it computes in float32 all the same counts as 16 bits"
        )
    return [Text(one) for one in notes]


def _add(table: Table, one: Estimate, now: Estimate, words: Sequence[str], parts: Sequence[str]) -> None:
    sizes = _sizes(one)
    is_asked = one.choice == now.choice
    change = "as asked" if is_asked else f"{one.total_bytes / now.total_bytes - 1:+.0%}"
    add_row(table, *words, format_bytes(one.total_bytes), change, *(format_bytes(sizes[part]) for part in parts))


def _sizes(one: Estimate) -> dict[str, int]:
    sizes = {**asdict(one.memory), "temporaries": one.temporaries}
    return {part: sizes[part] for part in _PARTS}


def _in_words(one: Estimate) -> str:
    choice = one.choice
    recompute = "no recomputation" if choice.recompute == "none" else f"recompute {choice.recompute}"
    return f"{choice.dtype.title}, {choice.optimizer}, ZeRO {choice.zero}, {recompute}"


def _replicas(choices: Choices) -> str:
    return counted(choices.replicas, "replica")


def _parameters(choices: Choices) -> int:
    symbols = choices.program.symbols.values()
    return sum(one.type.numel for one in symbols if one.kind is SymbolKind.PARAMETER)


def _inputs(choices: Choices, asked: Choice) -> list[str]:
    inputs = (one for one in choices.program.symbols.values() if one.kind is SymbolKind.INPUT)
    return [f"{one.name} {in_dtype(one.type, choices.dtype, asked.dtype.stored)}" for one in inputs]
