"""What a PEF keeps of the arguments that it was compiled with, and what a run takes from it."""

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sambasim import __version__, samba
from sambasim.errors import OptionError, PefError
from sambasim.samba.utils.argparser import SambaConfig, parse_app_args
from sambasim.samba.utils.common import get_pef_info, get_pefmeta, get_pefmeta_dict
from tests.samba.harness import Layer, Made, PefOf, layer_batch

PEF = ["--pef", "net.pef"]


def predicting() -> Made:
    return samba.from_torch_model_(Layer()), None


@pytest.fixture
def pef(pef_of: PefOf) -> str:
    """Of a batch of 4, and without metadata."""
    return pef_of(predicting, layer_batch(), inference=True)


def test_metadata_has_every_argument_the_model_and_the_versions() -> None:
    arguments, model = SambaConfig("compile", pef_name="net", batch_size=2, hidden=64), Layer()
    versions = {"sambasim_version": __version__, "torch_version": str(torch.__version__)}
    given = {name: str(value) for name, value in vars(arguments).items()}
    assert get_pefmeta(arguments, model) == {**given, "hidden": "64", "model_repr": repr(model), **versions}


def test_a_pef_tells_what_is_in_it(pef: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, information = get_pefmeta_dict(Path(pef)), get_pef_info(pef)
    assert metadata["sambasim"] == __version__
    assert "(linear): Linear(in_features=6, out_features=3, bias=True)" in metadata["model_repr"]
    assert (information["name"], information["batch_size"], information["training"]) == ("net", 4, False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(pef).parents[1], "out")
    assert get_pef_info("net")["digest"] == information["digest"]
    with pytest.raises(OptionError, match="there is no PEF 'absent'"):
        get_pef_info("absent")
    Path("damaged.pef").write_bytes(b"no zip")
    with pytest.raises(PefError):
        get_pefmeta_dict("damaged.pef")


def test_the_batch_size_is_that_of_the_pef_unless_one_is_given(pef: str) -> None:
    def size(*words: str, add: Callable[[ArgumentParser], object] | None = None) -> object:
        return parse_app_args(list(words), common_parser_fn=add).batch_size

    for command in ("run", "test", "measure-performance"):
        assert size(command, "--pef", pef) == 4
    assert size("run", "--pef", pef, "-b", "1") == 1
    assert size("run", "--pef", pef, "-b5") == 5
    assert size("run", "--pef", pef, add=lambda parser: parser.set_defaults(batch_size=8)) == 8
    assert size("run", "--pef", pef, add=lambda parser: parser.add_argument("-b", "--batch-size", default=1)) == 1
    assert size("run", "--pef", str(Path(pef).parent)) == 1
    assert size("compile", "--pef", pef) == 1


def spatial(*words: str) -> Namespace:
    """As in apps that place batches side by side."""
    args = parse_app_args(list(words))
    if args.mapping == "spatial":
        args.batch_size *= args.num_spatial_batches
    return args


def test_a_batch_size_that_the_app_computes_is_computed_again_by_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--mapping", "spatial", "--num-spatial-batches", "4"]
    args = spatial("compile", "-b", "3", *flags, "--inference", "--output-folder", str(tmp_path))
    model, x = predicting()[0], samba.randn(args.batch_size, 6, name="x", batch_dim=0)
    metadata = get_pefmeta(args, model)
    pef = samba.session.compile(model, [x], name="net", config_dict=vars(args), pef_metadata=metadata)
    assert (metadata["batch_size"], get_pefmeta_dict(pef)["parsed_batch_size"]) == ("12", "3")
    assert get_pef_info(pef)["batch_size"] == 12
    capsys.readouterr()
    assert spatial("run", "--pef", pef).batch_size == 12
    assert capsys.readouterr().err == "", "nothing was typed that has no effect"
    assert spatial("test", "--pef", pef, *flags).batch_size == 12
    assert spatial("run", "--pef", pef, "-b", "3", *flags).batch_size == 12
    assert spatial("run", "--pef", pef, "-b", "12").batch_size == 12
    unusable = {"parsed_batch_size": "many", "mapping": "x"}
    pef = samba.session.compile(model, [x], name="net", config_dict=vars(args), pef_metadata=unusable)
    args = parse_app_args(["run", "--pef", pef])
    assert (args.batch_size, args.mapping) == (12, "section")
