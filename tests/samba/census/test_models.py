"""Models, optimizers, tensors and losses on the host: what apps of the census do with them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.samba.census.support import (
    BATCH,
    CLASSES,
    FEATURES,
    LogReg,
    OnlyOut,
    Plainly,
    batch_of,
    equal,
    refused,
    same_weights,
    seeded,
)


@pytest.mark.parametrize("order", ["from_torch_model_(model.bfloat16())", "from_torch_(model); model.bfloat16()"])
def test_a_model_in_bfloat16(order: str, samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    if order.startswith("from_torch_model_"):
        samba.from_torch_model_(model.bfloat16())
    else:
        samba.from_torch_(model)
        model.bfloat16()
    gold = copy.deepcopy(model)(samba.to_torch(batch[0]).bfloat16(), samba.to_torch(batch[1]))
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, batch, optimizer, name="net")
    samba.utils.trace_graph(model, batch, optimizer, pef=pef)
    before = copy.deepcopy(model)
    loss, outputs = samba.session.run(input_tensors=batch, output_tensors=model.output_tensors)
    samba.session.to_cpu(model)
    assert outputs.dtype is torch.bfloat16
    assert equal(outputs, gold[1])
    samba.utils.assert_close(loss.float(), gold[0], "loss", threshold=3e-3)
    assert not same_weights(model, before)


def test_methods_of_optimizers_around_a_run(samba: Any, batch: list[Any], trace: Callable[..., Any]) -> None:
    model, optimizer = trace()
    plainly = Plainly(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
    optimizer.zero_grad()
    samba.session.run(batch, model.output_tensors)
    optimizer.step()
    optimizer.zero_grad()
    samba.session.to_cpu(model, optimizer)
    plainly.step(batch)
    assert same_weights(model, plainly.model)
    assert scheduler.get_last_lr() == [0.1]
    state = optimizer.state_dict()
    assert equal(state["state"][0]["momentum_buffer"], plainly.optimizer.state_dict()["state"][0]["momentum_buffer"])
    again = samba.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.1


def test_a_criterion_on_the_wrong_shape_is_refused(samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    images = samba.randn(4, FEATURES + 1, name="image", batch_dim=0)
    with refused("mat1 and mat2", "self.lin_layer(inputs)"):
        samba.session.compile(model, [images, batch[1]], samba.optim.SGD(model.parameters(), lr=0.1), name="net")


Trace = Callable[..., Any]


@pytest.mark.parametrize("way", ["output.sn_grad = output.grad", "ctx.set_tensors", "grad_of_outputs"])
def test_the_loss_is_computed_on_the_host(way: str, samba: Any, trace: Trace) -> None:
    model, _ = trace(OnlyOut)
    plainly = Plainly(model)
    criterion = nn.CrossEntropyLoss()
    for number in range(2):
        image, label = batch_of(samba, number)
        labels, rest = samba.to_torch(label), {}
        sn_output = samba.session.run([image], model.output_tensors, section_types=["fwd"])[0]
        output = samba.to_torch(sn_output.float())
        output.requires_grad = True
        loss = criterion(output, labels)
        loss.backward()
        if way.startswith("output"):
            model.output_tensors[0].sn_grad = output.grad
        elif way == "ctx.set_tensors":
            name = f"{model.output_tensors[0].sn_name}__grad"
            samba.session.ctx.set_tensors({name: output.grad.numpy()})
        else:
            rest["grad_of_outputs"] = [samba.from_torch_tensor(output.grad)]
        samba.session.run(
            [image], model.output_tensors, section_types=["bckwd", "opt"], hyperparam_dict={"lr": 0.1}, **rest
        )
        gold = plainly.model(samba.to_torch(image))
        assert equal(output, gold)
        plainly.step([image], torch.autograd.grad(criterion(leaf := gold.detach().requires_grad_(), labels), leaf)[0])
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_samba_loader(samba: Any, trace: Callable[..., Any]) -> None:
    images, labels = torch.randn(2 * BATCH, FEATURES), torch.randint(CLASSES, (2 * BATCH,))
    pairs = [(images[at : at + BATCH], labels[at : at + BATCH]) for at in (0, BATCH)]
    model, _ = trace()
    plainly = Plainly(model)
    batches = samba.sambaloader.SambaLoader(DataLoader(TensorDataset(images, labels), BATCH), ["image", "label"])
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


def test_operators_of_samba_are_mixed_with_those_of_torch(samba: Any, batch: list[Any]) -> None:
    class Mixed(nn.Module):
        """Operators of samba on the tensors of a forward, and a constant matrix as a plain attribute."""

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(FEATURES, CLASSES)
            self.table = samba.from_torch_tensor(torch.eye(FEATURES).bfloat16(), name="table")

        def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.matmul(image, self.table.float())
            half = samba.mul(samba.sigmoid(mixed), 0.5) + samba.div(mixed, 2.0)
            both = samba.log(samba.sigmoid(half)) + samba.triu_fill(half[:, :BATCH], 0.0).sum()
            weight, bias = self.lin.weight, self.lin.bias
            out = samba.addmm(input=bias, mat1=both, mat2=weight, beta=1, alpha=1, out=None, is_transposed=True)
            out = samba.from_torch(samba.to_torch(out))  # to torch, and back inside of forward
            out.host_memory = True
            return nn.functional.cross_entropy(out, label), out

    model = samba.from_torch_model_(seeded(Mixed))
    plainly = Plainly(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pef = samba.session.compile(model, batch, optimizer, name="net")
    samba.utils.trace_graph(model, batch, optimizer, pef=pef)
    outputs = samba.session.run(batch, model.output_tensors)
    assert all(equal(*pair) for pair in zip(outputs, plainly.step(batch), strict=True))
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)
