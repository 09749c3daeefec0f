"""The proof: a PEF is played beside the model that it was compiled from, on other batches, and compared bit for bit.

Each step begins with the same tensors and random numbers on both sides, so nothing adds up: an output, a gradient or a
buffer has the bits of eager PyTorch, or it has not. What differs by rounding alone is told; more is an error.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import chain
from math import isclose
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sambasim.commands.proof.eager import Eager, LiveModel, NotForEager
from sambasim.commands.proof.played import Batch, Played
from sambasim.commands.proof.products import Products, sharing
from sambasim.commands.proof.steps import Steps, called
from sambasim.compiler.capture.tensors import STORED, inputs_in, stored_in
from sambasim.compiler.capture.trial import as_written, buffers_of_plain_tensors, tracing
from sambasim.compiler.front import inputs_of
from sambasim.data.batches import batch_of
from sambasim.data.datasets import Source
from sambasim.errors import CaptureError, MachineError, SambasimError
from sambasim.hardware.budget import available_bytes
from sambasim.ir.operators import flops_of
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.compile import CompileOptions
from sambasim.options.schedules import arguments_of
from sambasim.pef import map_weights, read
from sambasim.pef.document import Checked, Rounded
from sambasim.runtime.machine.process import keep_freed_memory, repeatable
from sambasim.units import format_bytes

FEWEST_STEPS, MOST_STEPS = 2, 8
_FLOPS = 4e9
"""What all steps of a proof compute, on each side, where that is more than the fewest steps."""

_PART_OF_MEMORY, _MOST_TOLD, _SAME_LOSS = 3, 8, 1e-5


def steps_of(program: Program) -> int:
    """How many steps a proof has by default: fewer for large ones, and the same on each machine."""
    graph = program.leading
    types = graph.types(program.symbols)
    each = sum(flops_of(node, types) for node in graph.nodes)
    return min(max(FEWEST_STEPS, int(_FLOPS / max(each * program.micro_batches, 1))), MOST_STEPS)


def too_large(live: LiveModel) -> str | None:
    """Why the model is too large to be played beside itself; None if it is not."""
    available = available_bytes()
    held = sum(tensor.nbytes for tensor in chain(live.model.parameters(), live.model.buffers()))
    if available is None or _PART_OF_MEMORY * held <= available:
        return None
    return f"the model has {format_bytes(held)}, more than a third of the {format_bytes(available)} that are available"


def own_memory(model: nn.Module) -> None:
    """In a child: tensors that processes share get memory of their own; changes would reach the caller's."""
    copies: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor) and tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's, untyped
            memory = tensor.data.new_empty(0).set_(tensor.untyped_storage())
            copy = copies.setdefault(memory.data_ptr(), memory.clone())
            tensor.data = copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Proof(NamedTuple):
    """How a PEF was checked, and what else is to be told; None if PyTorch has taken no batch."""

    checked: Checked | None
    notices: tuple[str, ...]


def prove(
    path: Path,
    live: LiveModel,
    options: CompileOptions,
    source: Source | None = None,
    steps: int | None = None,
    on_doing: Callable[[str], object] = lambda doing: None,
    *,
    with_own_weights: bool = True,
) -> Proof:
    """Compare the PEF at `path` with the model of `live`, which is changed: call it in a child. `source`: the data,
    where there is some; `steps`: by default those of `steps_of`; `on_doing`: see Eager; `with_own_weights`: whether the
    model must have those of the PEF already. Raises CaptureError for a difference."""
    keep_freed_memory(of_any_size=True)
    own_memory(live.model)
    stored = stored_in(STORED[options.dtype], live.model)
    with repeatable(1), as_written(), buffers_of_plain_tensors(live.model), stored, ExitStack() as stack:
        if live.losses is not None:  # apps ask samba.session.tracing what to compute
            stack.enter_context(tracing())
        products = stack.enter_context(closing(Products()))
        proof = _Proof(path, live, options, source, products, on_doing, with_own_weights)
        return Proof(proof.run(steps), tuple(proof.notices()))


class _Proof:
    def __init__(
        self,
        path: Path,
        live: LiveModel,
        options: CompileOptions,
        source: Source | None,
        products: Products,
        on_doing: Callable[[str], object],
        with_own_weights: bool,
    ) -> None:
        document = read(path)
        weights = map_weights(path, document, check=False)
        self._program = program = document.program
        stored = partial(inputs_in, STORED[options.dtype])
        self._example = stored(live.example.inputs)
        self._passes = program.chips * program.micro_batches
        self._eager = eager = Eager(live, options, program, on_doing)
        for name, tensor in eager.tensors.items():
            if not with_own_weights:
                eager.take({name: weights[name]})
            elif not torch.equal(tensor, weights[name]):
                raise CaptureError(f"the PEF has other values of {called(program, name)} than the model")
            if tensor.is_contiguous():  # then operands are known to be equal without reading them
                with suppress(RuntimeError):
                    weights[name] = sharing(tensor.detach())
        self._played = Played(program, weights)
        self._read: Iterator[Batch] = iter(())
        if source is not None:
            self._read = read_batches(source, live.model, options, live.example.inputs, 1)
        graphs = [graph for graph in (program.training, program.evaluation) if graph is not None]
        self._steps = {graph.name: Steps(graph, self._played, eager, products, weights) for graph in graphs}
        self._last: Sequence[Batch] = ()
        self._refused: SambasimError | None = None
        self._of_run = arguments_of(program.names_of(SymbolKind.ARGUMENT), options.arguments)
        self._is_evaluated = True
        self._whole: Batch | None = None if live.whole is None else stored(live.whole)
        if self._passes > 1 and source is not None:
            self._whole = next(read_batches(source, live.model, options, live.example.inputs, 0), None)

    def notices(self) -> Iterator[str]:
        """Of a batch that a run would refuse, and of parts of a batch, if the mean of their losses is not its loss."""
        if self._refused is not None:
            where = f", {self._refused.where}" if self._refused.where else ""
            yield f"on batches with other values a run may end: {self._refused.what}{where}"
        if not self._is_evaluated:
            yield "the evaluation graph was not compared: eager PyTorch does not take the batch in evaluation mode"
        if self._passes == 1 or self._whole is None or self._program.training is None:
            return
        batches = (self._whole, *parts(self._whole, self._passes))
        of_whole, *of_parts = (self._loss(self._with_run(0, part)) for part in batches)
        known = [loss for loss in of_parts if loss is not None]
        if of_whole is None or len(known) < len(of_parts):
            return
        mean = sum(known) / len(known)
        if not isclose(mean, of_whole, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS):
            yield (
                f"the loss of the example batch is {of_whole:.6g}, and the mean over its {self._passes} parts "
                f"{mean:.6g}, of which a step takes the gradient: the model mixes samples of a batch, as by BatchNorm, "
                "a sum or in-batch negatives"
            )

    def _loss(self, batch: Batch) -> float | None:
        """None if PyTorch cannot tell it."""
        try:
            return self._eager.ask(self._played, lambda: self._eager.loss(batch))
        except NotForEager:
            return None

    def run(self, steps: int | None) -> Checked | None:
        asked = steps_of(self._program) if steps is None else steps
        *training, evaluation = self._steps.values()
        play = training[0].train if training else evaluation.evaluate
        done = sum(self._on_a_batch(number, play, self._batches(number)) for number in range(asked))
        if training and done:
            self._is_evaluated = self._on_a_batch(done, evaluation.evaluate, [(self._last, False)])
        if not done:
            return None
        differences = [difference for steps in self._steps.values() for difference in steps.largest.values()]
        worst = sorted(differences, key=lambda difference: -difference.size)[:_MOST_TOLD]
        return Checked(
            steps=done,
            compared=sum(steps.compared for steps in self._steps.values()),
            threads=1,
            torch=torch.__version__.split("+")[0],
            rounded=len(differences),
            exceptions=tuple(Rounded(each.name, each.size, str(each.source or "")) for each in worst),
        )

    def _on_a_batch(
        self, number: int, play: Callable[[int, Sequence[Batch]], None], batches: Iterable[tuple[Sequence[Batch], bool]]
    ) -> bool:
        """Play step `number` on the first of `batches` that PyTorch takes; False if it takes none."""
        for batch, is_read in batches:
            try:
                play(number, [self._with_run(number, part) for part in batch])
            except NotForEager:
                continue
            except (CaptureError, MachineError):
                raise
            except SambasimError as error:
                if is_read:
                    raise
                self._refused = error  # the program checks what it took for granted, and it is not so here
                continue
            self._last = batch
            return True
        return False

    def _with_run(self, number: int, batch: Batch) -> Batch:
        """`batch`, and what a run gives in its step `number`."""
        at, given = number / MOST_STEPS, self._of_run.items()
        types = {name: getattr(torch, one.dtype) for name, one in given}
        return {**batch, **{name: torch.tensor(one.at(number, 0, at), dtype=types[name]) for name, one in given}}

    def _batches(self, number: int) -> Iterator[tuple[Sequence[Batch], bool]]:
        """Batches for step `number`, in the parts that passes take, and whether they are of the data."""
        if (batch := next(self._read, None)) is not None:
            yield parts(batch, self._passes), True
        first = number * self._passes
        for made in zip(*(made_batches(self._example, first + index) for index in range(self._passes)), strict=True):
            if not any(equal(batch, self._example) for batch in made):
                yield made, False
        yield [self._example] * self._passes, False


_SHRUNK, _SCALES = 0.75, 8
"""By which the numbers of an example are multiplied: they stay in any range that has zero in it; and how often."""


def read_batches(
    source: Source, model: nn.Module, options: CompileOptions, example: Batch, first: int
) -> Iterator[Batch]:
    """The batches of a replica in the data, from number `first`, as far as samples have the shapes of `example`."""
    loss, size = options.loss.name if options.loss else None, options.training.batch_size
    with suppress(SambasimError):
        for start in range(first * size, len(source.train) - size + 1, size):
            batch = batch_of(source.train, range(start, start + size))
            inputs = inputs_of(batch, model, loss, options).inputs
            if any(inputs[name].shape[1:] != tensor.shape[1:] for name, tensor in example.items()):
                return
            yield inputs_in(STORED[options.dtype], inputs)


def made_batches(example: Batch, number: int) -> Iterator[Batch]:
    """Batches of the kind of `example`, with smaller floating-point numbers: its elements in another order, in odd
    batches some of them several times; its samples in another order; all in its order. `number` counts from 0."""
    scale = _SHRUNK ** (1 + number % _SCALES)

    def rolled(tensor: Tensor) -> Tensor:
        flat, count = tensor.reshape(-1), tensor.numel()
        if number % 2 and count:
            chosen = torch.randint(count, (count,), generator=torch.Generator().manual_seed(number))
            return flat[chosen].reshape(tensor.shape)
        return flat.roll(1 + number * (1 + count // 7)).reshape(tensor.shape)

    def of_samples(tensor: Tensor) -> Tensor:
        return tensor.roll(1 + number, 0) if tensor.ndim else tensor

    def changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        other = change(tensor.detach())
        other = other * scale if tensor.is_floating_point() else other.clone()
        return other.requires_grad_(tensor.requires_grad)

    for change in (rolled, of_samples, torch.Tensor.detach):
        yield {name: changed(tensor, change) for name, tensor in example.items()}


def equal(batch: Batch, other: Batch) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in batch.items())


def parts(batch: Batch, count: int) -> Sequence[Batch]:
    """`batch` in `count` parts of as many samples."""
    chunks = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: of[index].contiguous() for name, of in chunks.items()} for index in range(count)]
