"""What `sambasim compile` says at the end."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEAST_SHARE = 0.01
"""Phases below this share of the time are told together."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """What was compiled, where it is, notices for the user, and seconds by phase."""

    program: Program
    path: Path
    digest: str
    notices: Sequence[str]
    phases_s: Mapping[str, float]


def section_counts(graph: Graph) -> Mapping[str, int]:
    """How many sections of each kind, in the order of execution."""
    return Counter(section.kind.value for section in graph.sections)


def next_command(program: Program, path: Path) -> str:
    """The command line that runs the PEF."""
    if program.training is None:
        return f"sambasim run --inference --pef {path}"
    if program.data_parallel is None:
        return f"sambasim run --pef {path}"
    return f"mpirun -np {max(program.world_size, 2)} sambasim run --reduce-on-rdu --pef {path}"


def compiled_json(compilation: Compilation) -> str:
    """One JSON line: counts, sizes, seconds by phase, and what to type next."""
    program, path = compilation.program, compilation.path
    graph = program.training or program.evaluation
    facts = {
        "pef": str(path),
        "digest": compilation.digest,
        "sections": section_counts(graph),
        "operators": len(graph.nodes),
        "parameters": _parameters(program),
        "gradient_groups": len(program.data_parallel.gradient_groups) if program.data_parallel else 0,
        "gradient_bytes": program.gradient_bytes,
        "device_bytes": program.device_bytes,
        "pef_bytes": path.stat().st_size,
        "world_size": program.world_size,
        "phases_s": compilation.phases_s,
        "notices": list(compilation.notices),
        "next": next_command(program, path),
    }
    return json.dumps(facts)


def compiled_report(compilation: Compilation) -> "list[RenderableType]":
    """The table for people, then the notices, the file, and what to type next."""
    from rich.table import Table

    program, path = compilation.program, compilation.path
    graph = program.training or program.evaluation
    sections = ", ".join(f"{count} {kind}" for kind, count in section_counts(graph).items())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", program.name)
    table.add_row("sections", f"{len(graph.sections)}: {sections}")
    table.add_row("operators", str(len(graph.nodes)))
    table.add_row("parameters", f"{_parameters(program):,}")
    if program.data_parallel:
        groups = len(program.data_parallel.gradient_groups)
        table.add_row("gradient groups", f"{groups}, {format_bytes(program.gradient_bytes)} to reduce each step")
        table.add_row("replicas", f"at least {program.world_size}")
    table.add_row("device memory", f"{format_bytes(program.device_bytes)} a replica")
    table.add_row("file size", format_bytes(path.stat().st_size))
    table.add_row("time", "\n".join(_phases(compilation.phases_s)))
    return [
        table,
        f"digest           {compilation.digest}",
        *(f"notice: {notice}" for notice in compilation.notices),
        f"PEF file {path.absolute()} created",
        "Compilation succeeded",
        f"next: {next_command(program, path)}",
    ]


def _phases(phases_s: Mapping[str, float]) -> list[str]:
    """The whole time, then the phases that matter, then what the others took together."""
    total_s = sum(phases_s.values())
    long = {name: time_s for name, time_s in phases_s.items() if time_s >= _LEAST_SHARE * total_s}
    lines = [f"{format_seconds(total_s)} (measured)"]
    lines += [f"  {format_seconds(time_s):>8}  {name}" for name, time_s in long.items()]
    if len(long) < len(phases_s):
        lines.append(f"  {format_seconds(total_s - sum(long.values())):>8}  the other phases")
    return lines


def _parameters(program: Program) -> int:
    return sum(s.type.numel for s in program.symbols.values() if s.kind is SymbolKind.PARAMETER)
