"""Checking, profiling, reports and the rest: the rows of the census."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.samba.census.support import (
    BATCH,
    LogReg,
    OnlyOut,
    batch_of,
    equal,
    imported,
    parsed,
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


def test_get_pefmeta_and_get_pefmeta_dict(samba: Any, batch: list[Any]) -> None:
    args, model = parsed("compile", "-b=4"), seeded(LogReg)
    pef_utils = samba.utils.pef_utils
    meta = pef_utils.get_pefmeta(args, model)
    meta["sambaflow_version"] = imported("samba.utils").__name__
    meta["input_shapes"] = str([tuple(one.shape) for one in batch])
    assert meta["batch_size"] == "4"
    assert "lin_layer" in meta["model_repr"]
    assert pef_utils.get_pefmeta_dict({"batch_size": 4}, model)["batch_size"] == "4"


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


@pytest.mark.parametrize("name", ["fix_rdu_affinity", "create_mac_resource_report"])
def test_functions_of_the_vendors_machine(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.utils, name)(parsed("compile"))
    assert f"utils.{name} has no effect" in capsys.readouterr().err


def test_ranks_of_a_process_alone(samba: Any) -> None:
    utils = samba.utils
    assert (utils.get_rank(), utils.get_world_size(), utils.is_main_process()) == (0, 1, True)


@pytest.mark.parametrize("name", ["enable_conv_grad_accum_stoc", "enable_addbias_grad_accum_stoc", "disable_sgd_stoc"])
def test_switches_of_stochastic_rounding(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.env, name)()
    assert f"env.{name} has no effect" in capsys.readouterr().err
