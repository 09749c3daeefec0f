"""Train as often as argv[1] says, a JSON list of `Run`: starting a job takes seconds.

Runs that are `alone` emulate their replicas in one process: they come first, each on one of the ranks. Rank 0 prints
one JSON line for each run, as `tests.mpi.training.Trained` reads it.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sambasim.ir.graph import Node
from sambasim.options.run import RunOptions
from sambasim.runtime.engine import handlers
from sambasim.runtime.engine.handlers import Binding, Handler
from sambasim.runtime.engine.instructions import Instruction
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import RunObserver, Start
from sambasim.runtime.run.setup import set_up
from sambasim.runtime.transports import exchange
from sambasim.runtime.transports.base import Communication, Fusion, Transport
from sambasim.runtime.values.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class Run:
    """One training of a PEF.

    alone: by one of the processes, which emulates all replicas
    counted: the calls of what the handler table binds
    round_elements: of an exchange through the host; None for the usual number
    """

    name: str
    pef: str
    options: Mapping[str, object]
    alone: bool = False
    counted: bool = False
    round_elements: int | None = None


class Calls:
    """How often each function was called that a handler bound, by node; and each fused one, by the pattern it fuses."""

    def __init__(self) -> None:
        self.nodes: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within it, every entry of the handler table and every fusion counts the calls of what it binds."""
        import pytest  # most jobs count nothing, and each rank would import it

        with pytest.MonkeyPatch.context() as patch:
            for operator, handler in handlers.HANDLERS.items():
                patch.setitem(handlers.HANDLERS, operator, self._counting(handler))
            patch.setattr(handlers, "_aten", self._counting(handlers._aten))
            for transport in Transport.__subclasses__():
                patch.setattr(transport, "fusions", self._fusions(transport.fusions))
            yield

    def _counting(self, handler: Handler) -> Handler:
        def bind(nodes: Sequence[Node], binding: Binding) -> Instruction:
            instruction, names = handler(nodes, binding), [node.name for node in nodes]
            return replace(instruction, function=_calling(instruction.function, lambda: self.nodes.update(names)))

        return bind

    def _fusions(self, fusions: Callable[[Transport], Sequence[Fusion]]) -> Callable[[Transport], Sequence[Fusion]]:
        return lambda transport: [Fusion(one.pattern, partial(self._bind, one)) for one in fusions(transport)]

    def _bind(self, fusion: Fusion, optimizers: Optimizers) -> Communication:
        communication, pattern = fusion.bind(optimizers), " ".join(fusion.pattern)
        finish = _calling(communication.finish, lambda: self.fused.update([pattern]))
        communication.finish = finish  # type: ignore[method-assign]
        return communication


def _calling(function: Callable[..., object], note: Callable[[], None]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        note()
        return function(*args, **kwargs)

    return call


class _Messages(RunObserver):
    def __init__(self) -> None:
        self.sync, self.notices, self.notes = "", list[str](), list[str]()

    def started(self, start: Start) -> None:
        self.sync, self.notices = start.sync, list(start.notices)

    def noted(self, what: str) -> None:
        self.notes.append(what)


def train(run: Run, communicator: Communicator) -> dict[str, object]:
    """What `tests.mpi.training.Trained` says of the run."""
    messages, calls, whole_rounds = _Messages(), Calls(), exchange.ROUND_ELEMENTS
    exchange.ROUND_ELEMENTS = run.round_elements or whole_rounds
    with calls.counted() if run.counted else nullcontext():
        summary = TrainingJob(
            set_up(Path(run.pef), RunOptions.model_validate(run.options), communicator), messages
        ).run()
    exchange.ROUND_ELEMENTS = whole_rounds
    found = {"summary": summary.model_dump(mode="json"), "calls": calls.nodes, "fused": calls.fused}
    return {"name": run.name, **vars(messages), **found}


def main() -> None:
    communicator, runs = connect(sys.argv), [Run(**run) for run in json.loads(sys.argv[1])]
    rank, world_size = communicator.rank, communicator.world_size
    single = single_rank(communicator.topology.host_name, communicator.library)
    emulations = [run for run in runs if run.alone]
    own = [train(run, single) for number, run in enumerate(emulations) if number % world_size == rank]
    done = [one for part in communicator.all_gather_object(own) for one in part]
    done += [train(run, communicator) for run in runs if not run.alone]
    if rank == 0:
        with open(1, "w", closefd=False) as stdout:  # with PYTHONUNBUFFERED, sys.stdout may print only a part
            print("\n".join(map(json.dumps, done)), file=stdout)
    communicator.close()
