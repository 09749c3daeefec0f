"""session.run and what apps do around it: the call shapes of the census. Data-parallel ones are in replicas.py too."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.samba.census.support import LogReg, Plainly, batch_of, equal, parsed, refused, same_weights, seeded

Trace = Callable[..., Any]

RUNS = [
    "(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h, **parallel)",
    "(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h)",
    "(input_tensors=[a, b], output_tensors=X, data_parallel=False, data_parallel_mode='normal')",
    "((a, b), X)",
]  # fmt: skip


@pytest.mark.parametrize("shape", RUNS)
def test_a_whole_step(shape: str, samba: Any, trace: Trace, pef_of: Callable[..., str]) -> None:
    args = parsed("run", f"--pef={pef_of()}")
    model, _ = trace()
    plainly, h = Plainly(model), {"lr": 0.5}
    for number in range(2):
        a, b = batch_of(samba, number)
        parallel = {"data_parallel": args.data_parallel, "reduce_on_rdu": args.reduce_on_rdu}
        names = {"a": a, "b": b, "X": model.output_tensors, "h": h, "parallel": parallel, "run": samba.session.run}
        loss, outputs = eval(f"run{shape}", names)
        gold = plainly.step((a, b), lr=h["lr"] if "hyperparam_dict" in shape else None)
        for found, expected in zip((loss, outputs), gold, strict=True):
            assert equal(samba.to_torch(found), expected)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


MODEL_RUNS = {"([a, b], hyperparam_dict=h)": 0.5, "(a, b)": 0.1, "([a, b])": 0.1}


@pytest.mark.parametrize("shape", MODEL_RUNS)
def test_model_run(shape: str, samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    plainly = Plainly(model)
    names = {"a": batch[0], "b": batch[1], "h": {"lr": 0.5}, "model": model}
    loss, out = eval(f"model.run{shape}", names)
    gold = plainly.step(batch, lr=MODEL_RUNS[shape])
    assert equal(loss, gold[0])
    assert equal(out, gold[1])
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


@pytest.mark.parametrize("method", ["session.to_cpu", "model.cpu", "model.write_host_params", "try: to_cpu"])
def test_weights_come_to_the_host(method: str, samba: Any, batch: list[Any], trace: Trace) -> None:
    model, optimizer = trace()
    plainly = Plainly(model)
    samba.session.run(batch, model.output_tensors)
    plainly.step(batch)
    if method == "session.to_cpu":
        samba.session.to_cpu(model, [optimizer])
    elif method == "try: to_cpu":
        try:
            samba.session.to_cpu(model)
        except AttributeError:
            pytest.fail("there is to_cpu")
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


INTERNALS = ["enable_pinned_memory", "disable_graphamp", "use_static_functional"]


@pytest.mark.parametrize("name", INTERNALS)
def test_internals_without_an_effect(name: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(samba.session, name)()
    assert f"session.{name} has no effect" in capsys.readouterr().err


def test_patched_torch_and_is_internal(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    with samba.patched_torch():
        gold = model(*map(samba.to_torch, batch))
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])
    args = parsed("compile")
    assert samba.is_internal() is False
    assert not (samba.is_internal() and args.resource_report_path)
