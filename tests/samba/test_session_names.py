"""The names of a session that apps use, each once."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.samba.harness import LogReg, Made, Plainly, batch_of, equal, parsed, refused, same_weights, seeded

RUNS = {
    "session.run(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h, **parallel)": 0.5,
    "session.run(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h)": 0.5,
    "session.run(input_tensors=[a, b], output_tensors=X, data_parallel=False, data_parallel_mode='normal')": 0.1,
    "session.run((a, b), X)": 0.1,
    "model.run([a, b], hyperparam_dict=h)": 0.5,
    "model.run(a, b)": 0.1,
    "model.run([a, b])": 0.1,
}
"""Call shapes of the census, and the learning rate of each."""


@pytest.mark.parametrize("call", RUNS)
def test_a_whole_step(call: str, samba: Any, logreg: Made, logreg_pef: str) -> None:
    args = parsed("run", f"--pef={logreg_pef}")
    model, _ = logreg
    plainly = Plainly(model)
    for number in range(2):
        a, b = batch_of(samba, number)
        parallel = {"data_parallel": args.data_parallel, "reduce_on_rdu": args.reduce_on_rdu}
        names = {"a": a, "b": b, "X": model.output_tensors, "h": {"lr": 0.5}, "parallel": parallel}
        outputs = eval(call, {"session": samba.session, "model": model, **names})
        assert all(map(equal, outputs, plainly.step((a, b), lr=RUNS[call])))
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


@pytest.mark.parametrize("method", ["session.to_cpu", "model.cpu", "model.write_host_params"])
def test_weights_come_to_the_host(method: str, samba: Any, batch: list[Any], logreg: Made) -> None:
    model, optimizer = logreg
    plainly = Plainly(model)
    samba.session.run(batch, model.output_tensors)
    plainly.step(batch)
    if method == "session.to_cpu":
        samba.session.to_cpu(model, [optimizer])
    else:
        getattr(model, method.partition(".")[2])()
    assert same_weights(model, plainly.model)


def test_session_setup_and_reset(samba: Any, batch: list[Any]) -> None:
    cfg = parsed("compile", "--pef-name=by_setup", "--output-folder=pefs")
    samba.session.setup(cfg)
    model = samba.from_torch_model_(seeded(LogReg))
    pef = samba.session.compile(model, batch, samba.optim.SGD(model.parameters(), lr=0.1), name="net")
    assert pef.endswith("pefs/by_setup/by_setup.pef")
    samba.session.setup(vars(cfg))
    samba.session.reset()
    with refused("no PEF is loaded"):
        samba.session.run(batch)


WITHOUT_EFFECT = [
    *(f"session.{name}" for name in ("enable_pinned_memory", "disable_graphamp", "use_static_functional")),
    *(f"env.{name}" for name in ("enable_conv_grad_accum_stoc", "enable_addbias_grad_accum_stoc", "disable_sgd_stoc")),
    *(f"utils.{name}" for name in ("fix_rdu_affinity", "create_mac_resource_report")),
]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_names_without_an_effect(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    owner, _, function = name.partition(".")
    getattr(getattr(samba, owner), function)()
    assert f"{name} has no effect" in capsys.readouterr().err


def test_patched_torch_and_is_internal(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, _ = logreg
    with samba.patched_torch():
        gold = model(*map(samba.to_torch, batch))
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])
    args = parsed("compile")
    assert samba.is_internal() is False
    assert not (samba.is_internal() and args.resource_report_path)


def test_sn_grad_of_parameters_and_inputs(samba: Any) -> None:
    model = samba.from_torch_model_(seeded(LogReg))
    inputs = batch_of(samba)
    inputs[0].requires_grad = True
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    samba.utils.trace_graph(model, inputs, optimizer, pef=samba.session.compile(model, inputs, optimizer, name="net"))
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


def test_sn_data_of_weights_after_one_run(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, _ = logreg
    samba.session.run(batch, model.output_tensors)
    on_device = {name: param.sn_data for name, param in model.named_parameters()}
    assert not equal(on_device["lin_layer.weight"], model.lin_layer.weight)
    samba.session.to_cpu(model)
    assert equal(on_device["lin_layer.weight"], model.lin_layer.weight)


def test_profiles_of_a_session(samba: Any, batch: list[Any], logreg: Made) -> None:
    model, _ = logreg
    for args, keywords in (((), {"filename": "profile.json"}), (("profile2.json",), {})):
        samba.session.start_samba_profile()
        samba.session.run(batch, model.output_tensors)
        samba.session.end_samba_profile(*args, **keywords)
    names = [event["name"] for event in json.loads(Path("profile2.json").read_text())]
    assert names.count("samba_profile") >= 2
    samba.session.start_runtime_profile()
    samba.session.end_runtime_profile("file.log")
    assert Path("file.log").is_file()
