"""Promise one in bf16 and fp16: device sync, host sync and emulation give the same bits, however optimizer steps round,
and also where steps are skipped because gradients overflow."""

from pathlib import Path

import pytest

from tests.mpi.test_bits import check_apart, check_exact
from tests.mpi.test_resume import check_resumed, resumed_runs
from tests.mpi.training import EXACT, TWO_NODES, WAYS, train
from tests.support.compiled import compile_from_options
from tests.support.examples import ANY_OPTIMIZER, EXAMPLES, example_options
from tests.support.whole import is_whole, whole, whole_case

_ADAM = ("optimizer.name=adam", "optimizer.lr=0.003")
_BF16, _FP16 = "compile.dtype=bf16", "compile.dtype=fp16"
_CLIPPED = ("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.max_grad_norm=0.05")
_OVERFLOWS = ("training.loss_scale.start=131072", "training.loss_scale.hysteresis=1", "training.loss_scale.window=2")
VARIANTS = {
    "clipped": (_BF16, *_CLIPPED),
    "nearest": (_BF16, *_ADAM),
    "stochastic": (_BF16, *_ADAM, "compile.stochastic_rounding=true"),  # it must end elsewhere than "nearest"
    "master": (_BF16, *_ADAM, "compile.master_weights=true"),
    "master-clipped": (_BF16, *_CLIPPED, "compile.master_weights=true"),
    "fp16": (_FP16, *_ADAM),
    # With the default scale, all of the few steps of some examples would overflow.
    "fp16-clipped": (_FP16, *_CLIPPED, "optimizer.lr=0.002", "training.loss_scale.start=512"),
    "fp16-overflows": (_FP16, *_CLIPPED, *_OVERFLOWS),
}
_MOST_IN_A_JOB = 24
"""They are described on one command line."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bf16")
    paths = []
    for name in EXAMPLES if is_whole() else ["logistic_regression"]:
        for variant, chosen in VARIANTS.items():
            if variant == "fp16-overflows" and name != "logistic_regression":
                continue  # of the others, all of the few steps would overflow
            named = f"compile.pef_name={name}-{variant}"
            options = example_options(name, folder, *ANY_OPTIMIZER, *chosen, named)
            paths.append(compile_from_options(options, name).path)
    return paths


@pytest.mark.parametrize(("np", "nodes"), [(2, {}), whole_case(3, {}), whole_case(4, {}), whole_case(4, TWO_NODES)])
def test_device_host_and_emulation_are_equal(np: int, nodes: dict[str, str], compiled: list[Path]) -> None:
    """Also if a parameter server syncs: all clip alike, each on its part of the gradients."""
    ways = {way: WAYS[way] for way in EXACT}
    check_apart(check_exact(np, compiled, nodes, accumulations=(1, 2) if is_whole() else (2,), ways=ways))


@whole
def test_they_go_on_from_a_checkpoint_over_two_nodes(compiled: list[Path], tmp_path: Path) -> None:
    for start in range(0, len(compiled), _MOST_IN_A_JOB):
        runs = resumed_runs(4, compiled[start : start + _MOST_IN_A_JOB], tmp_path)
        check_resumed(train(4, runs, env=TWO_NODES), tmp_path)
