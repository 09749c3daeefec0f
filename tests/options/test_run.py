"""A run's overrides over what a PEF carries: what may change, and what takes a compile."""

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import pytest
import tomli_w

from sambasim.errors import OptionError, PefError
from sambasim.options.compile import compile_options
from sambasim.options.given import given_overrides
from sambasim.options.run import ResolvedRun, resolve_run, run_options

_SERVER = {"host_sync": "parameter-server", "parameter_servers": 1}


def run(flags: Mapping[str, object], overrides: Sequence[str] = (), compiled: Sequence[str] = ()) -> ResolvedRun:
    """A run of the quick start, compiled with `compiled`, through JSON as a PEF carries it."""
    made = compile_options(None, None, compiled, {})
    training, data = json.loads(json.dumps([made.training_defaults(), made.data.model_dump(mode="json")]))
    options = run_options({"pef": "digits", **flags}, given_overrides(overrides))
    return resolve_run(options, training, data, states=[(), ()])


def test_without_overrides_all_is_as_compiled() -> None:
    compiled = compile_options(None, None, [], {})
    assert run({}).changed == ()
    assert run({}).tables == {"data": compiled.data.model_dump(mode="json"), **compiled.training_defaults()}


def test_hyperparameters_schedule_and_loader_may_change() -> None:
    resolved = run(
        {"lr": 0.5, "seed": 3, "workers": 2, "grad_accumulation_steps": 4, "evaluate": False},
        ["optimizer.betas=[0.8, 0.9]", "training.schedule.name=step", "training.schedule.step_size=9"],
    )
    training, schedule = resolved.training, resolved.training.schedule
    assert resolved.optimizer is not None
    numbers = {
        "lr": 0.5,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
        "weight_decay": 0.01,
    }
    assert resolved.optimizer.hyperparameters() == numbers
    assert (schedule.step_size, schedule.warmup_steps) == (9, 20), "warm-up stays when the schedule changes"
    assert (training.seed, training.accumulation_steps, resolved.evaluation.enabled) == (3, 4, False)
    assert resolved.data.workers == 2
    assert "optimizer.lr = 0.5 (compiled: 0.005)" in resolved.changed
    without = run({"momentum": 0.0}, [], ["optimizer.name=sgd", "optimizer.momentum=0.9"])
    assert "optimizer.momentum = 0.0 (compiled: 0.9)" in without.changed


def test_steps_replace_epochs_and_the_reverse() -> None:
    shorter = run({"steps": 7})
    assert (shorter.training.steps, shorter.training.epochs) == (7, None)
    assert shorter.changed == ("training.steps = 7 (compiled: none)",)
    other = run({"epochs": 2}, compiled=["training.epochs=", "training.steps=9"]).training
    assert (other.epochs, other.steps) == (2, None)


def test_another_source_brings_its_own_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled = ["data.source=m:f", "data.args.path=x", "data.evaluation_fraction=0.2", "data.shuffle=false"]
    data = run({"data": "other.npz"}, compiled=compiled).data
    assert data.source == str(tmp_path / "other.npz")
    assert (data.args, data.evaluation_fraction, data.shuffle) == ({}, 0.0, False)
    assert run({}, ["data.args.path=y"], compiled=compiled).data.args == {"path": "y"}
    assert run({"data": "synthetic"}, ["data.samples=64"]).data.samples == 64


_BIASES = 'match=["*.bias"]'


def test_the_numbers_of_a_group_may_change() -> None:
    changed = run({"lr": 0.5}, [f"optimizer.groups=[{{{_BIASES}, eps=0.1}}]"], [f"optimizer.groups=[{{{_BIASES}}}]"])
    assert changed.optimizer is not None
    assert [(update.lr, update.eps) for update in changed.optimizer.updates()] == [(0.5, 1e-8), (0.5, 0.1)]


@pytest.mark.parametrize(
    ("flags", "overrides", "compiled", "text"),
    [
        ({}, ["training.batch_size=64"], [], "training.batch_size = 64: cannot change: the PEF was compiled as 32"),
        ({}, ["optimizer.name=sgd"], [], 'optimizer.name = "sgd": cannot change: the PEF was compiled as "adamw"'),
        ({}, ["loss.name=mse"], [], 'loss.name = "mse": cannot change: the PEF was compiled as "cross_entropy"'),
        ({"data": "synthetic"}, ["data.inputs.x='int8[]'"], [], "cannot change: the PEF was compiled without it"),
        ({"max_grad_norm": 1.0}, [], [], "cannot be turned on: the PEF was compiled without clipping"),
        (
            {},
            [f"optimizer.groups=[{{{_BIASES}, name='sgd'}}]"],
            [f"optimizer.groups=[{{{_BIASES}}}]"],
            "are compiled in",
        ),
        ({"max_grad_value": 1.0}, [], [], "cannot be turned on: the PEF was compiled without clipping"),
        ({"momentum": 0.9}, [], ["optimizer.name=sgd"], "optimizer.momentum = 0.9: cannot be turned on"),
    ],
)
def test_what_is_compiled_in_takes_a_compile(
    flags: Mapping[str, object], overrides: Sequence[str], compiled: Sequence[str], text: str
) -> None:
    with pytest.raises(OptionError) as caught:
        run(flags, overrides, compiled)
    assert text in caught.value.what
    assert "compile again: sambasim compile … --set " in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "overrides", "text"),
    [
        ({"lr": -1.0}, [], "optimizer.lr = -1.0: must be at least 0"),
        ({"momentum": 0.9}, [], "optimizer.momentum: is not for adamw"),
        ({"epochs": 1, "steps": 2}, [], "cannot be given together with epochs, 1"),
        ({}, ["optimizer.lr="], "--set optimizer.lr= removes an option, which a run cannot"),
        ({}, ["optimizr.lr=1"], "did you mean optimizer?"),
        ({}, ["compile.opt_level=o0"], 'compile.opt_level = "o0": is compiled into the PEF'),
        ({}, ["parallel.wire=bf16"], 'parallel.wire = "bf16": is an option of run itself'),
        ({"save": Path("net.pt")}, [], 'save = "net.pt" (from --save): must be a .safetensors file'),
        ({"data_parallel": False, "emulate_replicas": 2}, [], "needs data parallelism, which is turned off"),
        ({"one_process_per_replica": True, "emulate_replicas": 2}, [], "is for replicas that mpirun starts"),
        ({"predictions": Path("p.safetensors")}, [], "needs inference"),
        ({"pef": ""}, [], 'pef = "" (from --pef)'),
        ({"host_sync": "gloo", "reduce_on_rdu": True}, [], 'host_sync = "gloo" (from --host-sync): is sync through'),
        ({"parameter_servers": 1}, [], "add --host-sync parameter-server"),
        ({"reduce_on_rdu": True, "parameter_servers": 1}, [], "leave out --reduce-on-rdu, and add --host-sync"),
        ({"wire": "bf16", "host_sync": "gloo"}, [], "rounds each operand of a sum, and gloo adds by itself"),
        ({"wire": "fp16"}, [], 'wire = "fp16" (from --wire): must be fp32 or bf16'),
        ({**_SERVER, "emulate_replicas": 2}, [], "needs ranks of its own, and an emulation has one process"),
        ({"host_sync": "mpi", "inference": True}, [], "is for training, and this is inference"),
    ],
)
def test_a_wrong_override_is_named(flags: Mapping[str, object], overrides: Sequence[str], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        run(flags, overrides)
    assert text in str(caught.value)


def test_a_table_may_be_empty_or_replace_a_value() -> None:
    compiled = ["data.source=m:f", "data.args.n=1"]
    assert run({}, ["data.args.q={}"], compiled).data.args == {"n": 1, "q": {}}
    assert run({}, ["data.args.n.z=1"], compiled).data.args == {"n": {"z": 1}}
    with pytest.raises(OptionError, match=r"optimizer.lr = .*: must be a number"):
        run({}, ["optimizer.lr.x=3"])


def test_an_inference_pef_trains_nothing_and_has_no_optimizer_to_set() -> None:
    with pytest.raises(OptionError, match=r"compiled for inference and cannot train") as caught:
        resolve_run(run_options({"pef": "x"}), {"optimizer": None}, {})
    assert caught.value.remedy == "add --inference"
    assert resolve_run(run_options({"pef": "x", "inference": True}), {"optimizer": None}, {}).optimizer is None


def test_invalid_options_in_the_pef_are_an_error_of_the_pef() -> None:
    with pytest.raises(PefError, match=r"the PEF stores invalid options for its runs: optimizer\.name"):
        resolve_run(run_options({"pef": "x"}), {"optimizer": {"name": "rprop"}}, {})
    with pytest.raises(PefError, match=r"2 options are wrong: training\.\w+ = -\d: [^;]+; training\.\w+ = -\d"):
        resolve_run(run_options({"pef": "x"}), {"training": {"batch_size": -4, "epochs": -1}}, {})


@pytest.mark.parametrize(
    ("flags", "settings", "told"),
    [
        ({"epochs": 3}, [], "training.epochs (from --epochs)"),
        ({"lr": 0.1}, [], "optimizer.lr (from --lr)"),
        ({"evaluate": False}, [], "evaluation.enabled (from --evaluate or --no-evaluate)"),
        ({}, ["training.schedule.name=cosine"], "training.schedule.name (from --set)"),
    ],
)
def test_what_inference_would_ignore_is_refused(flags: dict[str, object], settings: list[str], told: str) -> None:
    with pytest.raises(OptionError) as caught:
        run_options({"pef": "x", "inference": True, **flags}, given_overrides(settings))
    assert caught.value.what == f"{told}: is for training, and this is inference"
    assert caught.value.remedy == "leave it out, or leave out --inference"

    flags = {"pef": "x", "inference": True, "seed": 3, "workers": 2}
    chosen = run_options(flags, given_overrides(["data.shuffle=false"]))
    assert chosen.overrides == {"training": {"seed": 3}, "data": {"workers": 2, "shuffle": False}}, "which it reads"


_WORKERS = {"data": {"workers": 2, "prefetch_factor": 4, "persistent_workers": True}}
_STEP = {"training": {"schedule": {"name": "step", "warmup_steps": 3, "step_size": 10, "gamma": 0.5}}}


@pytest.mark.parametrize(
    ("tables", "settings", "left"),
    [
        (_WORKERS, ["data.workers=0"], {"workers": 0, "prefetch_factor": None, "persistent_workers": False}),
        (_WORKERS, ["data.workers=1"], {"workers": 1, "prefetch_factor": 4}),
        (_STEP, ["training.schedule.name=cosine"], {"schedule.warmup_steps": 3, "schedule.step_size": None}),
        (_STEP, ["training.schedule.gamma=0.1"], {"schedule.step_size": 10, "schedule.gamma": 0.1}),
        ({"training": {"epochs": 3}}, ["training.steps=5"], {"steps": 5, "epochs": None}),
    ],
)
def test_compile_and_run_leave_out_the_same(
    tmp_path: Path, tables: dict[str, dict[str, object]], settings: list[str], left: dict[str, object]
) -> None:
    """A new value goes without what belongs to the old one, in a config and in a PEF alike."""
    (tmp_path / "net.toml").write_text(
        tomli_w.dumps({"model": {"target": "net:Net"}, "optimizer": {"name": "sgd"}, **tables})
    )
    compiled = compile_options(tmp_path / "net.toml", None, settings, {})
    stored = {"optimizer": {"name": "sgd"}, "training": tables.get("training", {})}
    ran = resolve_run(run_options({"pef": "x"}, given_overrides(settings)), stored, tables.get("data", {}))
    for options in (compiled, ran):
        table = options.data if "data" in tables else options.training
        assert {name: attrgetter(name)(table) for name in left} == left


def test_a_list_of_metrics_replaces_those_of_the_pef_and_an_option_is_added() -> None:
    compiled = ['evaluation.metrics={f1 = {average = "micro"}, "net.py:f" = {}}']
    absolute = str(Path("net.py").absolute())
    assert run({"evaluation_metrics": "auroc,top2"}, [], compiled).evaluation.metrics == {"auroc": {}, "top2": {}}
    changed = run({}, ["evaluation.metrics.f1.zero_division=1.0"], compiled).evaluation.metrics
    assert changed == {"f1": {"average": "micro", "zero_division": 1.0}, f"{absolute}:f": {}}
