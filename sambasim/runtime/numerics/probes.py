"""Observes numerics, `--debug-numerics`: everything that replicas compute, and what updates make of it."""

from collections.abc import Callable, Sequence

from torch import Tensor

from sambasim.errors import NumericsError
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.instructions import Instruction
from sambasim.runtime.numerics.count import Count, count
from sambasim.runtime.numerics.origins import leaves_memory_as_it_is
from sambasim.runtime.numerics.probe import Probe
from sambasim.runtime.observer import StepObserver
from sambasim.runtime.replica import Replica


class Probes(StepObserver):
    """A probe for each replica of this process. It binds instructions before there are replicas, which are named with
    `watching`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._probes: dict[int, Probe] = {}
        self._replicas: Sequence[Replica] = ()
        self._step = 0
        # Parameters first: they are the same on all ranks, which then say the same.
        kinds = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE)
        self._symbols = [symbol for kind in kinds for symbol in program.symbols.values() if symbol.kind is kind]

    def watching(self, replicas: Sequence[Replica]) -> "Probes":
        """Itself, from now on with a probe for each of `replicas`."""
        self._replicas = replicas
        self._probes = {
            one.rank: Probe(one.rank, self._program, one.memory, one.shard.samples_of_last_batch)
            for one in replicas
            if one.works
        }
        return self

    def bind(self, replica: int, instruction: Instruction) -> Callable[..., object]:
        """The function of `instruction`, which shows a probe what it returns."""
        node, function = instruction.node, instruction.function
        if leaves_memory_as_it_is(node):
            return function

        def looked_at(*operands: object, **keywords: object) -> object:
            result = function(*operands, **keywords)
            results = result if isinstance(result, tuple | list) else (result,)
            for name, value in zip(node.results, results, strict=False):  # the engine refuses another number itself
                if name is not None and isinstance(value, Tensor):
                    self._probes[replica].look(instruction, name, value, operands)
            return result

        return looked_at

    def step_begins(self, step: int) -> None:
        self._step = step

    def pass_begins(self, replica: int, micro_step: int) -> None:
        self._probes[replica].begin(self._step, micro_step)

    def pass_ends(self, replica: int, loss: float) -> None:
        """Raises NumericsError, with where it began, if something that came of the pass is not finite."""
        self._probes[replica].end(loss)

    def step_ends(self, step: int, norm: float | None) -> None:
        """Raises NumericsError if what was updated is not finite, though gradients were."""
        for replica in self._replicas:
            for symbol in self._symbols:
                found = count(replica.memory.tensor(symbol.name))
                if not found.finite:
                    raise self._error(symbol, found, norm)

    def _error(self, symbol: Symbol, found: Count, norm: float | None) -> NumericsError:
        name = symbol.torch_names[0] if symbol.torch_names else symbol.name
        of = "" if norm is None else f"; the norm of all gradients together is {norm:.6g}"
        return NumericsError(
            f"the update of step {self._step + 1} made {found.word} of the {symbol.kind} {name}: {found}, though each "
            f"replica's loss and gradients are finite{of}",
            where=f"section OPT, {symbol.name}",
            remedy="train with a smaller --lr, or with gradients that are clipped",
        )
