"""The Python API in one process: live models, losses, optimizers and data, any number of runs."""

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
from tests.api.live import BATCH, HELD_OUT, LABELS, POINTS, TRAIN, compiled, eager, net, sgd, trained
from tests.support.mpi import run_job


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


def test_results_are_shown_as_tables(pef: ss.Pef, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(pef, (TRAIN, HELD_OUT))
    for shown in (pef, pef.inspect(everything=True), run, ss.simulate(pef)):
        Console(width=100).print(shown)
        assert len(capsys.readouterr().out.splitlines()) > 3
        assert shown._repr_html_().startswith("<pre")
        assert "\x1b" not in shown._repr_html_()
    assert repr(pef).startswith(f"Pef('{pef.path}': ")
    assert "BCKWD" in str(pef.inspect()) == repr(pef.inspect())
    assert "net: 4 steps on 2 replicas in " in repr(run)
    assert "held out 80 samples: loss" in str(run)


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


def _squares(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.softmax(1)[:, 1] - target).square().mean()


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ("cross_entropy", "cross_entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "cross_entropy"),
        (functional.cross_entropy, "cross_entropy"),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), None),
        (_squares, None),
        (lambda outputs, target: _squares(outputs, target), None),
    ],
)
def test_losses_are_names_modules_and_functions(folder: Path, loss: Any, name: str | None) -> None:
    model = net()
    one = compiled(folder, model, loss=loss, optimizer="sgd", lr=0.0)
    stored = one.document.training_defaults["loss"]
    assert (stored and stored["name"]) == name  # type: ignore[index, call-overload]
    run = trained(one, BATCH, steps=1)
    function = functional.cross_entropy if isinstance(loss, str) else loss
    assert run.losses[0] == pytest.approx(function(model(BATCH[0]), BATCH[1]).item(), rel=1e-6)


class _ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(x)
        return functional.cross_entropy(outputs, target), outputs


def test_data_are_given_by_position_by_name_and_as_data_sets(folder: Path) -> None:
    one = compiled(folder, _ByName(), {"x": BATCH[0].numpy(), "target": BATCH[1].numpy()}, optimizer="sgd")
    named: dict[str, object] = {"x": POINTS.numpy(), "target": LABELS.numpy()}
    digests = {trained(one, data).summary.state_sha256 for data in (named, [*_samples()])}
    assert len(digests) == 1
    by_position = compiled(folder, _ByName(), BATCH, optimizer="sgd", name="position")
    arrays = (POINTS.numpy(), LABELS.numpy())
    sets = ((POINTS, LABELS), arrays, [POINTS, LABELS], TensorDataset(POINTS, LABELS))
    digests = {trained(by_position, data).summary.state_sha256 for data in sets}
    assert len(digests) == 1


def _samples() -> list[dict[str, Tensor]]:
    return [{"x": x, "target": label} for x, label in zip(POINTS, LABELS, strict=True)]


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, given: dict[str, Any], scale: Tensor) -> Tensor:
        first, second = given["pair"]
        outputs: Tensor = self.layer(torch.cat([first, second, given["one"]], 1) * scale)
        return outputs


def test_inputs_may_be_dicts_and_lists_inside_of_each_other(folder: Path) -> None:
    """By position and by name, with the bits of the model itself."""

    class Samples:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[object, ...]:
            point = POINTS[index]
            return {"pair": [point[:1], point[1:]], "one": point[:1]}, torch.ones(1), LABELS[index]

    class Named(Samples):
        def __getitem__(self, index: int) -> Any:
            given, scale, label = super().__getitem__(index)
            return {"scale": scale, "given": given, "target": label}

    def batch(samples: Any, size: int) -> Any:
        return next(iter(DataLoader(samples, batch_size=size)))

    model = _Nested()
    given, scale, labels = batch(Samples(), 64)
    expected = model(given, scale)
    for data in (Samples(), Named()):
        one = compiled(folder, model, batch(data, 8), loss="cross_entropy", optimizer="sgd", lr=0.0)
        names = [name for name in one.program.symbols if name.startswith("given")]
        assert names == ["given.one", "given.pair.0", "given.pair.1"]
        found = ss.predict(one, data)
        assert torch.allclose(found.outputs[0], expected, atol=1e-6)
        assert found.loss == pytest.approx(functional.cross_entropy(expected, labels).item(), rel=1e-6)
        assert trained(one, data, steps=8).losses[0] == trained(one, data, steps=8).losses[0]


class _Ordered(nn.Module):
    """Sees in which containers and in which order its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, extras: dict[str, Tensor], by_key: dict[Any, Any], pair: Any) -> Tensor:
        assert extras == {}
        assert isinstance(pair, _Pair)
        assert list(by_key) == [2, 10, "a.b"]
        outputs: Tensor = self.layer(torch.cat([*by_key.values(), pair.second], 1))
        return outputs


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_the_model_gets_its_containers_as_they_are(folder: Path) -> None:
    """Keys of any kind in the order of the example, empty dicts, and named tuples."""

    class Samples:
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> tuple[object, ...]:
            x, y = POINTS[index][:1], POINTS[index][1:]
            order = {2: x, 10: y, "a.b": x + y} if index % 2 == 0 else {"a.b": x + y, 10: y, 2: x}
            return {}, order, _Pair(x, y), LABELS[index]

    model = _Ordered()
    batch = next(iter(DataLoader(cast("Any", Samples()), batch_size=32)))
    one = compiled(folder, model, batch, loss="cross_entropy", optimizer="sgd")
    expected = model(*batch[:3])
    assert torch.allclose(ss.predict(one, Samples()).outputs[0], expected, atol=1e-6)


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
    of_module = ss.predict(pef, HELD_OUT[0], weights=run.load_into(net()))
    assert torch.equal(of_module.outputs[0], without.outputs[0])
    with pytest.raises(OptionError, match="weights is of type int"):
        ss.predict(pef, HELD_OUT, weights=42)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="do not fit the model"):
        run.load_into(nn.Linear(2, 2))
    with pytest.raises(WeightsError, match="the given weights do not fit the PEF net: missing"):
        ss.predict(pef, HELD_OUT, weights={"other": torch.zeros(1)})


def test_predictions_of_devices_are_records(pef: ss.Pef) -> None:
    found = ss.simulate(pef, arch="sn10", replicas=[1, 8], batch_sizes=[32, 64])
    assert [one["batch_size"] for one in found.record] == [32, 64]
    assert found.step_s == found.record[0]["predicted_s"] > 0
    assert [row["replicas"] for row in found.record[0]["scaling"]] == [1, 8, 8]


class _Skipping(nn.Module):
    """The last stage of a pipeline reads the input too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 16), nn.Linear(18, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.cat([self.first(x).relu(), x], 1))
        return outputs


@pytest.mark.parametrize("model", [net, _Skipping])
def test_a_pipeline_predicts_without_labels(folder: Path, model: Callable[[], nn.Module]) -> None:
    live = model()
    one = compiled(folder, live, loss="cross_entropy", name="predicting", pipeline_stages=2, micro_batches=2)
    assert torch.allclose(ss.predict(one, HELD_OUT[0]).outputs[0], live(HELD_OUT[0]), atol=1e-6)


def test_a_model_that_gives_only_its_loss_needs_labels(folder: Path) -> None:
    class Only(_ByName):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # it gives no outputs
            return super().forward(x, target)[0]

    with pytest.raises(DataError, match=r"a sample has \(x\), and the inputs are \(x, target\)"):
        ss.predict(compiled(folder, Only(), {"x": BATCH[0], "target": BATCH[1]}), {"x": POINTS})


def test_draws_for_labels_need_labels(folder: Path) -> None:
    """Without them, the draws for the outputs would be others."""

    class Noisy(_ByName):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            smoothing = torch.rand_like(target, dtype=torch.float32)
            outputs = self.layer(x + torch.rand_like(x))
            return (functional.cross_entropy(outputs, target, reduction="none") * smoothing).mean(), outputs

    one = compiled(folder, Noisy(), {"x": BATCH[0], "target": BATCH[1]})
    assert len(ss.predict(one, {"x": POINTS, "target": LABELS}).outputs[0]) == len(POINTS)
    with pytest.raises(DataError, match="the inputs are"):
        ss.predict(one, {"x": POINTS})


def test_a_pef_that_was_compiled_again_is_not_taken_for_the_first(
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


def test_notices_say_what_is_not_as_in_the_script(folder: Path) -> None:
    model = net().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    model(BATCH[0]).sum().backward()
    optimizer.step()
    one = compiled(folder, model, (POINTS[:32], POINTS[:32, :1]), loss="mse", optimizer=optimizer, name="noted")
    assert len(one.notices) == 3
    assert "evaluation mode" in one.notices[0]
    assert "begin at zero" in one.notices[1]
    assert "shape [32, 2] and the target [32, 1]: mse broadcasts them" in one.notices[2]


def test_a_pef_of_another_model_is_not_replaced_without_a_word(folder: Path) -> None:
    told = [compiled(folder, one, loss="cross_entropy", name="same").notices for one in (net(), net(), nn.Linear(2, 2))]
    assert [any("another model" in notice for notice in notices) for notices in told] == [False, False, True]
    assert "was the PEF of another model, Sequential, and is replaced" in told[-1][-1]


def test_in_a_notebook_results_are_shown_once(pef: ss.Pef, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich displays by itself where get_ipython is that of a kernel."""
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", kernel, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "1")
    assert "batch size" in str(pef)
    assert "\x1b" not in str(pef)


def test_a_replica_of_several_ranks_runs_in_one_process(folder: Path) -> None:
    one = compiled(folder, net(), loss="cross_entropy", name="stages", pipeline_stages=2, micro_batches=2)
    assert trained(one).summary.mesh == {"pp": 2}
    assert ss.simulate(one).step_s > 0


class Two(nn.Module):
    """Returns two outputs, or its losses by name."""

    def __init__(self, losses: str = "") -> None:
        super().__init__()
        self.code, self.decode, self.losses = nn.Linear(2, 3), nn.Linear(3, 2), losses.split()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        code = self.code(x)
        outputs = self.decode(code)
        found: dict[str, Any] = {"norm": code.square().mean(), "loss": (outputs - x).square().mean()}
        return {name: found[name] if name in found else found["norm"] + 1 for name in self.losses} or (outputs, code)


def test_a_function_as_loss_gets_what_the_model_returns(folder: Path) -> None:
    def loss(result: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return (result[0] - target).square().mean() + result[1].square().mean()

    model, points = Two(), POINTS[:8]
    run = ss.run(compiled(folder, model, (points, points), loss=loss), (points, points), steps=1, quiet=True)
    assert run.losses == pytest.approx([loss(model(points), points).item()], rel=1e-6)


def test_of_a_dictionary_the_entry_called_loss_is_trained(folder: Path) -> None:
    model, points = Two("norm loss"), POINTS[:8]
    run = ss.run(compiled(folder, model, (points,)), (points,), steps=1, quiet=True)
    assert run.losses == pytest.approx([model(points)["loss"].item()], rel=1e-6)
    with pytest.raises(ss.SambasimError, match="returns several losses: norm, other"):
        compiled(folder, Two("norm other"), (points,))


def test_weights_fit_a_model_that_is_wrapped(folder: Path) -> None:
    model = nn.DataParallel(net())
    one = compiled(folder, model, loss="cross_entropy")
    run = trained(one)
    weights = ss.predict(one, POINTS, weights=run.load_into(model)).outputs[0]
    assert torch.equal(weights, ss.predict(one, POINTS, weights=run).outputs[0])


def test_settings_without_a_flag_are_given_in_a_dictionary(folder: Path) -> None:
    model = net()
    one = compiled(folder, model, loss="cross_entropy", optimizer="sgd", set={"optimizer.momentum": 0.5})
    run = ss.run(one, BATCH, steps=1, quiet=True, set={"data.shuffle": False})
    torch.set_num_threads(run.summary.threads)
    assert run.losses == [nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]).item()]
    with pytest.raises(ss.SambasimError, match=r"data\.shufle: is not an option"):
        ss.run(one, BATCH, quiet=True, set={"data.shufle": False})
    with pytest.raises(ss.SambasimError, match="not a dictionary"):
        ss.run(one, BATCH, quiet=True, set="data.shuffle=false")
    assert ss.predict(one, BATCH, set={"data.shuffle": True}).loss == pytest.approx(run.losses[0])


def test_keywords_are_the_flags(folder: Path) -> None:
    deepspeed = {"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "Lion"}, "steps_per_print": 1}
    (folder / "ds.json").write_text(json.dumps(deepspeed))
    one = compiled(folder, net(), loss="cross_entropy", optimizer="sgd", deepspeed=folder / "ds.json", opt_level="o1")
    assert one.program.optimizers[0].kind == "lion"
    assert "steps_per_print" in one.notices[0]
    trained(one, log_dir=folder / "logs", metrics=folder / "run.jsonl")
    assert (folder / "logs" / "rank0.log").read_text().count(" epoch ") == 4
    assert (folder / "run.jsonl").exists()
