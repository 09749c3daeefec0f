"""The Python API in one process: live models, losses, optimizers and data, any number of runs."""

# Calling a module gives Any.
# mypy: no-warn-return-any

import ast
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import sambasim as ss
from sambasim.errors import DataError, OptionError, WeightsError
from tests.api.conftest import BATCH, HELD_OUT, LABELS, POINTS, TRAIN, compiled, eager, net, sgd, trained
from tests.support.compiled import Made
from tests.support.mpi import ROOT, run_job


def test_the_names_are_loaded_at_their_first_use() -> None:
    code = "import sys, sambasim as ss; print(dir(ss), 'torch' in sys.modules); ss.Pef; print('torch' in sys.modules)"
    done = run_job([sys.executable, "-c", code], is_fresh=True).check()
    names = ["Pef", "Prediction", "Run", "SambasimError", "Simulation", "compile", "load", "predict", "run", "simulate"]
    assert done.stdout == f"{sorted([*names, '__version__'])} False\nTrue\n"
    assert sorted(vars(ss)["__all__"]) == names
    assert all(hasattr(ss, name) for name in names)
    stub = Path(str(ss.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    assert all(f"import {name} as {name}\n" in stub for name in names)
    with pytest.raises(AttributeError, match="it has Pef, Prediction"):
        ss.compiled  # type: ignore[attr-defined]  # noqa: B018 (the name is wrong)


def test_a_pef_has_the_weights_of_the_live_model_and_loads_again(pef: ss.Pef, folder: Path) -> None:
    expected = net().state_dict()
    assert list(pef.weights) == list(expected)
    assert all(torch.equal(pef.weights[name], expected[name]) for name in expected)
    assert ss.load(pef.path).digest == ss.load("net", output_folder=folder).digest == pef.digest
    assert (pef.name, pef.program.world_size) == ("net", 2)
    assert pef.command == f"mpirun -np 2 sambasim run --reduce-on-rdu --pef {pef.path}"


def test_results_are_shown_as_tables_also_in_a_notebook(
    pef: ss.Pef, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, devices = trained(pef, (TRAIN, HELD_OUT)), ss.simulate(pef, arch="sn10", replicas=[1, 8], batch_sizes=[32, 64])
    for shown in (pef, pef.inspect(everything=True), run, devices):
        Console(width=100).print(shown)
        assert len(capsys.readouterr().out.splitlines()) > 3
        assert shown._repr_html_().startswith("<pre")
        assert "\x1b" not in shown._repr_html_()
    assert repr(pef).startswith(f"Pef('{pef.path}': ")
    assert "BCKWD" in str(pef.inspect()) == repr(pef.inspect())
    assert "net: 4 steps on 2 replicas in " in repr(run)
    assert "held out 80 samples: loss" in str(run)
    assert [record["batch_size"] for record in devices.record] == [32, 64]
    assert devices.step_s == devices.record[0]["predicted_s"] > 0
    assert [row["replicas"] for row in devices.record[0]["scaling"]] == [1, 8, 8]
    # rich displays by itself where get_ipython is that of a kernel.
    monkeypatch.setattr("builtins.get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "1")
    assert "batch size" in str(pef)
    assert "\x1b" not in str(pef)


def test_runs_are_repeatable_in_one_process_and_leave_random_numbers_alone(pef: ss.Pef) -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    first, second, other = trained(pef), trained(pef), trained(pef, lr=1e-4)
    assert first.summary.state_sha256 == second.summary.state_sha256 != other.summary.state_sha256
    assert first.losses == second.losses
    assert len(first.losses) == first.summary.steps == 4
    assert first.summary.world_size == 2
    assert first.summary.emulated
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[2]
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]


def test_one_replica_has_the_bits_of_eager_pytorch(folder: Path) -> None:
    model, (x, y) = net(), BATCH
    optimizer = sgd(model)
    run = trained(compiled(folder, model, loss=functional.cross_entropy, optimizer=optimizer, name="one"), BATCH)
    torch.set_num_threads(run.summary.threads)
    orders = [torch.randperm(32, generator=torch.Generator().manual_seed(epoch)) for epoch in range(4)]
    assert run.losses == eager(model, optimizer, [(x[order], y[order]) for order in orders])
    weights = run.load_into(net()).state_dict()
    assert all(torch.allclose(weights[name], one, rtol=0, atol=1e-7) for name, one in model.state_dict().items())


class Labelled(nn.Module):
    """Returns its loss, and, if it `shows` them, its outputs; with `noise` it draws for both."""

    def __init__(self, *, shows: bool = True, noise: bool = False) -> None:
        super().__init__()
        self.layer, self.shows, self.noise = nn.Linear(2, 2), shows, noise

    def forward(self, x: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scale = torch.rand_like(target, dtype=torch.float32) if self.noise else 1
        outputs = self.layer(x + torch.rand_like(x) if self.noise else x)
        loss = (functional.cross_entropy(outputs, target, reduction="none") * scale).mean()
        return (loss, outputs) if self.shows else loss


BY_NAME = {"x": BATCH[0].numpy(), "target": BATCH[1].numpy()}


def test_data_are_given_by_position_by_name_and_as_data_sets(folder: Path) -> None:
    samples = [{"x": x, "target": label} for x, label in zip(POINTS, LABELS, strict=True)]
    arrays = (POINTS.numpy(), LABELS.numpy())
    for example, forms in (
        (BY_NAME, [{"x": arrays[0], "target": arrays[1]}, samples]),
        (BATCH, [(POINTS, LABELS), arrays, [POINTS, LABELS], TensorDataset(POINTS, LABELS)]),
    ):
        pef = compiled(folder, Labelled(), example, optimizer="sgd")
        assert len({trained(pef, data).summary.state_sha256 for data in forms}) == 1


class Indexed:
    """A data set of what `sample` makes of an index."""

    def __init__(self, length: int, sample: Callable[[int], Any]) -> None:
        self.length, self.sample = length, sample

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)

    def batch(self, size: int) -> Any:
        return next(iter(DataLoader(cast("Any", self), batch_size=size)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, given: dict[str, Any], scale: Tensor) -> Tensor:
        return self.layer(torch.cat([*given["pair"], given["one"]], 1) * scale)


def test_inputs_may_be_dicts_and_lists_inside_of_each_other(folder: Path) -> None:
    """By position and by name, with the bits of the model itself."""

    def sample(index: int) -> tuple[Any, ...]:
        point = POINTS[index]
        return {"pair": [point[:1], point[1:]], "one": point[:1]}, torch.ones(1), LABELS[index]

    model = Nested()
    by_position = Indexed(64, sample)
    by_name = Indexed(64, lambda index: dict(zip(("given", "scale", "target"), sample(index), strict=True)))
    given, scale, labels = by_position.batch(64)
    expected = model(given, scale)
    for data in (by_position, by_name):
        pef = compiled(folder, model, data.batch(8), loss="cross_entropy", optimizer="sgd", lr=0.0)
        names = [name for name in pef.program.symbols if name.startswith("given")]
        assert names == ["given.one", "given.pair.0", "given.pair.1"]
        predicted = ss.predict(pef, data)
        assert torch.allclose(predicted.outputs[0], expected, atol=1e-6)
        assert predicted.loss == pytest.approx(functional.cross_entropy(expected, labels).item(), rel=1e-6)
        assert len(trained(pef, data, steps=8).losses) == 8


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_the_model_gets_its_containers_as_they_are(folder: Path) -> None:
    """Keys of any kind in the order of the example, empty dicts, and named tuples."""

    def ordered(net: Any, extras: dict[str, Tensor], by_key: dict[Any, Any], pair: Any) -> Tensor:
        assert extras == {}
        assert isinstance(pair, Pair)
        assert list(by_key) == [2, 10, "a.b"]
        return net.layer(torch.cat([*by_key.values(), pair.second], 1))

    def sample(index: int) -> tuple[object, ...]:
        x, y = POINTS[index][:1], POINTS[index][1:]
        order = {2: x, 10: y, "a.b": x + y} if index % 2 == 0 else {"a.b": x + y, 10: y, 2: x}
        return {}, order, Pair(x, y), LABELS[index]

    model, data = Made(ordered, layer=nn.Linear(4, 2)), Indexed(32, sample)
    batch = data.batch(32)
    pef = compiled(folder, model, batch, loss="cross_entropy", optimizer="sgd")
    assert torch.allclose(ss.predict(pef, data).outputs[0], model(*batch[:3]), atol=1e-6)


def test_prediction_needs_no_labels(pef: ss.Pef) -> None:
    run = trained(pef)
    with_labels, without = ss.predict(pef, HELD_OUT, weights=run), ss.predict(pef, HELD_OUT[0], weights=run.weights)
    expected = run.load_into(net()).eval()(HELD_OUT[0])
    assert torch.equal(with_labels.outputs[0], without.outputs[0])
    assert torch.allclose(without.outputs[0], expected, atol=1e-6)
    assert with_labels.loss == pytest.approx(functional.cross_entropy(expected, HELD_OUT[1]).item(), rel=1e-5)
    assert (without.loss, without.accuracy) == (None, None)
    assert without.record.notices == ["no loss, because the samples have no target"]
    assert "accuracy" in repr(with_labels)
    assert "no target" in str(without)
    of_module = ss.predict(pef, HELD_OUT[0], weights=run.load_into(nn.DataParallel(net())))
    assert torch.equal(of_module.outputs[0], without.outputs[0])
    with pytest.raises(OptionError, match="weights is of type int"):
        ss.predict(pef, HELD_OUT, weights=42)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(WeightsError, match="the given weights do not fit the PEF net: missing"):
        ss.predict(pef, HELD_OUT, weights={"other": torch.zeros(1)})


def test_a_replica_of_several_ranks_trains_and_predicts_in_one_process(folder: Path) -> None:
    """Also where the last stage of a pipeline reads the input too."""
    parts = {"a": nn.Linear(2, 16), "b": nn.Linear(18, 2)}
    skipping = Made(lambda net, x: net.b(torch.cat([net.a(x).relu(), x], 1)), **parts)
    for model in (net(), skipping):
        pef = compiled(folder, model, loss="cross_entropy", pipeline_stages=2, micro_batches=2)
        assert torch.allclose(ss.predict(pef, HELD_OUT[0]).outputs[0], model(HELD_OUT[0]), atol=1e-6)
        assert trained(pef).summary.mesh == {"pp": 2}
        assert ss.simulate(pef).step_s > 0


def test_a_model_that_gives_only_its_loss_or_draws_for_labels_needs_them(folder: Path) -> None:
    """Without labels, the draws for the outputs would be others."""
    with pytest.raises(DataError, match=r"a sample has \(x\), and the inputs are \(x, target\)"):
        ss.predict(compiled(folder, Labelled(shows=False), BY_NAME), {"x": POINTS})
    pef = compiled(folder, Labelled(noise=True), BY_NAME)
    assert len(ss.predict(pef, {"x": POINTS, "target": LABELS}).outputs[0]) == len(POINTS)
    with pytest.raises(DataError, match="the inputs are"):
        ss.predict(pef, {"x": POINTS})


def test_a_pef_that_was_compiled_again_or_of_another_model_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(folder, net(), loss="cross_entropy", name="twice")
    monkeypatch.chdir(folder)
    assert trained(first).losses, "wherever the script is"
    second = compiled(folder, net(), loss="cross_entropy", name="twice", lr=0.5)
    assert trained(second).losses
    for use in (trained, ss.predict):
        with pytest.raises(OptionError, match="was compiled again"):
            use(first, TRAIN)
    third = compiled(folder, nn.Linear(2, 2), loss="cross_entropy", name="twice")
    told = [any("another model" in notice for notice in pef.notices) for pef in (first, second, third)]
    assert told == [False, False, True]
    assert "was the PEF of another model, Sequential, and is replaced" in third.notices[-1]


def test_notices_say_what_is_not_as_in_the_script(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = net().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    model(BATCH[0]).sum().backward()
    optimizer.step()
    pef = compiled(folder, model, (POINTS[:32], POINTS[:32, :1]), loss="mse", optimizer=optimizer, name="noted")
    assert len(pef.notices) == 3
    assert capfd.readouterr() == ("", "")
    assert "evaluation mode" in pef.notices[0]
    assert "begin at zero" in pef.notices[1]
    assert "shape [32, 2] and the target [32, 1]: mse broadcasts them" in pef.notices[2]


def test_a_function_as_loss_gets_what_the_model_returns(folder: Path) -> None:
    def loss(result: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return (result[0] - target).square().mean() + result[1].square().mean()

    layers, x = {"code": nn.Linear(2, 3), "decode": nn.Linear(3, 2)}, POINTS[:8]
    model = Made(lambda net, x: (net.decode(net.code(x)), net.code(x)), **layers)
    run = ss.run(compiled(folder, model, (x, x), loss=loss), (x, x), steps=1, quiet=True)
    assert run.losses == pytest.approx([loss(model(x), x).item()], rel=1e-6)


def test_settings_without_a_flag_are_given_in_a_dictionary(folder: Path) -> None:
    model = nn.DataParallel(net())
    pef = compiled(folder, model, loss="cross_entropy", optimizer="sgd", set={"optimizer.momentum": 0.5})
    run = ss.run(pef, BATCH, steps=1, quiet=True, set={"data.shuffle": False})
    torch.set_num_threads(run.summary.threads)
    assert run.losses == [functional.cross_entropy(model(BATCH[0]), BATCH[1]).item()]
    with pytest.raises(ss.SambasimError, match=r"data\.shufle: is not an option"):
        ss.run(pef, BATCH, quiet=True, set={"data.shufle": False})
    with pytest.raises(ss.SambasimError, match="not a dictionary"):
        ss.run(pef, BATCH, quiet=True, set="data.shuffle=false")
    assert ss.predict(pef, BATCH, set={"data.shuffle": True}).loss == pytest.approx(run.losses[0])


def test_keywords_are_the_flags(folder: Path) -> None:
    deepspeed = {"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "Lion"}, "steps_per_print": 1}
    (folder / "ds.json").write_text(json.dumps(deepspeed))
    pef = compiled(folder, net(), loss="cross_entropy", optimizer="sgd", deepspeed=folder / "ds.json", opt_level="o1")
    assert pef.program.optimizers[0].kind == "lion"
    assert "steps_per_print" in pef.notices[0]
    trained(pef, log_dir=folder / "logs", metrics=folder / "run.jsonl")
    assert (folder / "logs" / "rank0.log").read_text().count(" epoch ") == 4
    assert (folder / "run.jsonl").exists()


def test_notices_of_a_run_and_its_errors_speak_python(pef: ss.Pef, capsys: pytest.CaptureFixture[str]) -> None:
    run = ss.run(pef, TRAIN, steps=1, reduce_on_rdu=True, seed=7, lr_schedule="cosine", warmup_steps=1)
    printed = capsys.readouterr().out
    for notice in (
        "reduce_on_rdu=True has no effect: gradients do not leave this process",
        "seed draws no new first weights: compile again with another for others",
    ):
        assert notice in run.summary.notices
        assert f"notice: {notice}\n" in printed
    assert "--" not in "".join(run.summary.notices)
    with pytest.raises(OptionError, match="no samples are held out") as caught:
        ss.run(pef, TRAIN, stop_after=2, quiet=True)
    assert caught.value.remedy == 'set={"data.evaluation_fraction": 0.1}, or evaluation_data=SOURCE'


def test_of_gradients_in_bf16_nothing_is_rounded_and_one_thing_said(folder: Path) -> None:
    narrow = compiled(
        folder, net(), loss="cross_entropy", optimizer="sgd", dtype="bf16", check=0, data_parallel=True, world_size=2
    )
    summary = ss.run(narrow, TRAIN, steps=1, replicas=2, wire="bf16", quiet=True).summary
    assert any(notice.endswith("has no effect: gradients are bfloat16") for notice in summary.notices)
    assert summary.wire is None


def test_every_cell_of_the_notebook_runs_and_shows_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
            else:
                exec(compile(ast.Module([last], []), "cell", "exec"), names)
    tables = [text for text in shown if text.startswith("<pre")]
    assert len(tables) == 4
    assert "BCKWD" in tables[1]
    assert "measured on this machine" in tables[2]
    assert "predicted, not measured" in tables[3]
    accuracy = next(text for text in shown if text.startswith("tensor("))
    assert float(accuracy.removeprefix("tensor(").removesuffix(")")) > 0.8
