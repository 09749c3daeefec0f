"""Tensors: the rows of the census. What is computed is compared with torch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.samba.census.support import BATCH, CLASSES, FEATURES, Plainly, equal, same_weights, seeded


def test_host_memory_is_assigned_on_an_output_inside_of_forward(samba: Any, batch: list[Any]) -> None:
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(FEATURES, CLASSES)

        def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            out = self.lin(image)
            out.host_memory = True
            return nn.functional.cross_entropy(out, label), out

    batch[0].host_memory = False
    assert _trains_as_torch(samba, seeded(Host), batch)


def _trains_as_torch(samba: Any, model: Any, batch: list[Any]) -> bool:
    samba.from_torch_model_(model)
    plainly = Plainly(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pef = samba.session.compile(model, batch, optimizer, name="net")
    samba.utils.trace_graph(model, batch, optimizer, pef=pef)
    outputs = samba.session.run(batch, model.output_tensors)
    expected = plainly.step(batch)
    samba.session.to_cpu(model)
    return same_weights(model, plainly.model) and all(equal(*pair) for pair in zip(outputs, expected, strict=True))


def _constants(samba: Any) -> Any:
    class Constants(nn.Module):
        """Operators of samba on the tensors of a forward, and a constant matrix as a plain attribute."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(FEATURES, CLASSES)
            self.table = samba.from_torch_tensor(torch.eye(FEATURES).bfloat16(), name="table")

        def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.matmul(image, self.table.float())
            half = samba.mul(samba.sigmoid(mixed), 0.5) + samba.div(mixed, 2.0)
            both = samba.cat((half[:, :4], half[:, 4:]), dim=1)
            both = samba.log(samba.sigmoid(both)) + samba.triu_fill(both[:, :BATCH], 0.0).sum()
            weight, bias = self.lin.weight, self.lin.bias
            out = samba.addmm(input=bias, mat1=both, mat2=weight, beta=1, alpha=1, out=None, is_transposed=True)
            out = samba.from_torch(samba.to_torch(out))  # to torch, and back inside of forward
            return nn.functional.cross_entropy(out, label), out

    return seeded(Constants)


def test_operators_of_samba_are_mixed_with_those_of_torch(samba: Any, batch: list[Any]) -> None:
    model = _constants(samba)
    images, labels = map(samba.to_torch, batch)
    half = torch.sigmoid(images) * 0.5 + images / 2
    square = half[:, :BATCH]
    mixed = torch.log(torch.sigmoid(half)) + square.tril().sum()
    out = model(images, labels)[1]
    torch.testing.assert_close(out, torch.addmm(model.lin.bias, mixed, model.lin.weight.t()))
    assert _trains_as_torch(samba, model, batch)


class Lines:
    """A loader of the app's own."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


@pytest.mark.parametrize("loader", ["DataLoader", "a custom loader object"])
def test_samba_loader(loader: str, samba: Any, trace: Callable[..., Any]) -> None:
    images, labels = torch.randn(2 * BATCH, FEATURES), torch.randint(CLASSES, (2 * BATCH,))
    pairs = [(images[at : at + BATCH], labels[at : at + BATCH]) for at in (0, BATCH)]
    torch_loader: Any = DataLoader(TensorDataset(images, labels), BATCH) if loader == "DataLoader" else Lines(pairs)
    model, _ = trace()
    plainly = Plainly(model)
    batches = samba.sambaloader.SambaLoader(torch_loader, ["image", "label"])
    assert len(batches) == 2
    for (image, label), pair in zip(batches, pairs, strict=True):
        _, out = samba.session.run(input_tensors=(image, label), output_tensors=model.output_tensors)
        assert equal(out, plainly.step(pair)[1])
        predicted = torch.max(out.data, 1)[1]
        assert label.size(0) == BATCH
        assert (predicted == label).sum() == (samba.to_torch(predicted) == pair[1]).sum()
        assert label.reshape(-1, 1).shape == (BATCH, 1)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)
