"""Every row of the table: the message, the exit code, and what is left. And sound input."""

from pathlib import Path

import pytest

from tests.faults.command import sambasim
from tests.faults.command_lines import COMMAND_LINES
from tests.faults.fault import TRAIN, Compiled, Fault, net
from tests.faults.parallelism import PARALLELISM
from tests.faults.user_code import USER_CODE


@pytest.mark.parametrize("fault", [*COMMAND_LINES, *USER_CODE, *PARALLELISM], ids=lambda fault: fault.says[:60])
def test_bad_input_is_reported(fault: Fault, tmp_path: Path, compiled: Compiled) -> None:
    fault.check(tmp_path, compiled)


SOUND = net(
    "import math\n"
    "seen.append(1)\n"
    "self.steps += 1\n"
    "h = self.linear(x)\n"
    "h += math.pi\n"
    "if x.shape[0] > 2:\n    h = h * 2\n"
    "if self.training:\n    h = h * 2\n"
    "return {'logits': h, 'name': 'net'}",
    init="self.linear = nn.Linear(8, 3)\nself.register_buffer('steps', torch.zeros(()))",
    before="seen = []\n\n\n",
)
"""With what a step may do: an import, a list that grows, a buffer and a tensor of its own that it changes in place,
branches on a shape and on the mode, and a dict as its result."""


def test_it_compiles_and_runs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOUND)
    for command in (TRAIN, "run --pef net --steps 2"):
        outcome = sambasim(command, tmp_path).check()
        assert all(line.endswith("…") for line in outcome.stderr.splitlines()), outcome.stderr
