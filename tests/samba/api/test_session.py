"""The session as apps use it: what they compile and trace, run, and move."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.samba.api.conftest import Net, imported, seeded_net


def test_compile_as_apps_do(
    samba: Any, inputs: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pef_utils = imported("samba.utils.pef_utils")
    model = samba.from_torch_model_(seeded_net())
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    args = Namespace(command="compile", pef_name="net", output_folder=str(tmp_path), data_parallel=True, world_size=2)
    path = samba.session.compile(
        model, inputs, optimizer, name="net", app_dir=samba.utils.get_file_dir(__file__), config_dict=vars(args),
        pef_metadata=pef_utils.get_pefmeta(args, model), squeeze_bs_dim=True, init_output_grads=True,
        io_host_memory=True, metadata={"conv_tiling": "none"},
    )  # fmt: skip
    assert path == str(tmp_path / "net" / "net.pef")
    assert capsys.readouterr().out.endswith(f"PEF file {path} created\nCompilation succeeded\n")
    kept = pef_utils.get_pefmeta_dict(path)
    assert (kept["world_size"], kept["conv_tiling"], kept["model_repr"]) == ("2", "none", repr(model))


def test_a_model_knows_when_it_is_traced(samba: Any, inputs: tuple[Any, Any], tmp_path: Path) -> None:
    class Asks(Net):
        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            losses, outputs = super().forward(x, target)
            return (losses * 2 if samba.session.tracing else losses), outputs

    torch.manual_seed(0)
    model = samba.from_torch_model_(Asks())
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    path = samba.session.compile(model, inputs, optimizer, name="asks", config_dict={"output_folder": str(tmp_path)})
    samba.utils.trace_graph(model, inputs, optimizer, pef=path)
    losses, _ = samba.session.run(inputs, section_types=["FWD"])
    assert not samba.session.tracing
    assert torch.equal(losses.torch(), model(*inputs)[0].torch() * 2)


def test_weights_move_between_host_and_device(samba: Any, inputs: tuple[Any, Any], traced: tuple[Net, Any]) -> None:
    model, optimizer = traced
    start = {name: value.clone() for name, value in model.state_dict().items()}
    samba.session.run(inputs)
    assert torch.equal(model.first.weight, start["first.weight"])
    samba.session.to_cpu(model)
    assert not torch.equal(model.first.weight, start["first.weight"])
    assert len(optimizer.state_dict()["state"]) == 4
    losses, _ = samba.session.run(inputs, section_types=["FWD"])
    assert torch.equal(losses.torch(), samba.to_torch(model(*inputs)[0]))
    for send in (samba.session.to_device, samba.session.to_rdu):
        with torch.no_grad():
            model.first.bias.add_(1)
        send(model)
        (bias,) = samba.session.get_tensors_by_name(["net__first__bias"])
        assert torch.equal(bias.torch(), model.first.bias)
