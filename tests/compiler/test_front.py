"""What ends a compilation before it begins."""

import pytest

from sambasim.compiler.front import compile_from_options
from sambasim.errors import MachineError
from sambasim.options.compile import compile_options
from tests.support.mpi import ROOT


@pytest.mark.parametrize("target", ["examples.char_gpt:CharGPT", "transformers:GPT2LMHeadModel"])
def test_weights_that_do_not_fit_into_this_machine_are_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sambasim.compiler.front.available_bytes", lambda: 1 << 16)
    options = compile_options(None, target, ["optimizer.name=sgd"], {})
    with pytest.raises(MachineError, match=r"weights of this model need more than the 64.0 KiB of memory"):
        compile_from_options(options)
