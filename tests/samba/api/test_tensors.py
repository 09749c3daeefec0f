"""Tensors: made, named, turned into others, and calculated with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sambasim.errors import DataError
from tests.samba.api.conftest import imported


def test_randn_as_inputs_are_made(samba: Any) -> None:
    torch.manual_seed(3)
    image = samba.randn(4, 6, name="image", batch_dim=0, named_dims=("B", "F"), requires_grad=True)
    torch.manual_seed(3)
    assert torch.equal(samba.to_torch(image), torch.randn(4, 6))
    assert (image.sn_name, image.batch_dim, image.named_dims, image.requires_grad) == ("image", 0, ("B", "F"), True)
    image.host_memory, image.mem_type = False, "ddr"
    assert (image.host_memory, image.mem_type) == (False, "ddr")
    assert samba.randn((2, 3)).requires_grad_().shape == (2, 3)


def test_randint_with_high_alone_and_with_low(samba: Any) -> None:
    for bounds in ((10, (50,)), (0, 10, (50,))):
        label = samba.randint(*bounds, name="label", batch_dim=0, dtype=torch.int32)
        assert (label.sn_name, label.batch_dim, label.dtype) == ("label", 0, torch.int32)
        assert 0 <= label.min() < label.max() < 10
    assert samba.randint(5, 6, shape=(2, 2)).tolist() == [[5, 5], [5, 5]]


def test_from_torch_shares_memory(samba: Any) -> None:
    plain = torch.zeros(2, 3)
    for make in (samba.from_torch_tensor, samba.from_torch):
        tensor = make(plain, name="x", batch_dim=0)
        plain += 1
        assert torch.equal(tensor.torch(), plain)
        assert (tensor.sn_name, tensor.batch_dim) == ("x", 0)


def test_to_torch_takes_either_kind(samba: Any) -> None:
    plain = torch.ones(2)
    assert samba.to_torch(plain) is plain
    assert type(samba.to_torch(samba.from_torch_tensor(plain))) is Tensor


def test_a_samba_tensor_by_every_keyword(samba: Any) -> None:
    kind = imported("samba.sambatensor").SambaTensor
    assert kind is samba.SambaTensor
    tensor = kind(
        shape=(4, 3), dtype=torch.float32, name="x", batch_dim=0, named_dims=("B", "F"), sized_dims=(4, 3),
        materializer=lambda: torch.ones(4, 3), is_complex=False, region_name="weights",
    )  # fmt: skip
    assert tensor.sum() == 12
    assert (tensor.region_name, tensor.sized_dims) == ("weights", (4, 3))
    assert "shape=(4, 3), dtype=torch.float32, batch_dim=0" in repr(tensor)
    assert torch.equal(kind(torch.ones(2)).torch(), torch.ones(2))
    with pytest.raises(DataError, match="holds real numbers"):
        kind(torch.ones(2), is_complex=True)


def test_a_tensor_is_chained_and_moved(samba: Any) -> None:
    image = samba.randn(4, 3, name="image", batch_dim=0)
    for form in (image.bfloat16().float(), image.cpu(), image.rdu(), image.rdu().cpu().float()):
        assert (form.sn_name, form.batch_dim, form.dtype) == ("image", 0, torch.float32)
    assert torch.equal(image.bfloat16().float().torch(), image.torch().bfloat16().float())
    image.numpy()[0, 0] = 7
    assert image.torch()[0, 0] == 7


def test_data_and_gradient(samba: Any) -> None:
    tensor = samba.SambaTensor(shape=(2,), name="x")
    assert not tensor.has_data
    tensor.sn_data = torch.tensor([1.0, 2.0])
    assert tensor.has_data
    assert tensor.sn_data.tolist() == [1, 2]
    assert tensor.sn_grad is None
    tensor.sn_grad = samba.randn(2)
    assert type(tensor.sn_grad) is Tensor


def test_operators_on_samba_tensors(samba: Any) -> None:
    one, other = samba.randn(2, 3, name="one"), samba.randn(2, 3, name="other")
    assert torch.equal(samba.cat([one, other]).torch(), torch.cat([one.torch(), other.torch()]))
    assert torch.equal(samba.sigmoid(one).torch(), torch.sigmoid(one.torch()))
    added = samba.addmm(samba.zeros(2, 2), one, other.t())
    assert torch.equal(added.torch(), torch.addmm(torch.zeros(2, 2), one.torch(), other.torch().t()))


def test_tensors_of_a_dictionary_and_a_filled_triangle(samba: Any) -> None:
    scores = samba.from_named_dict({"scores": torch.zeros(2, 2)})["scores"]
    assert scores.sn_name == "scores"
    filled = samba.triu_fill(scores, -1.0)
    assert filled.torch_tensor().tolist() == [[0, -1], [0, 0]]
    assert type(filled.torch_tensor()) is Tensor


def test_functions_of_elements_in_a_forward(samba: Any, tmp_path: Path) -> None:
    stir = imported("samba.functional.stir")

    def diagonal_or_more(attrs: Any, x: Tensor, y: Tensor) -> Any:
        column = stir.sn_iteridx(attrs=attrs, dim=1, dtype=torch.int16)
        return stir.sn_select(column > 0, x * y, stir.sn_imm(0.5, torch.float32))

    class Least(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            hidden = super().forward(x)
            return stir.sn_zipmapreduce(diagonal_or_more, [hidden, x], reduce_func="MIN", reduce_dim=[1])

    model = samba.from_torch_model_(Least(3, 3))
    batch = [samba.randn(4, 3, name="x", batch_dim=0)]
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    path = samba.session.compile(model, batch, optimizer, name="least", config_dict={"output_folder": str(tmp_path)})
    samba.utils.trace_graph(model, batch, optimizer, pef=path)
    losses = samba.session.run(batch, model.output_tensors, section_types=["FWD"])[0]
    assert torch.equal(losses.torch(), samba.to_torch(model(batch[0])))


def test_a_forward_goes_by_torch_and_back(samba: Any, tmp_path: Path) -> None:
    """It also reads a SambaTensor that its constructor made, and passes on what the host's forward gives."""

    class Matrix(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.constant = samba.from_torch_tensor(torch.arange(9.0).reshape(3, 3).bfloat16(), name="constant").float()

        def forward(self, x: Tensor) -> Any:
            hidden = samba.from_torch(samba.to_torch(super().forward(x)) @ self.constant, name="hidden")
            hidden.host_memory = False
            return hidden.square().mean(1), hidden

    model = samba.from_torch_model_(Matrix())
    batch = [samba.randn(4, 3, name="x", batch_dim=0)]
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    path = samba.session.compile(model, batch, optimizer, name="matrix", config_dict={"output_folder": str(tmp_path)})
    samba.utils.trace_graph(model, batch, optimizer, pef=path)
    losses, hidden = samba.to_torch(samba.session.run(batch, model.output_tensors, section_types=["FWD"]))
    gold_losses, gold_hidden = samba.to_torch(model(batch[0]))
    assert [type(tensor) for tensor in (losses, hidden, gold_losses, gold_hidden)] == [Tensor] * 4
    assert torch.equal(hidden, gold_hidden)
    assert torch.equal(losses, gold_losses)
    assert model(samba.to_torch(batch[0]))[0].torch_tensor().equal(gold_losses)


def test_a_loader_names_what_a_torch_loader_gives(samba: Any) -> None:
    loader_of = imported("samba.sambaloader").SambaLoader
    assert loader_of is samba.SambaLoader
    images, labels = torch.randn(10, 6), torch.arange(10)
    loader = loader_of(DataLoader(TensorDataset(images, labels), batch_size=4, drop_last=True), ["image", "label"])
    assert len(loader) == 2
    for index, (image, label) in enumerate(loader):
        assert (image.sn_name, image.batch_dim, label.sn_name) == ("image", 0, "label")
        assert torch.equal(image.torch(), images[4 * index : 4 * index + 4])


def test_old_apps_import_nn_from_here() -> None:
    samba_nn = imported("samba.nn")
    assert samba_nn.Linear is nn.Linear
    assert samba_nn.functional is nn.functional
    parameter = imported("samba.nn.parameter").SambaParameter(torch.ones(3), name="scale")
    module = samba_nn.Module()
    module.scale = parameter
    assert [name for name, _ in module.named_parameters()] == ["scale"]
    assert isinstance(nn.Linear(1, 1).weight, imported("samba.nn.parameter").SambaParameter)
