"""Tensors: the rows of the census. What is computed is compared with torch."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.samba.census.support import BATCH, CLASSES, FEATURES, Plainly, equal, refused, same_weights, seeded

Make = Callable[[Any], Any]


def _drawn(make: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return make()


RANDN: dict[str, tuple[Make, Callable[[], Tensor]]] = {
    "randn(*ints, name=, batch_dim=0)": (
        lambda samba: samba.randn(4, 8, name="image", batch_dim=0), lambda: torch.randn(4, 8)
    ),
    "randn(*list, name=, batch_dim=0)": (
        lambda samba: samba.randn(*[4, 1, 8, 8], name="image", batch_dim=0), lambda: torch.randn(4, 1, 8, 8)
    ),
    "randn, one dimension": (lambda samba: samba.randn(4, name="image", batch_dim=0), lambda: torch.randn(4)),
    "randn(...).bfloat16().float()": (
        lambda samba: samba.randn(4, 8, name="image", batch_dim=0).bfloat16().float(),
        lambda: torch.randn(4, 8).bfloat16().float(),
    ),
    "randn(...).bfloat16()": (
        lambda samba: samba.randn(4, 8, name="image", batch_dim=0).bfloat16(), lambda: torch.randn(4, 8).bfloat16()
    ),
    "randn(named_dims=('B','F'))": (
        lambda samba: samba.randn(4, 8, name="image", batch_dim=0, named_dims=("B", "F")), lambda: torch.randn(4, 8)
    ),
    "randn(requires_grad=True)": (
        lambda samba: samba.randn(4, 8, name="image", batch_dim=0, requires_grad=1 > 0), lambda: torch.randn(4, 8)
    ),
    "randint(high, (n,), name=, batch_dim=0)": (
        lambda samba: samba.randint(10, (4,), name="image", batch_dim=0), lambda: torch.randint(10, (4,))
    ),
    "randint(named_dims=('B',))": (
        lambda samba: samba.randint(10, (4,), name="image", batch_dim=0, named_dims=("B",)),
        lambda: torch.randint(10, (4,)),
    ),
    "randint(low, high, size, name=, batch_dim=0)": (
        lambda samba: samba.randint(2, 10, (4,), name="image", batch_dim=0), lambda: torch.randint(2, 10, (4,))
    ),
    "randint, 2-D size with dtype=torch.int16": (
        lambda samba: samba.randint(10, (4, 3), name="image", batch_dim=0, dtype=torch.int16),
        lambda: torch.randint(10, (4, 3), dtype=torch.int16),
    ),
    "rand([dims], dtype=, name=, sized_dims=)": (
        lambda samba: samba.rand([4, 8], dtype=torch.float32, name="image", batch_dim=0, sized_dims=["B", None]),
        lambda: torch.rand([4, 8]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", RANDN)
def test_tensors_of_random_numbers_are_those_of_torch(row: str, samba: Any) -> None:
    make, as_torch = RANDN[row]
    tensor = _drawn(lambda: make(samba))
    assert isinstance(tensor, samba.SambaTensor)
    assert equal(tensor, _drawn(as_torch))
    assert tensor.dtype is _drawn(as_torch).dtype
    assert (tensor.sn_name, tensor.batch_dim) == ("image", 0)
    assert tensor.requires_grad is ("requires_grad" in row)
    if "named_dims" in row:
        assert tensor.named_dims == (("B", "F") if tensor.ndim == 2 else ("B",))


@pytest.mark.parametrize("given", ["SambaTensor", "gold torch tensor", ".data"])
def test_randn_like(given: str, samba: Any) -> None:
    out = samba.from_torch_tensor(torch.ones(4, 3), name="out")
    like = {"SambaTensor": out, "gold torch tensor": torch.ones(4, 3), ".data": out.data}[given]
    found = _drawn(lambda: samba.randn_like(like))
    gold = _drawn(lambda: torch.randn(4, 3))
    assert equal(found.bfloat16(), gold.bfloat16())
    assert equal(found.bfloat16().float(), gold.bfloat16().float())


def test_samba_tensor_of_a_tensor_and_without_data(samba: Any) -> None:
    data = torch.randn(4, 3)
    for made in (
        samba.SambaTensor(data, name="x", batch_dim=0),
        samba.from_torch_tensor(data, name="x", batch_dim=0),
        samba.from_torch(data, name="x", batch_dim=0),
        samba.from_torch(data, name="x", batch_dim=0).float(),
        samba.sambatensor.SambaTensor(data, name="x", batch_dim=0),
    ):
        assert (made.sn_name, made.batch_dim, made.has_data) == ("x", 0, True)
        assert equal(made, data)
    assert samba.from_torch_tensor(data, name="x").batch_dim is None
    assert samba.from_torch(data).sn_name is None
    assert samba.from_torch_tensor(data, name="x", sized_dims=[4, None]).sized_dims == [4, None]
    empty = samba.SambaTensor(name="cache", region_name="kv", shape=(2, 3), dtype=torch.bfloat16)
    assert (empty.sn_name, empty.sn_region_name, empty.dtype, empty.has_data) == ("cache", "kv", torch.bfloat16, False)


def test_from_named_dict(samba: Any) -> None:
    made = samba.from_named_dict({"x": torch.ones(2), "y": torch.zeros(3)})
    assert [(name, one.sn_name, one.shape) for name, one in made.items()] == [("x", "x", (2,)), ("y", "y", (3,))]


def test_to_torch(samba: Any) -> None:
    data, model = torch.randn(4, 3), nn.Linear(3, 3)
    tensor = samba.from_torch_tensor(data, name="x")
    for given in (tensor, data, tensor.float(), data.float()):
        assert type(samba.to_torch(given)) is Tensor
        assert equal(samba.to_torch(given), data)
    state = {name: samba.to_torch(value) for name, value in model.state_dict().items()}
    assert equal(state["weight"], model.weight)
    loss, outputs = samba.to_torch((tensor, tensor + 1))  # the whole outputs tuple, a mistake of the app
    assert equal(outputs - loss, (data + 1) - data)


def test_methods_of_samba_tensor(samba: Any) -> None:
    data = torch.randn(4, 28, 28)
    tensor = samba.from_torch_tensor(data, name="x", batch_dim=0)
    assert type(tensor.torch()) is type(tensor.torch_tensor()) is Tensor
    assert np.array_equal(tensor.numpy(), data.numpy())
    assert equal(tensor.data, data)
    assert (tensor.size(0), tensor.shape) == (4, data.shape)
    assert tensor.abs().sum() == data.abs().sum()
    assert tensor.bfloat16().dtype is torch.bfloat16
    assert equal(samba.to_torch(tensor).repeat(2, 1, 1), data.repeat(2, 1, 1))
    assert tensor.unsqueeze(0).shape == (1, 4, 28, 28)
    assert tensor.requires_grad_(True).requires_grad
    tensor.requires_grad = False
    tensor.grad = torch.ones_like(data)
    assert tensor.sn_grad is None
    tensor.sn_grad = tensor.grad
    assert equal(tensor.sn_grad, torch.ones_like(data))
    assert tensor.tolist() == data.tolist()
    assert equal(tensor.reshape(-1, 784).squeeze(), data.reshape(-1, 784).squeeze())
    assert equal(torch.stack([tensor, tensor]), torch.stack([data, data]))
    assert tensor.rdu() is tensor
    assert tensor.has_data
    assert tensor.sn_name == "x"
    tensor.sn_region_name = "weights"
    assert tensor.sn_region_name == "weights"
    tensor.host_memory = False
    assert tensor.host_memory is False


@pytest.mark.parametrize("name", ["dsts", "inputs"])
def test_the_graph_of_a_samba_tensor_is_absent(name: str, samba: Any) -> None:
    with refused(f"no {name}"):
        getattr(samba.randn(2, 2), name)


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


def test_groupby_is_absent(samba: Any) -> None:
    with refused("samba.groupby"):
        samba.groupby(samba.randn(4, 8), 0)


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


def test_samba_loader_with_function_hook_and_return_original_batch(samba: Any) -> None:
    torch_loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8)), 4)
    loader = samba.SambaLoader(torch_loader, ["x"], function_hook=lambda batch: [batch[0]], return_original_batch=True)
    for tensors, (x, y) in loader:
        assert [one.sn_name for one in tensors] == ["x"]
        assert equal(tensors[0], x)
        assert y.shape == (4,)
