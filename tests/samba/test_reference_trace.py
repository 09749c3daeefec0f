"""A data parallel compile of the reference's logistic regression, against what SambaFlow 1.14 was seen to make of it.

The fidelity page says where and why this differs: see "The PEF of a logistic regression" there.
"""

import re
from pathlib import Path

import pytest
from torch import Tensor, nn

from sambasim import samba
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from tests.samba.harness import compiled, with_sgd

BATCH, FEATURES, CLASSES = 500, 784, 10


class LogReg(nn.Module):
    """Images `[500, 784]` and labels `[500]` to `(loss, logits)`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(FEATURES, CLASSES)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lin_layer(inputs)
        return self.criterion(logits, targets), logits


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    images = samba.randn(BATCH, FEATURES, name="image", batch_dim=0)
    labels = samba.randint(CLASSES, (BATCH,), name="label", batch_dim=0)
    made = with_sgd(LogReg, momentum=0.9)
    folder = tmp_path_factory.mktemp("reference")
    pef = compiled(made, (images, labels), folder, data_parallel=True, world_size=2)
    return read(Path(pef)).program


def test_the_sections_are_one_of_each_kind_and_a_gather(program: Program) -> None:
    assert program.training is not None
    named = [(section.kind.value, section.name) for section in program.training.sections]
    assert [kind for kind, _ in named] == ["FWD", "BCKWD", "REDUCE", "OPT", "GATHER"]
    forward, backward, *_ = (name for _, name in named)
    assert forward == "logreg__lin_layer__linear"
    assert backward == "logreg__criterion__crossentropyloss_bwd"


def test_the_names_of_parameters_gradients_and_momentum_are_those_of_the_reference(program: Program) -> None:
    def names(kind: SymbolKind) -> list[str]:
        return [symbol.name for symbol in program.symbols.values() if symbol.kind is kind]

    parameters = ["logreg__lin_layer__weight", "logreg__lin_layer__bias"]
    assert names(SymbolKind.PARAMETER) == parameters
    assert names(SymbolKind.GRADIENT) == [f"{name}__grad" for name in parameters]
    assert names(SymbolKind.OPTIMIZER_STATE) == [f"{name}__sgd0__momentum" for name in parameters]


def test_the_group_and_the_reduce_buffer(program: Program) -> None:
    (group,) = [s for s in program.symbols.values() if s.kind is SymbolKind.ACCUMULATION_GROUP]
    assert re.fullmatch(r"\$OPT_dp_accum_group_[0-9a-f]{40}", group.name)
    padded = sum(-(-numel // 64) * 64 for numel in (FEATURES * CLASSES, CLASSES))
    assert group.type.numel == padded == 7_936  # there 25,088: the device pads the matrix to its own layout
    buffer = program.symbols["accum_dummy_0_reduce_buf"]
    assert buffer.kind is SymbolKind.REDUCE_BUFFER
    assert buffer.type.numel == group.type.numel + 64  # as there


def test_the_world_size_is_a_runtime_argument(program: Program) -> None:
    assert program.data_parallel
    assert program.world_size == 2
    assert "dp_scale_factor" in {argument.name for argument in program.runtime_arguments}
