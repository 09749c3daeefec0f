"""The output of `sambasim estimate-memory`: the memory of one rank, and what each change of dtype, recomputation,
optimizer and ZeRO would make of it. Everything is an estimate."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

from rich.console import RenderableType
from rich.text import Text

from sambasim.ir.types import SymbolKind
from sambasim.report.tables import json_line, labelled, table
from sambasim.simulation.memory import Choice, Choices, by_dtype, by_optimizer, by_zero, in_dtype
from sambasim.units import counted, format_bytes, format_count

_CHANGED, _KEPT = "memory_bytes:total, change", "parameters_bytes, gradients_bytes, states_bytes"
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
    tables, fields = {"dtype": by_dtype, "optimizer": by_optimizer, "zero": by_zero}, partial(_fields, choices)
    record = {
        "name": choices.program.name,
        "parameters": choices.program.parameter_count,
        "inputs": _inputs(choices, asked),
        "batch_size": choices.program.batch_size,
        **{"replicas": choices.replicas, "passes_per_step": choices.passes, "captured_in": choices.dtype},
        **{"asked": fields(asked), "least": fields(choices.least(asked))},
        **{f"by_{what}": list(map(fields, by(asked))) for what, by in tables.items()},
        "left_out": LEFT_OUT,
    }
    return json_line(record)


def _fields(choices: Choices, choice: Choice) -> dict[str, object]:
    memory = choices.estimate(choice)
    how = {"dtype": choice.dtype.name, "master_weights": choice.dtype.master, "recompute": choice.recompute}
    states = {"optimizer": choice.optimizer, "states_per_parameter": len(choice.states), "zero": choice.zero}
    return {**how, **states, **memory.sizes}


def memory_report(choices: Choices, asked: Choice) -> list[RenderableType]:
    now, least = choices.estimate(asked), choices.least(asked)
    sizes, replicas = asdict(now), counted(choices.replicas, "replica")
    largest = max(sizes, key=lambda part: sizes[part])
    head = f"{format_bytes(now.total_bytes)} a rank, estimated: {_in_words(asked)}, {replicas}"
    facts = [
        ("model", f"{choices.program.name}: {format_count(choices.program.parameter_count)} parameters"),
        ("one pass", f"batch {choices.program.batch_size}: {', '.join(_inputs(choices, asked))}"),
        ("most of it", f"{largest}, {format_bytes(sizes[largest])} ({sizes[largest] / now.total_bytes:.0%})"),
        ("least", f"{format_bytes(choices.estimate(least).total_bytes)} with the same optimizer: {_in_words(least)}"),
    ]

    def row(choice: Choice) -> Mapping[str, object]:
        change = f"{choices.estimate(choice).total_bytes / now.total_bytes - 1:+.0%}"
        change = "as asked" if choice == asked else change
        changed = {"dtype": choice.dtype.title, "sliced": _SLICED[choice.zero], "change": change}
        return _fields(choices, choice) | changed

    dtypes, optimizers, levels = (list(map(row, by(asked))) for by in (by_dtype, by_optimizer, by_zero))
    parts = f"{_CHANGED}, {_KEPT}, activations_bytes, temporaries_bytes, buffers_bytes"
    notes = [f"a sum of the peaks of its parts, without: {'; '.join(LEFT_OUT)}"]
    if choices.passes > 1:
        notes.append(f"with {choices.passes} passes in a step, gradients stay whole until the last, with any ZeRO")
    if choices.dtype == "float32":
        notes.append(
            "the model cannot be captured in bfloat16: what it computes in float32 all the same counts as 16 bits"
        )
    return [
        Text(f"{head}\n", style="bold"),
        labelled(facts),
        Text(),
        table("dtype and recomputation", dtypes, "dtype, recompute", parts),
        table("optimizer", optimizers, "optimizer", f"states_per_parameter, {_CHANGED}, states_bytes"),
        table(f"ZeRO, {replicas}", levels, "zero:ZeRO, sliced:in slices", f"{_CHANGED}, {_KEPT}, buffers_bytes"),
        *map(Text, notes),
    ]


def _in_words(choice: Choice) -> str:
    recompute = "no recomputation" if choice.recompute == "none" else f"recompute {choice.recompute}"
    return f"{choice.dtype.title}, {choice.optimizer}, ZeRO {choice.zero}, {recompute}"


def _inputs(choices: Choices, asked: Choice) -> list[str]:
    inputs = (symbol for symbol in choices.program.symbols.values() if symbol.kind is SymbolKind.INPUT)
    return [f"{symbol.name} {in_dtype(symbol.type, choices.dtype, asked.dtype.stored)}" for symbol in inputs]
