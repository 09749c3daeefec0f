"""Checking, profiling, reports and the rest: the rows of the census."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.samba.census.support import LogReg, batch_of, equal, parsed, seeded

Trace = Callable[..., Any]


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


def test_sn_data_of_weights_after_one_run(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.run(batch, model.output_tensors)
    on_device = {name: param.sn_data for name, param in model.named_parameters()}
    assert not equal(on_device["lin_layer.weight"], model.lin_layer.weight)
    samba.session.to_cpu(model)
    assert equal(on_device["lin_layer.weight"], model.lin_layer.weight)


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


@pytest.mark.parametrize("name", ["fix_rdu_affinity", "create_mac_resource_report"])
def test_functions_of_the_vendors_machine(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.utils, name)(parsed("compile"))
    assert f"utils.{name} has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["enable_conv_grad_accum_stoc", "enable_addbias_grad_accum_stoc", "disable_sgd_stoc"])
def test_switches_of_stochastic_rounding(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.env, name)()
    assert f"env.{name} has no effect" in capsys.readouterr().err
