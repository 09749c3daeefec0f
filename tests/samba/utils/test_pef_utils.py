"""The metadata of a PEF: made from a command line, and read back from the file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import __version__
from sambasim.compiler.compile import compile_model
from sambasim.errors import OptionError, PefError
from sambasim.options.compile import CompileOptions
from sambasim.samba.utils.argparser import SambaConfig
from sambasim.samba.utils.pef_utils import get_pef_info, get_pefmeta, get_pefmeta_dict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return torch.Tensor.relu(self.linear(images))


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CompileOptions(pef_name="net", output_folder=tmp_path_factory.mktemp("out"), inference=True)
    return compile_model(Net(), {"images": torch.zeros(2, 4)}, options, by_keyword=False).path


def test_metadata_has_every_argument_the_model_and_the_versions() -> None:
    arguments = SambaConfig("compile", pef_name="net", batch_size=2, hidden=64)
    model = Net()
    metadata = get_pefmeta(arguments, model)
    assert metadata.items() >= {name: str(value) for name, value in vars(arguments).items()}.items()
    assert set(metadata) - set(vars(arguments)) == {"model_repr", "sambasim_version", "torch_version"}
    assert metadata["hidden"] == "64"
    assert metadata["model_repr"] == repr(model)
    assert metadata["sambasim_version"] == __version__
    assert metadata["torch_version"] == torch.__version__


def test_metadata_is_read_back(pef: Path) -> None:
    metadata = get_pefmeta_dict(pef)
    assert metadata["sambasim"] == __version__
    assert "(linear): Linear(in_features=4, out_features=3, bias=True)" in metadata["model"]


def test_information_is_plain_data(pef: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = get_pef_info(str(pef))
    assert (information["name"], information["batch_size"], information["training"]) == ("net", 2, False)
    monkeypatch.chdir(pef.parents[2])
    pef.parents[1].rename("out")
    assert get_pef_info("net")["digest"] == information["digest"]


def test_a_pef_that_is_not_there_or_damaged_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no PEF 'absent'"):
        get_pef_info("absent")
    damaged = tmp_path / "damaged.pef"
    damaged.write_bytes(b"no zip")
    with pytest.raises(PefError):
        get_pefmeta_dict(damaged)
