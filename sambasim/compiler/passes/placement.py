"""Give every symbol its home: the byte address in the device memory of one replica.

Each group's flat tensors come first (parameters, gradients, each state of the optimizer), then buffers, constants,
frozen and unused parameters, inputs, and at the end the reduce operand buffer. Outputs and the tangent have no home:
they are handed out and in.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import ALIGNMENT_BYTES, DTYPE_BYTES, SymbolKind, align
from sambasim.ir.verify import Stage, state_name

_HANDED_OUT = (SymbolKind.OUTPUT, SymbolKind.TANGENT)


@dataclass(frozen=True, slots=True)
class Place:
    """Place everything, one after the other."""

    title: ClassVar[str] = "place symbols in device memory"
    reaches: ClassVar[Stage] = Stage.PLACED

    def __call__(self, program: Program) -> Program:
        address = _Address()
        offsets: dict[str, int] = {}
        groups = tuple(self._place_group(group, program, address, offsets) for group in program.groups)
        if program.data_parallel:
            for gradient_group, group in zip(program.data_parallel.gradient_groups, groups, strict=True):
                offsets[gradient_group.symbol] = group.regions["gradient"]
        last = [s for s in program.symbols.values() if s.kind is SymbolKind.REDUCE_BUFFER]
        rest = [s for s in program.symbols.values() if s.kind not in (*_HANDED_OUT, SymbolKind.REDUCE_BUFFER)]
        for symbol in (*rest, *last):
            if symbol.name not in offsets:
                offsets[symbol.name] = address.take(symbol.type.size_bytes)
        symbols = {name: replace(symbol, offset=offsets.get(name)) for name, symbol in program.symbols.items()}
        return replace(program, symbols=symbols, groups=groups, device_bytes=address.next)

    def _place_group(
        self, group: ParameterGroup, program: Program, address: "_Address", offsets: dict[str, int]
    ) -> ParameterGroup:
        element_bytes = DTYPE_BYTES[group.dtype]
        optimizer = program.optimizers[group.optimizer]
        regions = {
            region: address.take(group.numel * element_bytes) for region in ("parameter", "gradient", *optimizer.states)
        }
        for member in group.members:
            names = {"parameter": member.parameter, "gradient": member.gradient}
            names |= {state: state_name(member.parameter, optimizer.name, state) for state in optimizer.states}
            for region, name in names.items():
                offsets[name] = regions[region] + member.start * element_bytes
        return replace(group, regions=regions)


class _Address:
    """The next free byte."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, size_bytes: int) -> int:
        taken = self.next
        self.next = align(taken + size_bytes, ALIGNMENT_BYTES)
        return taken
