"""Promise one in bf16: device sync, host sync and emulation give the same bits, however optimizer steps round."""

from pathlib import Path

import pytest

from sambasim.compiler.front import compile_from_options
from tests.mpi.test_exactness import TWO_NODES, compare, digests_of
from tests.mpi.test_resume import check_resumed
from tests.support.examples import EXAMPLES, example_options
from tests.support.whole import is_whole, whole

_ADAM = ("optimizer.name=adam", "optimizer.lr=0.003")
VARIANTS = {
    "clipped": ("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.max_grad_norm=0.05"),
    "nearest": _ADAM,
    "stochastic": (*_ADAM, "compile.stochastic_rounding=true"),  # `compare` holds that it ends elsewhere than "nearest"
}
_OF_ANOTHER_KIND = ("optimizer.momentum=", "optimizer.nesterov=", "optimizer.weight_decay=")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bf16")
    names = EXAMPLES if is_whole() else ["logistic_regression"]
    return [_compiled(folder, name, variant) for name in names for variant in VARIANTS]


def _compiled(folder: Path, name: str, variant: str) -> Path:
    named = ("compile.dtype=bf16", f"compile.pef_name={name}-{variant}")
    options = example_options(name, folder, *_OF_ANOTHER_KIND, *VARIANTS[variant], *named)
    return compile_from_options(options).path


@whole
@pytest.mark.parametrize("np", [2, 3, 4])
def test_device_host_and_emulation_are_equal(np: int, compiled: list[Path]) -> None:
    compare(digests_of(np, compiled, steps=2, threads=1, env={}))


def test_they_go_on_from_a_checkpoint_over_two_nodes(compiled: list[Path], tmp_path: Path) -> None:
    check_resumed(4, compiled, tmp_path, TWO_NODES)


def test_they_are_equal_over_two_nodes(compiled: list[Path]) -> None:
    compare(digests_of(4, compiled, steps=2, threads=1, env=TWO_NODES))
