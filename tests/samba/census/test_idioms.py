"""Training loops of the census, and what depends on the hardware. Each loop trains as plain PyTorch does."""

import copy
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.samba.census.support import (
    BATCH,
    CLASSES,
    FEATURES,
    LogReg,
    OnlyOut,
    Plainly,
    batch_of,
    equal,
    parsed,
    plain,
    refused,
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


class Mixed(nn.Module):
    """Four inputs, of which one is a vector: (x, R, E, tt)."""

    output_tensors: Any

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, R: Tensor, E: Tensor, tt: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.exp(self.lin(x) / 10) * torch.squeeze(torch.stack([R, E]).sum(0)).unsqueeze(1)
        return nn.functional.cross_entropy(out, tt), torch.transpose(out, 0, 1)


def test_inputs_bind_by_name_in_another_order_and_n_1_is_fed_for_n(samba: Any) -> None:
    labels = torch.randint(CLASSES, (BATCH,))
    given = {"x": torch.randn(BATCH, FEATURES), "R": torch.randn(BATCH), "E": torch.randn(BATCH), "tt": labels}
    inputs = [samba.from_torch_tensor(value, name=name) for name, value in given.items()]
    model = samba.from_torch_model_(seeded(Mixed))
    plainly = Plainly(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pef = samba.session.compile(model, inputs, optimizer, name="mixed")
    samba.utils.trace_graph(model, inputs, optimizer, pef=pef)
    fed = {"E": given["E"].unsqueeze(1), "tt": labels, "x": given["x"], "R": given["R"]}
    loss, out = samba.session.run(
        input_tensors=[samba.from_torch(value, name=name) for name, value in fed.items()],
        output_tensors=model.output_tensors,
    )
    gold = plainly.step([*given.values()])
    assert equal(loss, gold[0])
    assert equal(out, gold[1])
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


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


def test_a_server_gives_the_gradient_of_its_input_back(samba: Any) -> None:
    model = samba.from_torch_model_(seeded(OnlyOut))
    activations = samba.randn(BATCH, FEATURES, name="activations", batch_dim=0, requires_grad=True)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, [activations], optimizer, name="server")
    samba.utils.trace_graph(model, [activations], optimizer, pef=pef)
    samba.session.run([activations], model.output_tensors, section_types=["fwd"])
    gradient = torch.randn(BATCH, CLASSES)
    model.output_tensors[0].sn_grad = gradient
    samba.session.run([activations], model.output_tensors, section_types=["bckwd", "opt"])
    assert equal(activations.sn_grad, torch.matmul(gradient, model.lin_layer.weight))


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


def test_keys_of_hyperparam_dict(
    samba: Any, batch: list[Any], trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = trace()
    plainly = Plainly(model, lr=0.25, momentum=0.5, weight_decay=0.125)
    samba.session.run(batch, hyperparam_dict={"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125})
    plainly.step(batch)
    whole = {"learning_rate": 7.0, "optimizer": "sgd", "betas": (0.9, 0.99)}  # the app's settings
    samba.session.run(batch, hyperparam_dict=whole)
    plainly.step(batch)
    assert "hyperparam_dict has learning_rate, which no optimizer of this PEF takes" in capsys.readouterr().err
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_a_schedule_on_the_host_gives_the_rate_of_each_step(samba: Any, trace: Trace) -> None:
    model, optimizer = trace()
    plainly = Plainly(model)
    torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1])  # made, and never stepped
    for number, lr in enumerate((0.1, 0.05, 0.0)):
        batch = batch_of(samba, number)
        samba.session.run(batch, model.output_tensors, hyperparam_dict={"lr": lr})
        plainly.step(batch, lr=lr)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def _trained(samba: Any, model: Any, plainly: Plainly, numbers: range) -> None:
    for number in numbers:
        samba.session.run(batch_of(samba, number), model.output_tensors)
        plainly.step(batch_of(samba, number))


@pytest.mark.parametrize("loaded", ["before trace_graph", "after trace_graph, then to_device()"])
def test_checkpoints(loaded: str, samba: Any, trace: Trace, pef_of: Callable[..., str]) -> None:
    model, optimizer = trace()
    plainly = Plainly(model)
    _trained(samba, model, plainly, range(2))
    samba.session.to_cpu(model, [optimizer])
    state = {
        "completed_steps": 2,
        "completed_epochs": 0,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, "2.pt")
    resumed = samba.from_torch_model_(LogReg())
    resumed.state = {"completed_steps": 0}
    again = samba.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    if loaded.startswith("after"):
        samba.utils.trace_graph(resumed, batch_of(samba), again, pef=pef_of())
    checkpoint = torch.load("2.pt")
    resumed.state["completed_steps"] = checkpoint["completed_steps"]
    resumed.load_state_dict(checkpoint["model"])
    again.load_state_dict(checkpoint["optimizer"])
    if loaded == "before trace_graph":
        samba.utils.trace_graph(resumed, batch_of(samba), again, pef=pef_of())
    else:
        samba.session.to_device()
    _trained(samba, resumed, plainly, range(2, 4))
    samba.session.to_cpu(resumed)
    assert same_weights(resumed, plainly.model)


def test_weights_are_saved_and_read_entry_by_entry(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.run(batch, model.output_tensors)
    samba.session.to_cpu(model)
    torch.save(model.state_dict(), "weights.pt")
    read = {name: value.torch_tensor() for name, value in torch.load("weights.pt").items()}
    other = LogReg()
    kept = {name: value for name, value in read.items() if name in ("lin_layer.weight", "fc.weight", "fc.bias")}
    other.load_state_dict(kept, strict=False)
    assert equal(other.lin_layer.weight, model.lin_layer.weight)
    torch.save({"outputs": samba.session.run(batch, section_types=["fwd"])[1]}, "outputs.pt")
    assert torch.load("outputs.pt")["outputs"].torch_tensor().shape == (BATCH, CLASSES)


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


def test_evaluation_on_the_device(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    plainly = Plainly(model)
    gold = plainly.model(*map(samba.to_torch, batch))
    by_forward = samba.session.run(batch, model.output_tensors, section_types=["fwd"])
    by_rate_0 = samba.session.run(batch, model.output_tensors, hyperparam_dict={"lr": 0.0})
    assert equal(by_forward[1], gold[1])
    assert equal(by_rate_0[1], gold[1])
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_inference_is_typed_to_compile_and_to_run(samba: Any) -> None:
    app, pef = Starter(samba, inputs_first=True), "--pef=out/net/net.pef"
    app.main(["compile", f"-b={BATCH}", "--inference", "--pef-name=net"])
    args = parsed("run", pef, "--inference")
    model = samba.from_torch_model_(seeded(LogReg)).eval()
    inputs = batch_of(samba, size=args.batch_size)
    samba.utils.trace_graph(model, inputs, None if args.inference else 1, pef=args.pef)
    _, out = samba.session.run(input_tensors=inputs, output_tensors=model.output_tensors)
    assert equal(out, model(*map(samba.to_torch, inputs))[1])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_is_one_number_or_one_for_each_sample(
    reduction: str, samba: Any, batch: list[Any], trace: Trace
) -> None:
    model, _ = trace(LogReg, reduction=reduction)
    gold = model(*map(samba.to_torch, batch))[0].detach()
    loss, outputs = samba.session.run(batch, model.output_tensors)
    assert loss.mean() == gold.mean()
    assert f"{torch.mean(loss):.4f}" == f"{gold.mean():.4f}"
    assert [loss.tolist()] == [gold.tolist()]
    assert loss.mean().item() == gold.mean().item()
    assert samba.to_torch(loss).float().mean() == gold.mean()
    labels = samba.to_torch(batch[1])
    assert (torch.max(outputs.data, 1)[1] == labels).sum() == (outputs.torch().argmax(1) == labels).sum()
    assert outputs.ge(0.0).repeat(2, 1).view(-1).shape == (2 * BATCH * CLASSES,)


def test_a_mapping_of_spatial_batches_repeats_inputs_on_dimension_0(samba: Any, trace: Trace) -> None:
    args = parsed("compile", "-b=2", "--mapping", "spatial", "--num-spatial-batches", "2")
    args.batch_size *= args.num_spatial_batches
    image, label = (samba.to_torch(one)[:2].repeat(2, *[1] * (one.ndim - 1)) for one in batch_of(samba))
    model, _ = trace()
    plainly = Plainly(model)
    samba.session.run([image, label], model.output_tensors)
    plainly.step([image, label])
    assert image.size(0) == args.batch_size
    assert equal(model.lin_layer.weight.sn_data, plainly.model.lin_layer.weight)


def test_the_input_of_the_host_is_rounded_as_that_of_the_device(samba: Any) -> None:
    model = samba.from_torch_model_(seeded(LogReg))
    images = samba.randn(BATCH, FEATURES, name="image", batch_dim=0).bfloat16().float()
    inputs = [images, batch_of(samba)[1]]
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, inputs, optimizer, name="net", config_dict={"dtype": "bf16"})
    samba.utils.trace_graph(model, inputs, optimizer, pef=pef)
    gold = copy.deepcopy(model)(*map(samba.to_torch, inputs))
    loss, out = samba.session.run(inputs, model.output_tensors)
    samba.utils.assert_close(loss, gold[0], "loss", threshold=3e-2)
    samba.utils.assert_close(out.float(), plain(gold[1]), "out", threshold=3e-2)


def test_the_last_batch_is_not_dropped(samba: Any, trace: Trace) -> None:
    model, _ = trace()
    with refused("AP01", "3 samples", "drop_last=True"):
        samba.session.run(batch_of(samba, size=3), model.output_tensors)


@pytest.mark.parametrize("command", ["compile", "run"])
def test_a_process_alone_asks_torch_distributed_for_its_rank(command: str, samba: Any) -> None:
    args = parsed(command, *([] if command == "compile" else ["--pef=out/net/net.pef"]))
    args.local_rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else -1
    assert args.local_rank <= 0
    assert samba.utils.is_main_process()
    sampler: DistributedSampler[Any] = DistributedSampler(_dataset(), num_replicas=1)
    assert sorted(sampler) == [*range(3 * BATCH)]
    assert args.world_size == 1
