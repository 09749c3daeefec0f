"""Names and sections in the PEF: of apps whose `state_dict()` has other names than `named_parameters()`; and of a data
parallel compile of the reference's logistic regression, against what SambaFlow 1.14 was seen to make of it. The README
says where and why this differs: see "The PEF of a logistic regression" there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sambasim import samba
from sambasim.errors import PefError
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.samba.utils import trace_graph
from tests.samba.harness import LogReg, Net, compiled, net_batch, seeded, with_sgd

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(Net):
    """A part in a wrapper, and a `state_dict` without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("first", checkpoint_wrapper(self.first))

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # on purpose
        return {f"net/{name}": value for name, value in super().state_dict().items()}


def _optimizers(model: Net, kind: Any) -> list[Any]:
    """Two parameter groups in one optimizer, and a second optimizer."""
    groups = [{"params": [model.first.weight]}, {"params": [model.first.bias], "lr": 0.3}]
    return [kind(groups, lr=0.1, momentum=0.9), kind(model.second.parameters(), lr=0.2)]


def test_an_app_trains_fetches_and_finds_its_tensors(tmp_path: Path, net_pef: str) -> None:
    model, eager = samba.from_torch_model_(seeded(Own)), seeded(Own)
    inputs = net_batch(3)
    optimizers, torch_optimizers = _optimizers(model, samba.optim.SGD), _optimizers(eager, torch.optim.SGD)
    trace_graph(model, inputs, optimizers, pef=compiled((model, optimizers), inputs, tmp_path))
    for _ in range(3):
        samba.session.run(inputs, model.output_tensors)
        eager.zero_grad()
        torch.autograd.backward(eager(*map(samba.to_torch, inputs))[0].mean())
        for optimizer in torch_optimizers:
            optimizer.step()
    on_device = [samba.session.get_tensors_by_name([one.sn_name])[0].sn_data for one in model.parameters()]
    assert all(map(torch.equal, on_device, eager.parameters()))
    samba.session.to_cpu(model)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    momentum = optimizers[0].state[model.first.weight]["momentum_buffer"]
    assert torch.equal(momentum, torch_optimizers[0].state[eager.first.weight]["momentum_buffer"])
    with pytest.raises(PefError, match="is of another model"):
        trace_graph(model, inputs, optimizers, pef=net_pef)


def test_a_data_parallel_logistic_regression_is_that_of_the_reference(tmp_path: Path) -> None:
    images, labels = samba.randn(500, 784, name="image"), samba.randint(10, (500,), name="label")
    made = with_sgd(lambda: LogReg(features=784, classes=10), momentum=0.9)
    program = read(Path(compiled(made, (images, labels), tmp_path, data_parallel=True, world_size=2))).program
    sections = [(section.kind.value, section.name) for section in program.leading.sections]
    assert [kind for kind, _ in sections] == ["FWD", "BCKWD", "REDUCE", "OPT", "GATHER"]
    assert sections[0][1] == "logreg__lin_layer__linear"
    assert sections[1][1] == "logreg__criterion__crossentropyloss_bwd"
    names = {kind: [one.name for one in program.symbols.values() if one.kind is kind] for kind in SymbolKind}
    parameters = ["logreg__lin_layer__weight", "logreg__lin_layer__bias"]
    assert names[SymbolKind.PARAMETER] == parameters
    assert names[SymbolKind.GRADIENT] == [f"{name}__grad" for name in parameters]
    assert names[SymbolKind.OPTIMIZER_STATE] == [f"{name}__sgd0__momentum" for name in parameters]
    (group,) = names[SymbolKind.ACCUMULATION_GROUP]
    assert re.fullmatch(r"\$OPT_dp_accum_group_[0-9a-f]{40}", group)
    # 7,840 and 10, each padded to 64. There it is 25,088: the device pads the matrix to its own layout.
    assert program.symbols[group].type.numel == 7_872 + 64 == 7_936
    buffer = program.symbols["accum_dummy_0_reduce_buf"]
    assert buffer.kind is SymbolKind.REDUCE_BUFFER
    assert buffer.type.numel == 7_936 + 64  # as there
    assert (program.data_parallel, program.world_size) == (True, 2)
    assert "dp_scale_factor" in {argument.name for argument in program.runtime_arguments}
