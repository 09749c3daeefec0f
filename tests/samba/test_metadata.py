"""Metadata of PEFs, and the batch size that a run takes from them."""

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sambasim import __version__, samba
from sambasim.errors import OptionError, PefError
from sambasim.samba.utils.argparser import SambaConfig, parse_app_args
from sambasim.samba.utils.common import get_pef_info, get_pefmeta, get_pefmeta_dict
from tests.samba.harness import Made, PefOf


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return torch.Tensor.relu(self.linear(images))


def _predicting() -> Made:
    return samba.from_torch_model_(Net()), None


@pytest.fixture
def pef(pef_of: PefOf) -> Path:
    """Of a batch of 2, and without metadata."""
    return Path(pef_of(_predicting, [samba.randn(2, 4, name="images", batch_dim=0)], inference=True))


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


def test_information_is_plain_data(pef: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = get_pef_info(str(pef))
    assert (information["name"], information["batch_size"], information["training"]) == ("net", 2, False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pef.parents[1], "out")
    assert get_pef_info("net")["digest"] == information["digest"]


def test_a_pef_that_is_not_there_or_damaged_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no PEF 'absent'"):
        get_pef_info("absent")
    damaged = tmp_path / "damaged.pef"
    damaged.write_bytes(b"no zip")
    with pytest.raises(PefError):
        get_pefmeta_dict(damaged)


def test_the_batch_size_is_that_of_the_pef_unless_one_is_given(pef: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def size(*words: str, add: Callable[[ArgumentParser], object] | None = None) -> object:
        return parse_app_args(list(words), common_parser_fn=add).batch_size

    for command in ("run", "test", "measure-performance"):
        assert size(command, "--pef", str(pef)) == 2
    assert size("run", "--pef", str(pef), "-b", "1") == 1
    assert size("run", "--pef", str(pef), "-b4") == 4
    assert size("run", "--pef", str(pef), add=lambda parser: parser.set_defaults(batch_size=8)) == 8
    assert size("run", "--pef", str(pef), add=lambda parser: parser.add_argument("-b", "--batch-size", default=1)) == 1
    assert size("run", "--pef", str(pef.parent)) == 1
    assert size("compile", "--pef", str(pef)) == 1


def spatial(*words: str) -> Namespace:
    """As in apps that place batches side by side."""
    args = parse_app_args(list(words))
    if args.mapping == "spatial":
        args.batch_size *= args.num_spatial_batches
    return args


def test_a_batch_size_that_the_app_computes_is_computed_again_by_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--mapping", "spatial", "--num-spatial-batches", "4"]
    args = spatial("compile", "-b", "3", *flags, "--inference", "--output-folder", str(tmp_path))
    model = samba.from_torch_model_(Net())
    images = samba.randn(args.batch_size, 4, name="images", batch_dim=0)
    metadata = get_pefmeta(args, model)
    assert (metadata["batch_size"], metadata["parsed_batch_size"]) == ("12", "3")
    pef = samba.session.compile(model, [images], name="net", config_dict=vars(args), pef_metadata=metadata)
    assert get_pef_info(pef)["batch_size"] == 12
    capsys.readouterr()
    assert spatial("run", "--pef", pef).batch_size == 12
    assert capsys.readouterr().err == "", "nothing was typed that has no effect"
    assert spatial("test", "--pef", pef, *flags).batch_size == 12
    assert spatial("run", "--pef", pef, "-b", "3", *flags).batch_size == 12
    assert spatial("run", "--pef", pef, "-b", "12").batch_size == 12


def test_the_batch_size_of_the_pef_is_taken_where_its_metadata_says_nothing_usable(tmp_path: Path) -> None:
    metadata = {"parsed_batch_size": "many", "mapping": "x"}
    images, config = samba.randn(12, 4, name="images", batch_dim=0), {"output_folder": str(tmp_path), "inference": True}
    pef = samba.session.compile(_predicting()[0], [images], config_dict=config, pef_metadata=metadata)
    args = parse_app_args(["run", "--pef", pef])
    assert (args.batch_size, args.mapping) == (12, "section")
