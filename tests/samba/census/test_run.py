"""Imports, command lines, session.run and what apps do around it: the call shapes of the census."""

import copy
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
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


@pytest.mark.parametrize("method", ["session.to_cpu", "model.cpu", "model.write_host_params"])
def test_weights_come_to_the_host(method: str, samba: Any, batch: list[Any], trace: Trace) -> None:
    model, optimizer = trace()
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


def test_patched_torch_and_is_internal(samba: Any, batch: list[Any], trace: Trace) -> None:
    model, _ = trace()
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
    for args, keywords in (((), {"filename": "profile.json"}), (("profile2.json",), {})):
        samba.session.start_samba_profile()
        samba.session.run(batch, model.output_tensors)
        samba.session.end_samba_profile(*args, **keywords)
    names = [event["name"] for event in json.loads(Path("profile2.json").read_text())]
    assert names.count("samba_profile") >= 2
    samba.session.start_runtime_profile()
    samba.session.end_runtime_profile("file.log")
    assert Path("file.log").is_file()


def test_a_mutually_exclusive_group_and_a_function_that_reads_yaml(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text("rate: 0.5\n")

    def add_args(args: Namespace, file: str = str(path)) -> None:
        rate = float(Path(file).read_text().split()[1])
        group: Any = args.add_mutually_exclusive_group()
        group.add_argument("--rate", type=float, default=rate)
        group.add_argument("--schedule")

    assert parsed("compile", common_parser_fn=add_args).rate == 0.5
    with refused("not allowed with argument", here=False):
        parsed("compile", "--rate=1", "--schedule=cosine", common_parser_fn=add_args)


LINES: dict[str, dict[str, object]] = {
    'compile -b=1 --pef-name="lenet" --output-folder="pef"': {"pef_name": "lenet", "output_folder": "pef"},
    "compile --pef-name myapp.pef -mb 16 --mapping spatial --num-spatial-batches 16": {"pef_name": "myapp"},
    "compile --pef net --data-parallel -ws 2": {"world_size": 2, "pef_name": "net"},
    "compile --mac-v1 --weight-sharing --enable-conv-tiling --mac-v2 --enable-tiling --output-folder .": {},
    "compile --mac-human-decision a.json --compiler-configs-file b.json --num-tiles 4 --use-sambaloader": {},
    "compile --enable-stoc-rounding --dtype bf16": {"enable_stoc_rounding": True},
    "compile --enable-stochastic-rounding --dtype bf16": {"enable_stoc_rounding": True},
    "compile --inference --log-level error -v --debug": {"inference": True},
    "run --pef out/net/net.pef --data-parallel --reduce-on-rdu --num-iterations 3": {"reduce_on_rdu": True},
    "run -p out/net/net.pef -n 3": {"num_iterations": 3},
    "run --inference --pef=net.pef": {"inference": True},
    "measure-performance --pef=net.pef --ws 8": {},
    "measure-performance --pef=net.pef -ws 8 --inference": {"inference": True},
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_taken(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = line.replace('"', "").split()
    if words[0] != "compile":
        words = [word for word in words if word != "--data-parallel"]  # it needs ranks: see replicas.py
    args = parsed(*words)
    assert {name: getattr(args, name) for name in LINES[line]} == LINES[line]


IMPORTS = [  # one of each form; test_fidelity and shim/test_finder check all modules and names
    "from sambaflow import samba; samba.session",
    "import sambaflow.samba as samba; samba.session",
    "import sambaflow; import sambaflow.samba as samba; sambaflow.samba.optim.SGD",
    "import sambaflow.samba.utils as sn_utils; sn_utils.assert_close",
    "from sambaflow import samba; samba.utils.trace_graph; samba.utils.assert_close",
    "import sambaflow.samba.nn as nn; nn.Module, nn.Sequential(nn.Conv2d(1, 1, 3), nn.ConvTranspose2d(1, 1, 2))",
    "import sambaflow.samba.nn as sn; sn.BatchNorm2d(1), sn.MaxPool2d(2), sn.ReLU(inplace=True)",
    "from sambaflow.samba import SambaTensor, to_torch",
    "from sambaflow.samba.utils import assert_close, set_seed, trace_graph, get_rank, get_world_size, is_main_process",
    "from sambaflow.samba.utils.argparser import parse_app_args, parse_yaml_to_args, SambaConfig",
    "import sambaflow.samba.utils.dataset.mnist as mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.dataset import mnist; mnist.prepare_dataloader",
    "from sambaflow.samba.utils.numeric import MAX_BF16_TRUNCATE_NORMAL_REL; assert MAX_BF16_TRUNCATE_NORMAL_REL > 0",
    "import sambaflow.samba.utils as utils; utils.checkpoint.save_tensors",
    "from sambaflow.samba.utils.trainer.samba import train as samba_train",
    "from sambaflow.samba.env import use_mock_samba_runtime; assert use_mock_samba_runtime() is False",
    "from sambaflow.samba.lazy_param import lazy_param, RNGProvider, RNGProviderFactory",
    "from sambaflow.samba.materialize import materialize",
    "from sambaflow.samba.graph import FwdGraph",
    "from sambaflow import __version__, is_demo; assert __version__[0].isdigit()",
    "from sambaflow.logging import samba_logger; samba_logger.info('ready')",
]


def test_an_import_is_executed_as_it_is_typed() -> None:
    for spelling in IMPORTS:
        exec(spelling, {})


def test_imports_in_try_except_pass() -> None:
    names: dict[str, object] = {}
    exec("try:\n    from sambaflow import samba\n    from sambaflow.samba.nothing import it\nexcept:\n    pass", names)
    assert "samba" in names
    assert "it" not in names
