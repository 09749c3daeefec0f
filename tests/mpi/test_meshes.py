"""Every mesh trains each model to the same bits by device sync, by host sync and in one process; without tensor
parallelism, to those of replicas that accumulate over the micro-batches. With AdamW, clipping and accumulation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sambasim import pef
from sambasim.compiler.build import Built
from sambasim.compiler.compile import Stopwatch, assemble, capture_model
from sambasim.compiler.front import build_model, example_batch
from sambasim.errors import OptionError
from sambasim.options.compile import CompileOptions, compile_options
from tests.mpi.bodies.train import Run
from tests.mpi.training import EACH_ALONE, TWO_NODES, Trained, run_of, train
from tests.support.examples import example_options
from tests.support.whole import is_whole, whole, whole_case

MICRO_BATCH, MICRO_BATCHES = 2, 4
ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.max_grad_norm=0.5")
SGD_ONLY = ("optimizer.momentum=", "optimizer.nesterov=", "optimizer.weight_decay=")
_MODELS = "tests/mpi/mesh_models.py"
_TEXT = ('data.source="examples/char_gpt.py:text"', "data.args.length=32")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "gpt": (f'model.target="{_MODELS}:gpt"', *_TEXT),
    "bert": (f'model.target="{_MODELS}:bert"', f'data.source="{_MODELS}:masked"'),
    "many_words": (f'model.target="{_MODELS}:bert_of_many_words"', f'data.source="{_MODELS}:masked"'),
    "transposed": (f'model.target="{_MODELS}:transposed"', "data.source=digits", "loss.name=cross_entropy"),
    "mlp": (f'model.target="{_MODELS}:mlp"', "data.source=digits", "loss.name=cross_entropy"),
}
"""By model: what names it. All others are examples."""

MODELS = ("many_words", *(("bert", "gpt", "mlp", "resnet", "lstm_classifier", "char_gpt") if is_whole() else ()))


@dataclass(frozen=True, slots=True)
class Mesh:
    dp: int
    pp: int
    tp: int

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def parallelism(self) -> tuple[str, ...]:
        of_dp = ("parallel.data_parallel=true", f"parallel.world_size={self.dp}")
        of_tp = ('parallel.tensor_parallel="weight"', f"parallel.n_chips={self.tp}")
        of_pp = (f"parallel.pipeline_stages={self.pp}", f"parallel.micro_batches={MICRO_BATCHES}")
        return (*of_dp * (self.dp > 1), *of_tp * (self.tp > 1), *of_pp * (self.pp > 1))


MESHES = tuple(Mesh(*sizes) for sizes in ((1, 1, 2), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)))
REFUSED = {("lstm_classifier", 4): "cannot be cut into 4 stages with parameters of their own"}
"""By model and number of stages: the error."""


def _options(model: str, folder: Path, *overrides: str, batch_size: int = MICRO_BATCH) -> CompileOptions:
    if model in TARGETS:
        flags = {"output_folder": folder, "batch_size": batch_size, "pef_name": model}
        return compile_options(None, None, [*TARGETS[model], *ADAMW, *overrides], flags)
    others = SGD_ONLY if model == "resnet" else ()
    return example_options(model, folder, *others, *ADAMW, *overrides, data_parallel=False, batch_size=batch_size)


@cache
def captured(model: str) -> tuple[Built, nn.Module]:
    options = _options(model, Path())
    net = build_model(options)
    inputs, by_keyword, _ = example_batch(net, options)
    watch = Stopwatch(lambda phase: None)
    return capture_model(net, inputs, options, by_keyword=by_keyword, watch=watch), net


def compiled(model: str, folder: Path, mesh: Mesh, *others: str) -> Path:
    batch_size = MICRO_BATCH * (MICRO_BATCHES if mesh.pp > 1 else 1)
    options = _options(model, folder, *mesh.parallelism, *others, batch_size=batch_size)
    return assemble(*captured(model), options, Stopwatch(lambda phase: None)).path


def check(ranks: int, models: tuple[str, ...], meshes: list[Mesh], env: Mapping[str, str], folder: Path) -> None:
    """Train `models` on `meshes`, which all have `ranks` ranks, in one job."""
    runs: list[Run] = []
    for model in models:
        for mesh in meshes:
            name, made = f"{model} {mesh}", folder / f"{model}{mesh.dp}{mesh.pp}{mesh.tp}"
            if (said := REFUSED.get((model, mesh.pp))) is not None:
                with pytest.raises(OptionError, match=said):
                    compiled(model, made, mesh)
                continue
            path = compiled(model, made, mesh)
            micro_steps = 1 if mesh.pp > 1 else MICRO_BATCHES
            how: dict[str, Any] = {"steps": 2, "accumulation": 2 * micro_steps}
            runs.append(run_of(f"{name} device", path, **how, reduce_on_rdu=True))
            runs.append(run_of(f"{name} host", path, **how))
            runs.append(run_of(f"{name} played", path, **how, emulate=mesh.dp))
            if mesh.tp == 1:
                of_replicas = compiled(model, made / "whole", Mesh(mesh.dp, 1, 1))
                micro_steps = 2 * MICRO_BATCHES
                runs.append(run_of(f"{name} whole", of_replicas, steps=2, accumulation=micro_steps, emulate=mesh.dp))
    first: dict[str, Trained] = {}
    for run_name, trained in train(ranks, runs, env=dict(env)).items():
        name, _, way = run_name.rpartition(" ")
        same = first.setdefault(name, trained)
        assert trained.outcome[:2] == same.outcome[:2], f"{name}: {way}"


@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        whole_case(2, {}),
        whole_case(2, EACH_ALONE),
        (4, {}),
        whole_case(4, TWO_NODES),
        whole_case(4, EACH_ALONE),
        whole_case(8, {}),
        whole_case(8, TWO_NODES),
    ],
)
def test_each_mesh_has_the_same_bits_by_every_way(ranks: int, env: dict[str, str], tmp_path: Path) -> None:
    meshes = [mesh for mesh in MESHES if mesh.ranks == ranks]
    if not is_whole():
        meshes = [mesh for mesh in meshes if mesh.pp > 1]  # the others are in test_tensor_parallel
    for model in MODELS:
        check(ranks, (model,), meshes, env, tmp_path)


@whole
def test_a_transposed_value_is_summed_alike_by_every_way(tmp_path: Path) -> None:
    check(2, ("transposed",), [Mesh(1, 1, 2)], {}, tmp_path)


def updates_move(path: Path) -> bool:
    training = pef.read(path).program.training
    assert training is not None
    return any(node.operator == "comm.copy" for node in training.nodes)


@whole
def test_where_a_tied_parameter_is_updated_changes_no_bit(tmp_path: Path) -> None:
    """By every schedule, and by ZeRO 0 and 1; with 2 and 3, and without states, nothing is gained."""
    mesh, pair = Mesh(1, 2, 1), Mesh(2, 2, 1)
    cuts = {name: (mesh, (f'parallel.schedule="{name}"',)) for name in ("gpipe", "interleaved-1f1b", "zb-h1")}
    cuts |= {f"zero {level}": (pair, (f"parallel.zero={level}",)) for level in range(4)}
    paths = {name: compiled("many_words", tmp_path / name, cut, *others) for name, (cut, others) in cuts.items()}
    assert [name for name, path in paths.items() if not updates_move(path)] == ["zero 2", "zero 3"]
    assert not updates_move(compiled("many_words", tmp_path / "sgd", mesh, "optimizer.name=sgd"))
    for ranks, one in ((2, mesh), (4, pair)):
        how: dict[str, Any] = {"steps": 2, "evaluate": True}
        whole = compiled("many_words", tmp_path / "whole", Mesh(one.dp, 1, 1))
        runs = [run_of("whole", whole, **how, accumulation=2 * MICRO_BATCHES, emulate=one.dp)]
        runs += [run_of(name, paths[name], **how, accumulation=2) for name, (cut, _) in cuts.items() if cut == one]
        first, *others = train(ranks, runs).values()
        assert all(one.outcome == first.outcome for one in others), [one.name for one in others]


@whole
def test_a_tied_parameter_is_sent_back_once_all_slices_are_updated(tmp_path: Path) -> None:
    """Without a norm, no rank waits for another between its update and the message."""
    path = compiled("many_words", tmp_path, Mesh(2, 2, 1), "optimizer.max_grad_norm=")
    runs = [run_of("device", path, steps=2, reduce_on_rdu=True), run_of("played", path, steps=2, emulate=2)]
    found = train(4, runs, body="late_train")
    assert found["device"].outcome == found["played"].outcome


@whole
def test_a_checkpoint_of_one_mesh_goes_on_by_another(tmp_path: Path) -> None:
    """From stages to one rank and back, to another schedule, and to slices of ZeRO: the bits of an uninterrupted run,
    which --exact promises. From whole weights to cut ones and back: about the same loss."""
    sizes = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1))
    whole, stages, cut, pairs = (compiled("many_words", tmp_path / str(one), Mesh(*one)) for one in sizes)
    by_zero = compiled("many_words", tmp_path / "zero", Mesh(2, 1, 1), "parallel.zero=3")
    train(2, [run_of("half", stages, steps=2, checkpoint={"dir": str(tmp_path / "saved")})])
    train(1, [run_of("half", whole, steps=2, accumulation=MICRO_BATCHES, checkpoint={"dir": str(tmp_path / "alone")})])
    train(4, [run_of("half", pairs, steps=2, checkpoint={"dir": str(tmp_path / "pairs")})])
    cut_stages = compiled("many_words", tmp_path / "cut_stages", Mesh(1, 2, 2), "parallel.recompute='full'")
    schedule = compiled("many_words", tmp_path / "schedule", Mesh(1, 2, 1), "parallel.schedule='zb-h1'")
    train(1, [run_of("half", cut_stages, steps=2, emulate=1, checkpoint={"dir": str(tmp_path / "cut")})])
    resumed, of_alone, of_pairs, of_cut = (
        dict[str, Any](steps=4, checkpoint={"resume": str(tmp_path / name / "step-0000000002"), "exact": True})
        for name in ("saved", "alone", "pairs", "cut")
    )
    alone: dict[str, Any] = {"accumulation": MICRO_BATCHES, "emulate": 1}
    by_tensors = resumed | {"checkpoint": resumed["checkpoint"] | {"exact": False}}
    found = train(
        2,
        [
            run_of("all", stages, steps=4),
            run_of("stages", stages, **of_alone),
            run_of("schedule", schedule, **resumed),
            run_of("cut", cut, **by_tensors, **alone),
            run_of("whole", whole, **resumed, **alone),
            run_of("zero", by_zero, **of_pairs, accumulation=MICRO_BATCHES),
            run_of("of_cut", cut, **of_cut, **alone),
            run_of("all_cut", cut, steps=4, **alone),
        ],
    )
    for way in ("whole", "stages", "schedule"):
        assert found[way].outcome[:2] == found["all"].outcome[:2]
        assert not any("bits may differ" in line for line in found[way].notices)
    assert found["of_cut"].outcome[:2] == found["all_cut"].outcome[:2]
    assert found["cut"].summary.loss_last == pytest.approx(found["all"].summary.loss_last, rel=1e-4)
    assert any(line.startswith("changed since the checkpoint: n_chips = 2") for line in found["cut"].notices)
    assert found["zero"].outcome[:2] == train(4, [run_of("all", pairs, steps=4)])["all"].outcome[:2]
