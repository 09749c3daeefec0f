"""session.run and what apps do around it: the call shapes of the census. Data-parallel ones are in replicas.py too."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.samba.census.support import (
    BATCH,
    CLASSES,
    FEATURES,
    Dropouts,
    LogReg,
    OnlyOut,
    Plainly,
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

RUNS = [
    "(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h, **parallel)",
    "(input_tensors=(a, b), output_tensors=X, hyperparam_dict=h)",
    "(input_tensors=[a, b], output_tensors=X, hyperparam_dict=h)",
    "(input_tensors=[a, b], output_tensors=X)",
    "(input_tensors=[a, b], output_tensors=X, **parallel)",
    "(input_tensors=[a, b], output_tensors=X, data_parallel=False, data_parallel_mode='normal')",
    "([a, b], X)",
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


@pytest.mark.parametrize("kinds", [["fwd"], ["FWD"]])
@pytest.mark.parametrize("positional", [False, True])
def test_section_types_fwd(kinds: list[str], positional: bool, samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    gold = model(*map(samba.to_torch, batch))
    if positional:
        outputs = samba.session.run(batch, section_types=kinds)
    else:
        outputs = samba.session.run(input_tensors=batch, output_tensors=model.output_tensors, section_types=kinds)
    assert all(equal(*pair) for pair in zip(outputs, gold, strict=True))
    before = copy.deepcopy(model)
    samba.session.to_cpu(model)
    assert same_weights(model, before)


@pytest.mark.parametrize("kinds", [[["bckwd", "opt"]], [["bckwd"], ["opt"]], [["bckwd", "reduce"], ["opt"]]])
def test_section_types_of_the_backward(kinds: list[list[str]], samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    plainly = Plainly(model)
    outputs = model.output_tensors
    samba.session.run(input_tensors=batch, output_tensors=outputs, section_types=["fwd"])
    for kind in kinds:
        samba.session.run(input_tensors=batch, output_tensors=outputs, hyperparam_dict={"lr": 0.5}, section_types=kind)
    plainly.step(batch, lr=0.5)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


@pytest.mark.parametrize("rest", [(), (None,)], ids=["[t]", "[t, None]"])
def test_grad_of_outputs(rest: tuple[None, ...], samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace(LogReg, reduction="none")
    plainly = Plainly(model)
    t = torch.tensor([0.5, 0.0, 2.0, -1.0])
    samba.session.run(input_tensors=batch, output_tensors=model.output_tensors, section_types=["fwd"])
    samba.session.run(
        input_tensors=batch,
        output_tensors=model.output_tensors,
        section_types=["bckwd", "opt"],
        grad_of_outputs=[samba.from_torch_tensor(t), *rest],
    )
    plainly.step(batch, t)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_the_second_argument_is_one_samba_tensor_and_the_result_is_indexed(
    samba: Any, batch: list[Any], trace: Trace
) -> None:
    model, _ = trace()
    loss = samba.session.run(batch, model.output_tensors[0])[0]
    assert equal(loss, Plainly(model).step(batch)[0])


def test_graph_name_and_the_result_by_name(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.run(input_tensors=batch, graph_name="prefill")
    (out,) = samba.session.get_tensors_by_name([model.output_tensors[1].sn_name])
    assert equal(out, Plainly(model).step(batch)[1])


def test_data_parallel_mode_and_the_result_by_get_tensors(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    outputs = model.output_tensors
    samba.session.run(input_tensors=batch, output_tensors=outputs, data_parallel_mode="normal")
    loss, out = samba.session.get_tensors(outputs)
    gold = Plainly(model).step(batch)
    assert equal(loss, gold[0])
    assert equal(out, gold[1])


def test_a_misspelt_keyword_is_a_bug_of_the_app(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    with refused("session.run takes no imput_tensors", "input_tensors="):
        samba.session.run(imput_tensors=batch, output_tensors=model.output_tensors)


def test_results_are_unpacked_indexed_zipped_and_ignored(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    gold = model(*map(samba.to_torch, batch))
    run: Callable[[], Any] = lambda: samba.session.run(batch, model.output_tensors, section_types=["fwd"])  # noqa: E731
    loss, outputs = run()
    run()
    assert equal(run()[0], loss)
    for found, expected in zip([loss, outputs], gold, strict=True):
        samba.utils.assert_close(found, expected, "outputs", threshold=1e-6)


MODEL_RUNS = {
    "([a, b], hyperparam_dict=h)": 0.5,
    "(a, b)": 0.1,
    "([a, b])": 0.1,
}


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


def test_model_run_of_a_model_without_a_loss(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace(OnlyOut)
    plainly = Plainly(model)
    x, g = batch[0], torch.randn(BATCH, CLASSES)
    out = model.run((x,), section_types=["fwd"])[0]
    out = model.run((x,), section_types=["bckwd", "opt"], grad_of_outputs=[g])[0]
    assert equal(out, plainly.step((x,), g)[0])
    again = model.run((x,), grad_of_outputs=[g])[0]
    assert equal(again, plainly.step((x,), g)[0])
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_model_output_tensors_after_trace_graph(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace(LogReg, reduction="none")
    plainly = Plainly(model)
    scale = torch.tensor([1.0, 2.0, 0.0, 0.5])
    model.output_tensors[0].sn_grad = scale
    samba.session.run(batch, model.output_tensors)
    plainly.step(batch, scale)
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


def test_to_device(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    with torch.no_grad():
        model.lin_layer.weight.zero_()
    samba.session.to_device()
    plainly = Plainly(model)
    samba.session.run(batch, model.output_tensors)
    plainly.step(batch)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_get_tensors_by_name_of_a_weight_normed_layer(samba: Any, batch: list[Any]) -> None:
    model = seeded(LogReg)
    samba.utils.weight_norm_(model.lin_layer)
    gold = model(*map(samba.to_torch, batch))
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, batch, optimizer, name="net")
    samba.utils.trace_graph(model, batch, optimizer, pef=pef)
    _, out = samba.session.run(batch, model.output_tensors, section_types=["fwd"])
    torch.testing.assert_close(plain(out), plain(gold[1]))
    names = ["logreg__lin_layer__weight_magnitude", "logreg__lin_layer__weight_direction"]
    magnitude, direction = samba.session.get_tensors_by_name(names)
    composed = magnitude.data * direction.data / direction.data.norm(dim=1, keepdim=True)
    torch.testing.assert_close(plain(composed), plain(model.lin_layer.weight))


def test_get_tensors_by_name_of_an_output_of_a_module(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    _, out = samba.session.run(batch, model.output_tensors, section_types=["fwd"])
    found = samba.session.get_tensors_by_name([model.output_tensors[1].sn_name])[0].data
    assert equal(found, out)


def test_dropout_rates_are_arguments(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace(Dropouts)
    names = samba.session.get_dropout_rate_argin_names()
    assert len([name for name in names if "dropout2d" in name]) == 1
    rates = dict.fromkeys(names, 0.0)
    plainly = Plainly(model)
    plainly.model.eval()
    samba.session.run(batch, model.output_tensors, hyperparam_dict={"lr": 0.1, **rates})
    plainly.step(batch)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_p_of_hyperparam_dict_is_the_rate_of_all_dropouts(p: float, samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace(Dropouts)
    plainly = Plainly(model)
    plainly.model.drop.p = plainly.model.drop2.p = p
    torch.manual_seed(3)
    samba.session.run(batch, model.output_tensors, hyperparam_dict={"p": p})
    torch.manual_seed(3)
    plainly.step(batch)
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)


def test_tracing_is_assigned_before_a_reference_run(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.tracing = False
    gold = model(*map(samba.to_torch, batch))
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])


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


@pytest.mark.parametrize("name", ["add_aux_tensor", "is_valid_aux_tensor_name", "_add_directives", "_traced_tensors"])
def test_internals_that_are_absent(name: str, samba: Any) -> None:
    with refused(f"session has no {name}"):
        getattr(samba.session, name)("x")


def test_optim_dict_and_tensor_dict(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, optimizer = trace()
    samba.session.run(batch, model.output_tensors, section_types=["fwd", "bckwd"])
    gold = copy.deepcopy(model)
    gold(*map(samba.to_torch, batch))[0].backward()
    assert [*samba.session.optim_dict.values()] == [optimizer]
    assert equal(samba.session.tensor_dict["inputs"]["image"], batch[0])
    grads = {name.removesuffix("__grad"): grad for name, grad in samba.session.tensor_dict["grads"].items()}
    assert equal(grads["logreg__lin_layer__weight"], gold.lin_layer.weight.grad)


def test_ctx_set_tensors(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    samba.session.ctx.set_tensors({"logreg__lin_layer__bias": np.ones(CLASSES, np.float32)})
    plainly = Plainly(model)
    nn.init.ones_(plainly.model.lin_layer.bias)
    assert equal(samba.session.run(batch, model.output_tensors)[0], plainly.step(batch)[0])


def test_patched_torch_and_is_internal(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
    with samba.patched_torch():
        gold = model(*map(samba.to_torch, batch))
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])
    args = parsed("compile")
    assert samba.is_internal() is False
    assert not (samba.is_internal() and args.resource_report_path)


@pytest.mark.parametrize("options", [{}, {"quantized": True}])
def test_lazy_param_and_materialize(options: dict[str, Any], samba: Any, batch: list[Any]) -> None:
    lazy_param = imported("samba.lazy_param").lazy_param
    materialize = imported("samba.materialize").materialize
    with lazy_param(**options):
        lazy = LogReg()
    assert lazy.lin_layer.weight.is_meta
    torch.manual_seed(0)
    with materialize(lazy) as model:
        gold = model(*map(samba.to_torch, batch))
    assert equal(model.lin_layer.weight, seeded(LogReg).lin_layer.weight)
    pef = samba.session.compile(model, batch, None, name="net", inference=True)
    samba.utils.trace_graph(model, batch, None, pef=pef)
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])


def test_samba_parameter_of_a_materializer(samba: Any) -> None:
    class Ones:
        def __call__(self) -> Tensor:
            return torch.ones(3, 2)

    make = imported("samba.nn.parameter").SambaParameter
    parameter = make(shape=(3, 2), dtype=torch.float32, materializer=Ones(), requires_grad=False)
    assert isinstance(parameter, nn.Parameter)
    assert equal(parameter, torch.ones(3, 2))
    assert parameter.requires_grad is False


def test_op_fusion_and_sdpa_directives(samba: Any, batch: list[Any]) -> None:
    op_fusion = samba.directives.op_fusion

    class Fused(LogReg):
        def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            fused = op_fusion(func_name="gemm", heuristic="safe", plugins=[], user_annotated=True)
            with fused, samba.directives.sdpa_directives(tile=4):
                return super().forward(inputs, targets)

    model = samba.from_torch_model_(seeded(Fused))
    gold = LogReg.forward(model, *map(samba.to_torch, batch))
    pef = samba.session.compile(model, batch, None, name="net", inference=True)
    samba.utils.trace_graph(model, batch, None, pef=pef)
    assert equal(samba.session.run(batch, model.output_tensors)[0], gold[0])


def test_stir_zipmapreduce_imm_select_and_iteridx(samba: Any, batch: list[Any]) -> None:
    stir = imported("samba.functional.stir")

    def nearest(attrs: Any, x: Tensor) -> Any:
        index = stir.sn_iteridx(attrs=attrs, dim=1, dtype=torch.float32)
        return stir.sn_select(x > stir.sn_imm(0.0, torch.float32), x, index)

    class Least(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            least: Tensor = stir.sn_zipmapreduce(nearest, [image], reduce_func="MIN", reduce_dim=[1])
            return least

    image = samba.to_torch(batch[0])
    gold = torch.where(image > 0, image, torch.arange(FEATURES, dtype=torch.float32)).amin(1)
    pef = samba.session.compile(Least(), batch[:1], None, name="least", inference=True)
    model = Least()
    samba.utils.trace_graph(model, batch[:1], None, pef=pef)
    assert equal(samba.session.run(batch[:1])[0], gold)
