"""One call of the model by PyTorch itself."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn

from sambasim.compiler.step import run_eagerly


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_what_is_given_to_torch_compile_runs_as_it_is_written() -> None:
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    model = Doubled()
    model.compile(backend=backend)
    x = torch.ones(2, 3)
    run_eagerly(model, [x])
    assert compiled == []
    model(x)
    assert len(compiled) == 1
