"""Messages of what is no model: samples that do not fit together, weights that lack a parameter, calls from Python."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

import sambasim as ss
from sambasim.errors import DataError, SambasimError
from sambasim.options.compile import compile_options
from tests.state.case import BATCH, Outputs, points
from tests.support.compiled import compile_from_options


class Ragged(Dataset[tuple[Tensor, Any]]):
    """Samples of the shape [3, number + 1], or with None as their target."""

    def __init__(self, is_none: bool = False) -> None:
        self.is_none = is_none

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[Tensor, Any]:
        return torch.ones(3 if self.is_none else number + 1), None if self.is_none else torch.ones(())


@pytest.mark.parametrize("is_none", [False, True], ids=["lengths", "None"])
def test_samples_that_cannot_be_put_together_are_named_at_compile(is_none: bool, tmp_path: Path) -> None:
    given = ["data.source=tests.state.test_messages:Ragged", f"data.args.is_none={json.dumps(is_none)}"]
    given += ["loss.name=mse", "optimizer.name=sgd"]
    flags = {"output_folder": tmp_path, "batch_size": BATCH}
    with pytest.raises(DataError, match=r"of tests\.state\.test_messages:Ragged gives"):
        compile_from_options(compile_options(None, "tests.state.case:Outputs", given, flags))


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> ss.Pef:
    return _compiled(tmp_path_factory.mktemp("pef"))


def _compiled(folder: Path, **options: Any) -> ss.Pef:
    example = tuple(tensor[:BATCH] for tensor in points())
    given = {"loss": "mse", "optimizer": "sgd", "quiet": True, "name": "outputs", **options}
    return ss.compile(Outputs(), example, output_folder=folder, **given)


def test_a_weights_file_that_lacks_a_parameter_is_an_error(pef: ss.Pef, tmp_path: Path) -> None:
    file, lacking = tmp_path / "w.safetensors", tmp_path / "lacking.safetensors"
    ss.run(pef, points(), steps=1, threads=1, quiet=True, save=file)
    weights = load_file(file)
    removed = next(name for name in weights if "weight" in name)
    save_file({name: one for name, one in weights.items() if name != removed}, lacking)
    with pytest.raises(SambasimError, match=re.escape(removed)):
        ss.predict(pef, points(), weights=lacking, threads=1)
    with pytest.raises(SambasimError, match=re.escape(removed)):
        ss.run(pef, points(), weights=lacking, threads=1, quiet=True)


MISUSES: dict[str, Callable[[ss.Pef, Path], object]] = {
    "replicas of a PEF for one": lambda pef, folder: ss.run(pef, points(), replicas=2, quiet=True),
    "no steps": lambda pef, folder: ss.run(pef, points(), steps=0, quiet=True),
    "world_size without data_parallel": lambda pef, folder: _compiled(folder, world_size=2),
    "chips without a way to use them": lambda pef, folder: _compiled(folder, n_chips=2),
    "micro-batches without stages": lambda pef, folder: _compiled(folder, micro_batches=2),
    "another batch size": lambda pef, folder: _compiled(folder, batch_size=8),
    "no loss": lambda pef, folder: _compiled(folder, loss=None),
    "another optimizer": lambda pef, folder: _compiled(folder, optimizer="adan"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_the_python_api_speaks_python(misuse: str, pef: ss.Pef, tmp_path: Path) -> None:
    with pytest.raises(SambasimError) as caught:
        MISUSES[misuse](pef, tmp_path)
    assert not re.findall(r"(?<!\w)--[a-z][\w-]*", str(caught.value)), str(caught.value)
    assert "sambasim/api" not in (caught.value.where or "")
