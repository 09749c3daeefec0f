"""`python -m tests.pef.write_released`: PEFs of this version of the format, to be kept; see released/README.md."""

import json
import sys
import tempfile
from pathlib import Path

from sambasim.pef.manifest import FORMAT_VERSION
from tests.faults.command import sambasim
from tests.fuzz.pefs import make_samples

RELEASED = Path(__file__).with_name("released")
RUN = ("--steps", "2", "--data", "synthetic", "--threads", "1", "--json")
TRAINED = ("convolution", "dense", "gpt", "narrow", "parallel", "recurrent")
"""Those of `make_samples` that train; the other one is for inference."""


def main() -> None:
    """Writes the folder of the version that this sambasim writes, if it is not there."""
    folder = RELEASED / ".".join(map(str, FORMAT_VERSION))
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is there: what was released is not written anew")
    folder.mkdir(parents=True, exist_ok=True)
    losses = {}
    with tempfile.TemporaryDirectory() as name:
        for path in make_samples(Path(name)):
            (folder / path.name).write_bytes(path.read_bytes())
            if path.stem in TRAINED:
                losses[path.stem] = json.loads(sambasim(["run", "--pef", str(path), *RUN], Path(name)).stdout)[
                    "loss_last"
                ]
    (folder / "runs.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
