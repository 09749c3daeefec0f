"""The flow of a language model in the example apps: trained by two replicas, converted, and generating with a cache."""

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.apps.support import DATA_PARALLEL, DEVICE, HOST, SCRIPTS, differences
from tests.support.mpi import mpirun, run_job
from tests.support.whole import whole

MODULE = [sys.executable, "-m", "sambasim"]
TRAIN, GENERATE = (str(SCRIPTS / f"gpt2_{name}.py") for name in ("train", "generate"))


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
def compiled(folder: Path) -> Path:
    """The folder with both PEFs, which are compiled side by side."""
    train = (*MODULE, TRAIN, "compile", "--o1", *DATA_PARALLEL, "--pef-name", "gpt2")
    generate = (*MODULE, GENERATE, "compile", "--inference", "--pef-name", "gpt2_generate")
    with ThreadPoolExecutor() as pool:
        for job in [pool.submit(call, folder, *words) for words in (train, generate)]:
            job.result()
    return folder


@whole
def test_a_resumed_run_has_the_bits_of_one_long_run(compiled: Path) -> None:
    long = trained(compiled, "long.pt", "--steps", "4", *HOST)
    trained(compiled, "half.pt", "--steps", "2", *DEVICE)
    resumed = trained(compiled, "resumed.pt", "--steps", "2", "--resume", "half.pt", *DEVICE)
    assert long["step"] == resumed["step"] == 4
    assert differences(state_of(long), state_of(resumed)) == []


def test_the_whole_flow(compiled: Path, model_file: Any) -> None:
    folder = compiled
    by_host, by_device = (
        trained(folder, f"{name}.pt", "--steps", "4", *flags) for name, flags in (("host", HOST), ("device", DEVICE))
    )
    assert len(state_of(by_host)) > len(by_host["model"])
    assert differences(state_of(by_host), state_of(by_device)) == []

    call(folder, sys.executable, str(SCRIPTS / "gpt2_convert.py"), "device.pt", "trained")
    read = model_file.GPT2()
    model_file.load_pretrained(read, folder / "trained")
    assert differences(read.state_dict(), by_host["model"]) == []

    torch.manual_seed(0)
    for parameter in read.parameters():  # a text of a few steps is all blanks, and any cache would do
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    model_file.save_pretrained(read.state_dict(), folder / "varied")
    words = (*MODULE, GENERATE, "run", "--inference", "--model", "varied", "--prompt", "The ")
    text = call(folder, *words, "--pef", "gpt2_generate")
    expected = likeliest(read, model_file.ALPHABET, "The ", model_file.LENGTH)
    assert len(set(expected)) > 8
    assert text == f"text: {expected!r}\n"


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
