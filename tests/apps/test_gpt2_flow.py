"""The flow of a language model in the example apps: trained by two replicas, converted, and generating with a cache."""

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sambasim.samba import process
from sambasim.samba.session import session
from tests.apps.support import DATA_PARALLEL, DEVICE, HOST, SCRIPTS, differences
from tests.support.door import open_door
from tests.support.mpi import mpirun, run_job
from tests.support.whole import whole

MODULE = [sys.executable, "-m", "sambasim"]
TRAIN = str(SCRIPTS / "gpt2_train.py")


@pytest.fixture(scope="module")
def model_file() -> Iterator[Any]:
    """The module `gpt2_model`, which needs nothing of sambasim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield import_module("gpt2_model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpt2")


def call(folder: Path, *words: str, np: int = 1) -> str:
    argv = [*([mpirun(), "-np", str(np)] if np > 1 else []), *words]
    return run_job(argv, timeout=120, cwd=folder).check().stdout


def called(folder: Path, app: str, *words: str) -> None:
    """Calls the app with the words of its command line, in this process."""
    with chdir(folder), open_door():
        session.reset()
        process.reset()
        try:
            import_module(app).main([*words])
        finally:
            session.reset()
            process.reset()


def trained(folder: Path, name: str, *flags: str) -> dict[str, Any]:
    """The checkpoint of two replicas."""
    words = (*MODULE, TRAIN, "run", "--pef", "gpt2", "--threads", "1", "--checkpoint", name, *flags)
    call(folder, *words, np=2)
    saved: dict[str, Any] = torch.load(folder / name)
    return saved


def state_of(saved: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and optimizer state of a checkpoint."""
    of_optimizer = saved["optimizer"]["state"]
    moments = {f"{index} {key}": one for index, state in of_optimizer.items() for key, one in state.items()}
    return {**saved["model"], **moments}


def likeliest(model: Any, alphabet: str, prompt: str, length: int) -> str:
    """What plain PyTorch writes, without a cache."""
    tokens = [alphabet.index(character) for character in prompt]
    while len(tokens) < length:
        tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return "".join(alphabet[token] for token in tokens)


@pytest.fixture(scope="module")
def compiled(folder: Path, model_file: Any) -> Path:
    """The folder with the PEF that trains."""
    called(folder, "gpt2_train", "compile", "--o1", *DATA_PARALLEL, "--pef-name", "gpt2")
    return folder


@whole
def test_a_resumed_run_has_the_bits_of_one_long_run(compiled: Path) -> None:
    long = trained(compiled, "long.pt", "--steps", "4", *HOST)
    trained(compiled, "half.pt", "--steps", "2", *DEVICE)
    resumed = trained(compiled, "resumed.pt", "--steps", "2", "--resume", "half.pt", *DEVICE)
    assert long["step"] == resumed["step"] == 4
    assert differences(state_of(long), state_of(resumed)) == []


@pytest.fixture(scope="module")
def checkpoints(compiled: Path) -> list[dict[str, Any]]:
    """By each sync."""
    flags = {"host": HOST, "device": DEVICE}
    return [trained(compiled, f"{name}.pt", "--steps", "2", *way) for name, way in flags.items()]


def converted(folder: Path, name: str, model: Any) -> None:
    """Converts the checkpoint NAME.pt into the folder NAME, and reads it into `model`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpt2_convert.py", str(folder / f"{name}.pt"), str(folder / name)])
        runpy.run_path(str(SCRIPTS / "gpt2_convert.py"), run_name="__main__")
    import_module("gpt2_model").load_pretrained(model, folder / name)


def test_both_syncs_train_alike_and_the_model_is_converted(
    folder: Path, checkpoints: list[dict[str, Any]], model_file: Any
) -> None:
    by_host, saved = checkpoints
    assert len(state_of(saved)) > len(saved["model"])
    assert differences(state_of(saved), state_of(by_host)) == []
    read = model_file.GPT2()
    converted(folder, "device", read)
    assert differences(read.state_dict(), saved["model"]) == []


def test_text_by_two_graphs_is_that_of_pytorch_without_a_cache(
    folder: Path, checkpoints: list[dict[str, Any]], model_file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    called(folder, "gpt2_generate", "compile", "--inference", "--pef-name", "gpt2_generate")
    torch.manual_seed(0)
    saved = checkpoints[1]
    # The most likely text of a model of few steps is all blanks, and any cache would do.
    weights = {name: value + 0.2 * torch.randn_like(value) for name, value in saved["model"].items()}
    torch.save({**saved, "model": weights}, folder / "varied.pt")
    model = model_file.GPT2()
    converted(folder, "varied", model)
    capsys.readouterr()
    called(
        folder, "gpt2_generate", "run", "--inference", "--model", "varied", "--prompt", "The ", "--pef", "gpt2_generate"
    )
    expected = likeliest(model, model_file.ALPHABET, "The ", model_file.LENGTH)
    assert len(set(expected)) > 8
    assert capsys.readouterr().out == f"text: {expected!r}\n"


@whole
def test_transformers_reads_the_folder_as_the_same_model(folder: Path, model_file: Any) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from transformers import GPT2LMHeadModel  # slow to import

    torch.manual_seed(0)
    ours = model_file.GPT2().eval()
    model_file.save_pretrained(ours.state_dict(), folder / "untrained")
    theirs, report = GPT2LMHeadModel.from_pretrained(folder / "untrained", output_loading_info=True)
    assert not any(report.values())
    tokens = torch.randint(len(model_file.ALPHABET), (2, model_file.LENGTH))
    torch.testing.assert_close(theirs.eval()(tokens).logits, ours.logits(tokens), rtol=1e-4, atol=1e-5)
