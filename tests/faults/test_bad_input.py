"""Every row of the table: the message, the exit code, and what is left. And sound input."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.command import sambasim
from tests.faults.command_lines import COMMAND_LINES
from tests.faults.fault import TRAIN, Fault, net
from tests.faults.parallelism import PARALLELISM
from tests.faults.user_code import USER_CODE


@pytest.mark.parametrize("fault", [*COMMAND_LINES, *USER_CODE, *PARALLELISM], ids=lambda fault: fault.says[:60])
def test_bad_input_is_reported(fault: Fault, tmp_path: Path, compiled: Mapping[str, bytes]) -> None:
    fault.check(tmp_path, compiled)


MODELS: Mapping[str, str] = {
    "a list that grows": net("seen.append(1)\nreturn self.linear(x)", before="seen = []\n\n\n"),
    "a dict": net("return {'logits': self.linear(x), 'name': 'net'}"),
    "a branch on a shape": net("h = self.linear(x)\nif x.shape[0] > 2:\n    h = h * 2\nreturn h"),
    "a branch on the mode": net("h = self.linear(x)\nif self.training:\n    h = h * 2\nreturn h"),
    "a change in place of what the model made": net("h = self.linear(x)\nh += 1\nreturn h"),
    "a buffer that is changed in place": net(
        "self.steps += 1\nreturn self.linear(x)",
        init="self.linear = nn.Linear(8, 3)\nself.register_buffer('steps', torch.zeros(()))",
    ),
    "an import inside": net("import math\nreturn self.linear(x) * math.pi"),
}


@pytest.mark.parametrize("text", MODELS.values(), ids=MODELS)
def test_it_compiles_and_runs(text: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(text)
    for command in (TRAIN, "run --pef net --steps 2"):
        outcome = sambasim(command.split(), tmp_path)
        assert outcome.exit_code == 0, outcome.stderr
        assert all(line.endswith("…") for line in outcome.stderr.splitlines()), outcome.stderr
