"""What ends a compilation before it begins."""

from pathlib import Path

import pytest

from sambasim.errors import MachineError, UserError
from sambasim.options.compile import compile_options
from tests.support.compiled import compile_from_options
from tests.support.mpi import ROOT


@pytest.mark.parametrize("target", ["examples.char_gpt:CharGPT", "transformers:GPT2LMHeadModel"])
def test_weights_that_do_not_fit_into_this_machine_are_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sambasim.commands.compile.available_bytes", lambda: 1 << 16)
    options = compile_options(None, target, ["optimizer.name=sgd"], {})
    with pytest.raises(MachineError, match=r"weights of this model need more than the 64.0 KiB of memory"):
        compile_from_options(options)


NET = """
import numpy as np
import torch
from torch import nn

def Net():
    return nn.Linear(3, 2)

def ragged():
    return [(torch.zeros(3 + index), 0) for index in range(8)]

def with_none():
    return [(torch.zeros(3), None if index == 2 else 1) for index in range(8)]

def with_text_or_number():
    return [(torch.zeros(3), "cat" if index else 1) for index in range(8)]

def classes_from_one():
    return [(torch.zeros(3), 1 + index % 2) for index in range(8)]

def of_numpy():
    return [(np.zeros(3), index % 2) for index in range(8)]
"""


def _compile(folder: Path, source: str) -> tuple[str, ...]:
    (folder / "net.py").write_text(NET)
    given = ["optimizer.name=sgd", "loss.name=cross_entropy", f"data.source={folder}/net.py:{source}"]
    options = compile_options(None, f"{folder}/net.py:Net", given, {"batch_size": 4, "output_folder": folder})
    return compile_from_options(options).notices


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            "ragged",
            r"sample 1 of .*:ragged gives float32\[4\] for value 0, and sample 0 of .*:ragged gives float32\[3\]",
        ),
        ("with_none", r"sample 2 of .*:with_none gives None for value 1, and sample 0 of .*:with_none gives a int"),
        ("with_text_or_number", r"sample 1 of .* gives a str for value 1, and sample 0 of .* gives a int"),
        ("classes_from_one", "target goes from 1 to 2, and the model has 2 classes, 0 to 1"),
    ],
)
def test_samples_that_do_not_fit_are_refused_as_by_a_run(source: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what) as error:
        _compile(tmp_path, source)
    assert error.value.remedy


def test_a_notice_tells_what_becomes_float32(tmp_path: Path) -> None:
    assert "float64 samples become float32, as the model is: input" in _compile(tmp_path, "of_numpy")
