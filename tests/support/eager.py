"""Plain PyTorch doing what a PEF says: the user's own module, a DataLoader, autograd, and torch.optim. Of the product
it uses what a PEF records, how data sources are opened, and the numbers that seed the generators."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from sambasim.data.datasets import open_source
from sambasim.data.user_code import call_object
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.run import ResolvedRun, RunOptions, resolve_run
from sambasim.options.training import ModelOptions
from sambasim.pef import PefDocument, map_weights, read
from sambasim.runtime.machine.process import Stream, derive
from sambasim.runtime.run.replica import input_specs
from tests.zoo.case import NAMED_LOSSES

CONSTANT_RATE: Mapping[str, object] = {"name": "constant", "warmup_steps": 0}
"""A `training.schedule` that leaves the learning rate alone."""


class EagerReplica:
    """Replica `rank` of `world_size`: the user's module with the weights of the PEF at `path`, and its own samples."""

    def __init__(self, path: Path, options: RunOptions, *, rank: int = 0, world_size: int = 1) -> None:
        document = read(path)
        self.program: Program = document.program
        self.resolved: ResolvedRun = resolve_run(options, document.training_defaults, document.data_source)
        self.module = _module(document, path)
        self._rank = rank
        self._batches = self._all_batches(world_size)

    def differentiate(self, step: int, micro_steps: int = 1, through: Callable[..., object] | None = None) -> float:
        """`(loss / k).backward()` on each of the next k batches; returns the mean loss. Old gradients are dropped.
        `through` is called in place of the module: one that wraps it."""
        self.module.zero_grad(set_to_none=True)
        total = 0.0
        for micro_step in range(micro_steps):
            batch = self.next_batch()
            torch.manual_seed(derive(self.resolved.training.seed, self._rank, step, micro_step, Stream.GRAPH))
            loss = self.loss(through or self.module, batch)
            torch.autograd.backward(loss / micro_steps)
            total += loss.item()
        return total / micro_steps

    def next_batch(self) -> list[Tensor]:
        return next(self._batches)

    def loss(self, model: Callable[..., object], batch: Sequence[Tensor]) -> Tensor:
        named = self.resolved.loss
        result = model(*batch) if named is None else model(*batch[:-1])
        first = result[0] if isinstance(result, tuple) else result
        assert isinstance(first, Tensor)
        return first if named is None else NAMED_LOSSES[named.name](first, batch[-1])

    def gradients(self) -> dict[str, Tensor]:
        """By symbol of the gradient."""
        members = [member for group in self.program.groups for member in group.members]
        gradients = {member.gradient: self.parameter(member.parameter).grad for member in members}
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        assert found.keys() == gradients.keys(), "a gradient that the PEF has, and none here"
        return found

    def parameter(self, symbol: str) -> nn.Parameter:
        return self.module.get_parameter(self.program.symbols[symbol].torch_names[0])

    def state(self) -> dict[str, Tensor]:
        tensors = self.module.state_dict()
        symbols = self.program.symbols.values()
        kept = (SymbolKind.PARAMETER, SymbolKind.BUFFER)
        return {s.name: tensors[s.torch_names[0]] for s in symbols if s.kind in kept and s.torch_names}

    def optimizer(self) -> torch.optim.Optimizer:
        """The fused one of torch.optim that the PEF describes, of the parameters that it trains."""
        options = self.resolved.optimizer
        assert options is not None
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        of_kind = ("momentum", "dampening", "nesterov") if options.name == "sgd" else ("betas", "eps")
        chosen = {name: value for name in of_kind if (value := getattr(options, name)) is not None}
        trained = [self.parameter(member.parameter) for group in self.program.groups for member in group.members]
        make: Callable[..., torch.optim.Optimizer] = kinds[options.name]
        return make(trained, lr=options.lr, weight_decay=options.weight_decay, fused=True, **chosen)

    def _all_batches(self, world_size: int) -> Iterator[list[Tensor]]:
        training, data = self.resolved.training, self.resolved.data
        dataset = open_source(data, tuple(input_specs(self.program))).train
        sampler: DistributedSampler[object] = DistributedSampler(
            dataset, world_size, self._rank, shuffle=data.shuffle, seed=training.seed, drop_last=True
        )
        loader: DataLoader[object] = DataLoader(dataset, training.batch_size, sampler=sampler, drop_last=True)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            yield from loader


def _module(document: PefDocument, path: Path) -> nn.Module:
    model = ModelOptions.model_validate(document.compile_options["model"])
    module = call_object(model.target or "", model.args, "model")
    assert isinstance(module, nn.Module)
    weights = map_weights(path)
    named = [(name, s.name) for s in document.program.symbols.values() for name in s.torch_names]
    module.load_state_dict({name: weights[symbol].clone() for name, symbol in named})
    return module.train()
