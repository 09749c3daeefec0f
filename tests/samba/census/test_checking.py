"""Checking, profiling, reports and the rest: the rows of the census."""

import copy
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

from tests.samba.census.support import (
    BATCH,
    LogReg,
    OnlyOut,
    batch_of,
    equal,
    imported,
    parsed,
    plain,
    refused,
    same_weights,
    seeded,
)

Trace = Callable[..., Any]

CLOSE = {
    "(a, b, 'name', threshold=x, visualize=args.visualize)": 1e-3,
    "(b, a, 'name', threshold=x, visualize=args.visualize)": 1e-3,
    "(a, b, 'name', threshold=x)": 1e-3,
    "(a, b, 'name', x)": 1e-3,
    "(a, b, 'name', x, rtol, visualize=args.visualize)": 1e-3,
    "(a, b, 'name', threshold=x, rtol=0.01)": 1e-3,
    "(a, b, 'name', threshold=x, rtol=1.5)": 3.1,
    "(a, b, 'name', visualize=args.visualize)": 3e-3,
}


@pytest.mark.parametrize("shape", CLOSE)
def test_assert_close(shape: str, samba: Any) -> None:
    gold = torch.tensor([0.0, 2.0])
    rtol = {"rtol=0.01": 0.01, "rtol=1.5": 1.5, "x, rtol,": 0.1}
    relative = next((value for words, value in rtol.items() if words in shape), 0.0)
    names = {"args": parsed("compile"), "x": CLOSE[shape], "rtol": 0.1, "assert_close": samba.utils.assert_close}
    gold_first = shape.startswith("(b, a")
    for factor, passes in ((0.9, True), (1.1, False)):
        found = samba.from_torch_tensor(gold + factor * (CLOSE[shape] + relative * gold))
        names |= {"a": found, "b": gold}
        if passes:
            eval(f"assert_close{shape}", names)
        else:
            with pytest.raises(AssertionError, match="name: 2 of 2 elements differ"):
                eval(f"assert_close{shape}", names)
    assert gold_first is ("(b" in shape)


def test_sn_grad_of_parameters_and_inputs(samba: Any) -> None:
    model = samba.from_torch_model_(seeded(LogReg))
    inputs = batch_of(samba)
    inputs[0].requires_grad = True
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, inputs, optimizer, name="net")
    samba.utils.trace_graph(model, inputs, optimizer, pef=pef)
    gold = copy.deepcopy(model)
    image = samba.to_torch(inputs[0]).detach().requires_grad_()
    gold(image, samba.to_torch(inputs[1]))[0].mean().backward()
    samba.session.run(inputs, model.output_tensors, section_types=["fwd", "bckwd"])
    for (name, param), gold_param in zip(model.named_parameters(), gold.parameters(), strict=True):
        samba.utils.assert_close(param.sn_grad, gold_param.grad, f"{name}__grad", threshold=1e-6)
        samba.utils.assert_close(param, gold_param, name, threshold=0.0)
        assert equal(param.sn_grad, gold_param.grad)
    assert equal(model.lin_layer.weight.sn_grad, gold.lin_layer.weight.grad)
    assert equal(inputs[0].sn_grad, image.grad)


@pytest.mark.parametrize("gradient", ["torch fp32 grad", "SambaTensor", "per-token scale"])
def test_sn_grad_is_set_on_an_output(gradient: str, samba: Any, batch: list[Any], trace: Trace) -> None:
    if gradient == "per-token scale":
        model, _ = trace(LogReg, reduction="none")
        output, start, inputs = model.output_tensors[0], torch.tensor([0.0, 1.0, 2.0, 3.0]), batch
    else:
        model, _ = trace(OnlyOut)
        output, start, inputs = model.output_tensors[0], torch.randn(BATCH, 64), batch[:1]
    gold = copy.deepcopy(model)
    found = gold(*map(samba.to_torch, inputs))
    (found[0] if isinstance(found, tuple) else found).backward(start)
    output.sn_grad = samba.from_torch_tensor(start) if gradient == "SambaTensor" else start
    samba.session.run(inputs, model.output_tensors, section_types=["fwd", "bckwd"])
    assert equal(model.lin_layer.weight.sn_grad, gold.lin_layer.weight.grad)


def test_sn_data_of_weights_after_one_run(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.run(batch, model.output_tensors)
    on_device = {name: param.sn_data for name, param in model.named_parameters()}
    assert not equal(on_device["lin_layer.weight"], model.lin_layer.weight)
    samba.session.to_cpu(model)
    assert equal(on_device["lin_layer.weight"], model.lin_layer.weight)


def test_weight_norm_(samba: Any) -> None:
    model = seeded(LogReg)
    before = plain(model.lin_layer.weight).clone()
    samba.utils.weight_norm_(model.lin_layer)
    torch.testing.assert_close(plain(model.lin_layer.weight), before)
    assert len([*model.parameters()]) == 3


def test_test_with_gold(samba: Any, pef_of: Callable[..., str]) -> None:
    for _ in range(2):  # the file is written, and compared with
        args = parsed("test", f"--pef={pef_of()}", "--gold-file-path=gold.safetensors")
        model = samba.from_torch_model_(seeded(LogReg))
        optimizer = samba.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if args.gold_file_path:
            gold = samba.test.TestWithGold(args, "logreg", model, None, optimizer).test()
        assert Path("gold.safetensors").is_file()
        assert len(gold) == 2
    with torch.no_grad():
        model.lin_layer.bias.add_(1.0)
    samba.session.to_device(model)
    with pytest.raises(AssertionError, match="logreg: "):
        samba.test.TestWithGold(args, "logreg", model, None, optimizer).test()


def test_consistency_test(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    drawn: list[float] = []

    @samba.test.consistency_test()  # type: ignore[untyped-decorator]  # it is Any here
    def test(args: Namespace, model: Any, inputs: Any, outputs: Any) -> list[tuple[str, Any]]:
        loss, out = samba.session.run(inputs, outputs)
        return [("loss", loss), ("out", out), *model_weights(model)]

    def model_weights(model: Any) -> list[tuple[str, Any]]:
        return [(name, param.sn_data) for name, param in model.named_parameters()]

    results = test(parsed("compile"), model, batch, model.output_tensors)
    assert equal(results[0][1], model(*map(samba.to_torch, batch))[0])

    @samba.test.consistency_test()  # type: ignore[untyped-decorator]
    def differs(args: Namespace, model: Any, inputs: Any, outputs: Any) -> list[tuple[str, Any]]:
        drawn.append(len(drawn))
        return [("drawn", torch.tensor(drawn[-1]))]

    with pytest.raises(AssertionError, match="drawn differs between two runs"):
        differs(parsed("compile"), model, batch, model.output_tensors)


REPORTS: list[dict[str, Any]] = [
    {"val_metrics": {"acc": 97.5, "loss": 0.1}, "batch_size": 4, "num_iterations": 10},
    {"val_accuracy": 97.5, "batch_size": 4, "num_iterations": 10},
    {"train_metrics": {"acc": 99.0}, "val_metrics": {"acc": 97.5}, "batch_size": 4},
    {"train_metrics": {"acc": 99.0}, "val_metrics": {"acc": 97.5}, "batch_size": 4, "num_iterations": 10},
]


@pytest.mark.parametrize("figures", REPORTS, ids=[", ".join(one) for one in REPORTS])
def test_accuracy_report(figures: dict[str, Any], samba: Any) -> None:
    args = parsed("run", "--pef=x", "--acc-report-json=report.json")
    samba.utils.benchmark_acc.AccuracyReport(**figures).save(args.acc_report_json)
    assert json.loads(Path("report.json").read_text()) == figures


def test_get_pefmeta_and_get_pefmeta_dict(samba: Any, batch: list[Any]) -> None:
    args, model = parsed("compile", "-b=4"), seeded(LogReg)
    pef_utils = samba.utils.pef_utils
    meta = pef_utils.get_pefmeta(args, model)
    meta["sambaflow_version"] = imported("samba.utils").__name__
    meta["input_shapes"] = str([tuple(one.shape) for one in batch])
    assert meta["batch_size"] == "4"
    assert "lin_layer" in meta["model_repr"]
    assert pef_utils.get_pefmeta_dict({"batch_size": 4}, model)["batch_size"] == "4"


def test_dataset_transform(samba: Any) -> None:
    mnist = samba.utils.dataset.mnist
    image = np.arange(16, dtype=np.uint8).reshape(4, 4)
    gold = (torch.arange(16.0) / 255 - 0.1307) / 0.3081
    for args in (Namespace(num_features=16), vars(Namespace(num_features=16)), {"num_features": 16}):
        torch.testing.assert_close(mnist.dataset_transform(args)(image), gold)
    assert mnist.dataset_transform(parsed("compile"))(image).shape == (1, 4, 4)


def _write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        sizes = b"".join(number.to_bytes(4, "big") for number in (8, 4, 4))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + bytes(range(128)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + bytes(range(8)))


def test_prepare_dataloader(samba: Any) -> None:
    mnist = imported("samba.utils.dataset.mnist")
    _write_mnist(Path("data/MNIST/raw"))
    args = Namespace(batch_size=4, num_features=16, data_dir="data")
    train, test = mnist.prepare_dataloader(vars(args))
    assert [tuple(one.shape) for one in next(iter(train))] == [(4, 16), (4,)]
    assert next(iter(test))[1].tolist() == [0, 1, 2, 3]
    train_ds, eval_ds = TensorDataset(torch.randn(8, 16)), TensorDataset(torch.arange(8))
    train, test = mnist.prepare_dataloader(vars(args), train_ds, eval_ds)
    assert len(train) == 2
    assert next(iter(test))[0].tolist() == [0, 1, 2, 3]


def test_measure_performance(samba: Any, batch: list[Any], trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = trace()
    throughput, latency = samba.utils.measure_performance(
        model, batch, BATCH, 1, False, run_graph_only=False, n_iterations=2, json="figures.json",
        compiled_stats_json=None, data_parallel=False, reduce_on_rdu=False, use_sambaloader=True, min_duration=0,
    )  # fmt: skip
    assert throughput == pytest.approx(BATCH / latency)
    assert json.loads(Path("figures.json").read_text())["steps"] == 2
    assert "2 steps" in capsys.readouterr().out
    samba.utils.measure_performance(
        model,
        batch,
        BATCH,
        1,
        True,
        run_graph_only=True,
        n_iterations=1,
        set_output_grads=False,
        json_counters="c.json",
    )
    samba.utils.measure_performance(model, batch, BATCH, world_size=1, n_iterations=1)


def test_measure_sections(samba: Any, batch: list[Any], trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = trace()
    samba.utils.measure_sections(
        model, batch, num_sections=3, n_iterations=2, batch_size=BATCH, data_parallel=False, reduce_on_rdu=False,
        json=None, min_duration=0,
    )  # fmt: skip
    out = capsys.readouterr().out
    assert all(kind in out for kind in ("FWD", "BCKWD", "OPT"))


def test_the_throughput_of_an_app_is_held_against_min_throughput(
    samba: Any, batch: list[Any], trace: Trace, pef_of: Callable[..., str]
) -> None:
    args = parsed("measure-performance", f"--pef={pef_of()}", "--min-throughput=1e12")
    model, _ = trace()
    with pytest.raises(AssertionError, match="--min-throughput"):
        samba.utils.measure_performance(model, batch, args.batch_size, n_iterations=1)


@pytest.mark.parametrize("seed", [256, 42, 0])
def test_set_seed(seed: int, samba: Any) -> None:
    samba.utils.set_seed(seed)
    found = torch.rand(3)
    torch.manual_seed(seed)
    assert equal(found, torch.rand(3))


def test_get_file_dir(samba: Any) -> None:
    assert samba.utils.get_file_dir(__file__) == str(Path(__file__).parent)


def test_profiles_of_a_session(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    for end in ({"filename": "profile.json"}, ["profile2.json"]):
        samba.session.start_samba_profile()
        samba.session.run(batch, model.output_tensors)
        samba.session.end_samba_profile(**end) if isinstance(end, dict) else samba.session.end_samba_profile(*end)
    names = [event["name"] for event in json.loads(Path("profile2.json").read_text())]
    assert names.count("samba_profile") >= 2
    for _ in range(2):
        samba.session.start_runtime_profile()
        samba.session.end_runtime_profile("file.log")
    assert Path("file.log").is_file()


def test_events_of_the_profiler(samba: Any) -> None:
    profiler = samba.session.profiler
    before = len(profiler.events)

    class Trainer:
        @profiler.event("train_step")  # type: ignore[untyped-decorator]  # it is Any here
        def step(self) -> int:
            return 7

    handles = [
        profiler.start_event(name) for name in ("data_step", "compute_step", "get_outputs", "app_setup", "compile")
    ]
    for handle in handles:
        profiler.end_event(handle)
    assert Trainer().step() == Trainer().step() == 7
    with profiler.event("data_step"):
        pass
    keys = ["data_step", "train_step"]
    assert len(profiler.events) - before == 8
    told = profiler.print_statistics(keys, 0, num_samples_per_iter=BATCH)
    assert "data_step: 2 times" in told
    assert "samples/s" in told
    assert "samples/s" not in profiler.print_statistics(keys, measurements=["latency"])
    assert profiler.get_throughputs(["train_step"], BATCH)["train_step"] > 0


def test_profiler_class() -> None:
    profiler = imported("samba.profiler").Profiler()
    profiler.end_event(profiler.start_event("epoch"))
    assert [event.name for event in profiler.events] == ["epoch"]


def test_dump_accuracy_debug_info(samba: Any, batch: list[Any], trace: Trace, pef_of: Callable[..., str]) -> None:
    args = parsed("run", f"--pef={pef_of()}")
    model, _ = trace()
    traced_outputs = samba.session.run(batch, model.output_tensors)
    path = samba.utils.tensorboard_debug.dump_accuracy_debug_info(args, model, batch, traced_outputs)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert any("logreg__lin_layer__weight" in row.values() for row in rows)


@pytest.mark.parametrize("name", ["fix_rdu_affinity", "create_mac_resource_report"])
def test_functions_of_the_vendors_machine(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.utils, name)(parsed("compile"))
    assert f"utils.{name} has no effect" in capsys.readouterr().err


def test_save_tensors(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.run(batch, model.output_tensors)
    saved = samba.utils.checkpoint.save_tensors([model.lin_layer.weight])
    assert equal(saved["logreg__lin_layer__weight"], model.lin_layer.weight.sn_data)


def test_ranks_of_a_process_alone(samba: Any) -> None:
    utils = samba.utils
    assert (utils.get_rank(), utils.get_world_size(), utils.is_main_process()) == (0, 1, True)


def test_load_sharded_checkpoint(samba: Any) -> None:
    gold, model = seeded(LogReg), LogReg()
    save_file({name: value.bfloat16() for name, value in gold.state_dict().items()}, "model.safetensors")
    load = samba.utils.checkpoint.load_sharded_checkpoint
    with refused("torch.bfloat16", "ignore_dtype_mismatch=True"):
        load(model, ".")
    load(model, ".", ignore_dtype_mismatch=True)
    assert same_weights(model, gold.bfloat16().float())


@pytest.mark.parametrize("name", ["enable_conv_grad_accum_stoc", "enable_addbias_grad_accum_stoc", "disable_sgd_stoc"])
def test_switches_of_stochastic_rounding(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.env, name)()
    assert f"env.{name} has no effect" in capsys.readouterr().err
