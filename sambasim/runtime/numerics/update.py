"""Looks at what each step's update made of parameters and of the optimizer's state."""

from collections.abc import Sequence

from sambasim.errors import NumericsError
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.numerics.count import Count, count
from sambasim.runtime.sync.interface import StepSync, Synced


class UpdateProbe:
    """Syncs by `sync`, and looks at `memories`, those that this process has, after each step; `steps` were before."""

    def __init__(self, sync: Synced, program: Program, memories: Sequence[DeviceMemory], steps: int) -> None:
        self._sync = sync
        self._memories = memories
        self._steps = steps
        # Parameters first: they are the same on all ranks, which then say the same.
        kinds = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE)
        self._symbols = [symbol for kind in kinds for symbol in program.symbols.values() if symbol.kind is kind]

    def begin_step(self) -> None:
        """As `Synced` says."""
        self._sync.begin_step()

    def section_done(self, count: int) -> None:
        """As `Synced` says."""
        self._sync.section_done(count)

    def finish_step(self, losses: Sequence[float], wish: int = 0) -> StepSync:
        """As `Synced` says. Raises NumericsError if what was updated is not finite; the gradients of each replica were,
        or its probe would have raised before."""
        done = self._sync.finish_step(losses, wish)
        self._steps += 1
        for memory in self._memories:
            for symbol in self._symbols:
                found = count(memory.tensor(symbol.name))
                if not found.finite:
                    raise self._error(symbol, found, done.norm)
        return done

    def _error(self, symbol: Symbol, found: Count, norm: float | None) -> NumericsError:
        name = symbol.torch_names[0] if symbol.torch_names else symbol.name
        of = "" if norm is None else f"; the norm of all gradients together is {norm:.6g}"
        return NumericsError(
            f"the update of step {self._steps} made {found.word} of the {symbol.kind} {name}: {found}, though each "
            f"replica's loss and gradients are finite{of}",
            where=f"section OPT, {symbol.name}",
            remedy="train with a smaller --lr, or with gradients that are clipped",
        )
