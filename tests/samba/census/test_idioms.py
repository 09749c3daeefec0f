"""Training loops of the census, and what depends on the hardware. Each loop trains as plain PyTorch does."""

import copy
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
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
    same_weights,
    seeded,
)

Trace = Callable[..., Any]


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(3 * BATCH, FEATURES, generator=generator)
    return TensorDataset(images, torch.randint(CLASSES, (3 * BATCH,), generator=generator))


class Starter:
    """The whole app, as starters are written. `inputs_first`: whether the inputs are made before the model."""

    def __init__(self, samba: Any, *, inputs_first: bool) -> None:
        self.samba, self.utils, self.inputs_first = samba, samba.utils, inputs_first
        self.avg_loss = 0.0

    def add_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--momentum", type=float, default=0.9)
        parser.add_argument("-e", "--num-epochs", type=int, default=1)
        parser.add_argument("--num-features", type=int, default=FEATURES)

    def get_inputs(self, args: Namespace) -> tuple[Any, Any]:
        image = self.samba.randn(args.batch_size, args.num_features, name="image", batch_dim=0).bfloat16().float()
        return image, self.samba.randint(CLASSES, (args.batch_size,), name="label", batch_dim=0)

    def main(self, argv: list[str]) -> Any:
        samba, utils = self.samba, self.utils
        utils.set_seed(256)
        args = utils.argparser.parse_app_args(argv=argv, common_parser_fn=self.add_args)
        inputs = self.get_inputs(args) if self.inputs_first else None
        torch.manual_seed(0)
        model = LogReg()
        samba.from_torch_model_(model)
        optimizer = (
            samba.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum) if not args.inference else None
        )
        if inputs is None:
            inputs = self.get_inputs(args)
        if args.command == "compile":
            samba.session.compile(
                model,
                inputs,
                optimizer,
                name="logreg",
                app_dir=utils.get_file_dir(__file__),
                config_dict=vars(args),
                pef_metadata=utils.pef_utils.get_pefmeta(args, model),
            )
        elif args.command == "test":
            utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
            self.test(args, model, inputs, model.output_tensors)
        elif args.command == "run":
            utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
            self.train(args, model)
        else:
            utils.common.common_app_driver(args, model, inputs, optimizer, name="logreg", app_dir=".")
        return model

    def test(self, args: Namespace, model: Any, inputs: Any, outputs: Any) -> None:
        samba, utils = self.samba, self.utils
        samba.session.tracing = False
        outputs_gold = model(*inputs)
        outputs_samba = samba.session.run(
            input_tensors=inputs,
            output_tensors=outputs,
            data_parallel=args.data_parallel,
            reduce_on_rdu=args.reduce_on_rdu,
        )
        for i, (output_samba, output_gold) in enumerate(zip(outputs_samba, outputs_gold, strict=True)):
            utils.assert_close(
                output_samba, output_gold, f"forward output #{i}", threshold=3e-3, visualize=args.visualize
            )
        gold_loss = outputs_gold[0]
        gold_loss.mean().backward()
        for name, param in model.named_parameters():
            utils.assert_close(param.sn_grad, param.grad, f"{name}__grad", threshold=3e-3, visualize=args.visualize)

    def train(self, args: Namespace, model: Any) -> None:
        samba, hyperparam_dict = self.samba, {"lr": args.lr, "momentum": args.momentum}
        train_loader = DataLoader(_dataset(), args.batch_size)
        total_step = len(train_loader)
        for epoch in range(args.num_epochs):
            avg_loss = 0.0
            for i, (images, labels) in enumerate(train_loader):
                sn_images = samba.from_torch_tensor(images, name="image", batch_dim=0)
                sn_labels = samba.from_torch_tensor(labels, name="label", batch_dim=0)
                loss, outputs = samba.session.run(
                    input_tensors=[sn_images, sn_labels],
                    output_tensors=model.output_tensors,
                    hyperparam_dict=hyperparam_dict,
                    data_parallel=args.data_parallel,
                    reduce_on_rdu=args.reduce_on_rdu,
                )
                loss, outputs = samba.to_torch(loss), samba.to_torch(outputs)
                avg_loss += loss.mean()
                place = f"Epoch [{epoch + 1}/{args.num_epochs}], Step [{i + 1}/{total_step}]"
                print(f"{place}, Loss: {avg_loss / (i + 1):.4f}")
        self.avg_loss = float(avg_loss)
        samba.session.to_cpu(model)


@pytest.mark.parametrize("inputs_first", [True, False], ids=["inputs before the model", "inputs after the optimizer"])
def test_the_commands_of_a_starter(inputs_first: bool, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    app, pef = Starter(samba, inputs_first=inputs_first), "--pef=out/logreg/logreg.pef"
    app.main(["compile", f"-b={BATCH}", "--pef-name=logreg"])
    app.main(["test", pef])
    plainly = Plainly(seeded(LogReg))
    model = app.main(["run", pef, "-e", "2"])
    gold = [plainly.step(pair)[0] for _ in range(2) for pair in DataLoader(_dataset(), BATCH)]
    assert same_weights(model, plainly.model)
    assert app.avg_loss == float(sum(gold[3:]))
    out = capsys.readouterr().out
    assert f"Epoch [2/2], Step [1/3], Loss: {gold[3]:.4f}" in out
    app.main(["measure-performance", pef, "--num-iterations=1"])
    assert "samples/s" in capsys.readouterr().out


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


def test_the_loss_of_an_llm_is_scaled_for_each_token_before_the_run(samba: Any) -> None:
    image, label = batch_of(samba)
    inputs = {"inputs": image, "targets": label}
    model = samba.from_torch_model_(seeded(LogReg, reduction="none"))
    plainly = Plainly(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pef = samba.session.compile(model, inputs, optimizers=optimizer, name="llm", inference=False)
    traced_outputs = samba.utils.trace_graph(model, inputs, optimizer, pef=pef, loss_indices=[0])
    loss_tensor, scale = traced_outputs[0], torch.tensor([0.0, 0.25, 0.25, 0.5])
    loss_tensor.sn_grad = scale
    losses = samba.to_torch(samba.session.run(inputs, loss_tensor)[0].float())
    step_loss = (losses * scale).sum()
    gold = plainly.step([image, label], scale)
    assert equal(step_loss, (gold[0] * scale).sum())
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)
    weights = {name: samba.to_torch(param) for name, param in model.named_parameters()}
    assert equal(weights["lin_layer.weight"], model.lin_layer.weight)


def _trained(samba: Any, model: Any, plainly: Plainly, numbers: range) -> None:
    for number in numbers:
        samba.session.run(batch_of(samba, number), model.output_tensors)
        plainly.step(batch_of(samba, number))


def test_evaluation_on_the_host_after_to_cpu(samba: Any, trace: Trace) -> None:
    model, _ = trace()
    plainly = Plainly(model)
    before = copy.deepcopy(model)
    _trained(samba, model, plainly, range(2))
    assert same_weights(model, before), "the host has the old weights before to_cpu"
    samba.session.to_cpu(model)
    with torch.no_grad():
        correct = 0
        for images, labels in DataLoader(_dataset(), BATCH):
            loss, outputs = model(images, labels)
            loss, outputs = samba.to_torch(loss), samba.to_torch(outputs)
            assert equal(loss, plainly.model(images, labels)[0])
            _, predicted = torch.max(outputs.data, 1)
            correct += int((predicted == labels).sum())
    assert 0 <= correct <= 3 * BATCH
