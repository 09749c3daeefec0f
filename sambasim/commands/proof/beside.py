"""Eager PyTorch in a copy of this process, so that it computes while the PEF is played."""

import mmap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sambasim.commands.proof.batches import Batch
from sambasim.commands.proof.differences import EagerValues
from sambasim.commands.proof.eager import Eager
from sambasim.commands.proof.played import Played, seed_of
from sambasim.errors import MachineError
from sambasim.forks import Fork
from sambasim.ir.types import SymbolKind

_ALIGNED = 64
_SMALL_BYTES = 1 << 20
"""Larger buffers are sent only if a step changes them: they may be weights in another form."""


class Trained(NamedTuple):
    """The `outputs` of each micro-batch of each chip, the `buffers` of each chip, by symbol, and parameters that have a
    gradient, though the PEF does not train them."""

    outputs: Sequence[Sequence[Sequence[Tensor]]]
    buffers: Sequence[Mapping[str, Tensor]]
    others: Sequence[str]


class Beside:
    """A copy of this process with `eager` as it is now, which takes the tensors of `played` before each request.
    `shared`: tensors that both processes have, one for each trained parameter: its gradient; after an update its new
    value."""

    def __init__(self, eager: Eager, played: Played) -> None:
        self._eager = eager
        program = played.program
        self._chips = program.chips
        graph = program.leading
        changed = {output.symbol for output in graph.outputs}
        buffers = [name for name in eager.tensors if program.symbols[name].kind is SymbolKind.BUFFER]
        self._buffers = [name for name in buffers if name in changed or eager.tensors[name].nbytes <= _SMALL_BYTES]
        trained = [member.parameter for group in program.groups for member in group.members]
        self.shared = _in_shared_memory({name: eager.tensors[name] for name in trained})
        self.is_behind = False
        """Whether the copy has other parameters than `played`."""
        self._fork: Fork[Any] = Fork(self._answer, partial(torch.set_num_threads, 1), fresh=False)

    def begin(self, played: Played, what: str, *request: object) -> None:
        """Have the copy `train`, `evaluate`, `update`, or tell the `loss` or the `values` of a batch."""
        if self.is_behind:
            for name, tensor in self.shared.items():
                tensor.copy_(played.read(name))
        buffers = [{name: played.read(name, chip) for name in self._buffers} for chip in range(self._chips)]
        self._fork.begin(alone((what, self.is_behind, buffers, *request)))
        self.is_behind = False

    def end(self) -> Any:
        """What was asked for; None if PyTorch could not do it. Raises MachineError if its process has ended."""
        answer = self._fork.end()
        if self._fork.is_gone:
            what = "the process of eager PyTorch has ended, by a crash or for lack of memory"
            raise MachineError(what, remedy="a smaller batch or model; or --check 0")
        return answer

    def ask(self, played: Played, what: str, *request: object) -> Any:
        self.begin(played, what, *request)
        return self.end()

    def close(self) -> None:
        self._fork.close()

    def _answer(self, request: tuple[Any, ...]) -> object:
        what, is_behind, buffers, *rest = request
        if is_behind:
            self._take(self.shared)
        self._take(buffers[0])
        if what == "train":
            return alone(self._train(buffers, *rest))
        if what == "update":
            return self._update()
        return alone(self._values(*rest) if what == "values" else getattr(self._eager, what)(*rest))

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._eager.take(name, tensor)

    def _train(
        self, buffers: Sequence[Mapping[str, Tensor]], of_chips: Sequence[Sequence[Batch]], number: int
    ) -> Trained:
        eager, outputs, kept = self._eager, [], []
        eager.zero_gradients()
        for chip, batches in enumerate(of_chips):
            self._take(buffers[chip])
            scale = 1 / (len(batches) * self._chips)
            seeds = (seed_of(number, chip, at) for at in range(len(batches)))
            outputs.append([eager.forward_and_backward(batch, next(seeds), scale) for batch in batches])
            kept.append({name: eager.tensors[name].detach().clone() for name in self._buffers})
        for name, shared in self.shared.items():
            gradient = eager.gradient(name)
            shared.zero_() if gradient is None else shared.copy_(gradient)
        others = [name for name in eager.tensors if name not in self.shared and _is_any(eager.gradient(name))]
        return Trained(outputs, kept, others)

    def _update(self) -> bool:
        for name, gradient in self.shared.items():
            self._eager.set_gradient(name, gradient)
        is_done = self._eager.update()
        for name, shared in self.shared.items():
            shared.copy_(self._eager.tensors[name].detach())
        return is_done

    def _values(self, batch: Batch) -> set[tuple[object, ...]]:
        values = EagerValues()
        with values:
            self._eager.forward_and_backward(batch, seed_of(0, 0, 0), 1.0)
        return values.keys


def alone(values: Any) -> Any:
    """`values` with copies of tensors that are parts of others, which pickle would write whole."""

    def of_its_own(value: object) -> object:
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() <= value.nbytes:
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(of_its_own, values)


def _is_any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _in_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors like these, that a copy of this process has too."""
    starts, total = {}, 0
    for name, tensor in tensors.items():
        starts[name], total = total, total + -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    memory = torch.frombuffer(mmap.mmap(-1, max(total, 1)), dtype=torch.uint8)
    return {
        name: memory[starts[name] : starts[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }
