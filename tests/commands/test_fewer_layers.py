"""Programs of a model with fewer layers: those of the model that has so few."""

from functools import cache

import torch
from torch import nn

from sambasim.commands.variants import Variants
from sambasim.compiler.front import captured_from_options
from sambasim.ir.graph import Graph
from sambasim.options.compile import compile_options
from sambasim.simulation.planning.strategy import Strategy
from tests.support.mpi import ROOT


class Skips(nn.Module):
    """Layers of which each result is read at the end."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
        self.last = nn.Linear(64, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        results = [features.flatten(1)]
        for layer in self.layers:
            results.append(torch.relu(layer(results[-1])))
        output: torch.Tensor = self.last(torch.stack(results).sum(0))
        return output


@cache
def _gpt(layers: int) -> Variants:
    fields = ["model.args.width=64", f"model.args.layers={layers}", "training.batch_size=8"]
    options = compile_options(ROOT / "configs" / "char_gpt.toml", None, fields, {})
    captured, model = captured_from_options(options)
    return Variants(captured, options, model)


def test_it_is_the_program_of_a_model_that_has_so_few() -> None:
    for strategy in (Strategy(2, samples=8), Strategy(2, tensor="weight", chips=2, samples=8, recompute="sections")):
        shorter, fewer = _gpt(4).shorter(strategy, 2), _gpt(2).program(strategy)
        assert shorter is not None
        assert (shorter.layers, len(shorter.starts)) == (4, 2)
        found = shorter.program
        assert _facts(found.step) == _facts(fewer.step)
        assert _facts(found.evaluation) == _facts(fewer.evaluation)
        assert sum(group.numel for group in found.groups) == sum(group.numel for group in fewer.groups)
        shapes = [sorted((s.kind, s.type.shape) for s in each.symbols.values()) for each in (found, fewer)]
        assert shapes[0] == shapes[1]


def _facts(graph: Graph) -> tuple[list[object], ...]:
    """Operators, the places of sections, and the types of results."""
    places = [(section.kind, section.start, section.stop) for section in graph.sections]
    types = [graph.values[name] for node in graph.nodes for name in node.results if name is not None]
    return [node.operator for node in graph.nodes], [*places], [*types]


def test_a_model_whose_layers_cannot_go_stays_whole() -> None:
    strategy = Strategy(2, samples=8)
    assert _gpt(2).shorter(strategy, 2) is None  # it has no more
    fields = ["data.source=digits", "loss.name=cross_entropy", "optimizer.name=sgd", "model.args.layers=8"]
    options = compile_options(None, f"{__file__}:Skips", fields, {})
    captured, model = captured_from_options(options)
    assert Variants(captured, options, model).shorter(strategy, 3) is None
