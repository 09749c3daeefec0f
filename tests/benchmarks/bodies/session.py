"""A SambaFlow app that times its own steps on the LeNet-like example: `session.run`, and the runtime under it, in turn.

    python -m sambasim tests/benchmarks/bodies/session.py FOLDER

The PEF goes to FOLDER. Prints one line of JSON: the medians of both, in seconds a step.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from sambasim import samba
from sambasim.pef import map_weights, read
from sambasim.runtime.stepwise import STEP, Mode, StepwiseReplica
from sambasim.samba import context, utils
from sambasim.samba.machine import Machine
from sambasim.samba.utils.argparser import parse_app_args

EXAMPLES = Path(__file__).parents[3] / "examples" / "sambaflow"
BATCH_SIZE = 32
STEPS = 20
"""Of one turn, so that each finds the caches as its own last step left them."""

TURNS = 50


def main(folder: Path) -> None:
    """Compile, load twice, and take turns."""
    args = parse_app_args(["compile", "-b", str(BATCH_SIZE), "--output-folder", str(folder), "--pef-name", "lenet"])
    sys.path.append(str(EXAMPLES))
    lenet = import_module("lenet")
    model = lenet.LeNet()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    image, label = lenet.get_inputs(args)
    pef = Path(samba.session.compile(model, (image, label), optimizer, name="lenet", config_dict=vars(args)))
    context.current().command = "run"  # what is checked in a run is measured too
    utils.trace_graph(model, (image, label), optimizer, pef=str(pef))
    # Both run the same replica, since a second one may lie luckier in memory.
    document = read(pef)
    replica = StepwiseReplica(document.program, context.communicator())
    for symbol, weights in map_weights(pef).items():
        replica.write(symbol, weights)
    samba.session.load(Machine(document, model, (optimizer,), replica), (image, label), model.output_tensors)
    batch = {"image": image.torch(), "label": label.torch()}
    tangent = torch.full((BATCH_SIZE,), 1 / BATCH_SIZE)

    def by_session() -> None:
        samba.session.run(
            (image, label),
            model.output_tensors,
            hyperparam_dict={"lr": 0.01, "momentum": 0.9},
            data_parallel=args.data_parallel,
            reduce_on_rdu=args.reduce_on_rdu,
        )

    def by_runtime() -> None:
        replica.run(STEP, batch, tangent, Mode.ALONE)

    print(json.dumps(_medians_s({"session.run": by_session, "the runtime": by_runtime})))


def _medians_s(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS + 1):
        for name, step in steps.items():
            began_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            if turn:  # the first does not count
                seconds[name].append((time.perf_counter() - began_s) / STEPS)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
