"""A run as TensorBoard shows it."""

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from sambasim.errors import MachineError, OptionError, failing_with
from sambasim.records.metrics import EvaluationRecord, Line, StepRecord, columns_of
from sambasim.runtime.run.run_observer import RunObserver, Start

_FLUSH_S = 5  # what is lost at most if the process is killed


class TensorBoard(RunObserver):
    """Writes events to `folder` by torch's writer; a resumed run replaces those after its beginning. Raises OptionError
    where TensorBoard is not installed, and MachineError if the disk is full."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            what = f"--tensorboard needs a package that cannot be imported: {error}"
            raise OptionError(what, remedy="pip install 'sambasim[train]'") from error
        self._open, self._folder = partial(SummaryWriter, str(folder), flush_secs=_FLUSH_S), folder
        self._closing = ExitStack()

    def started(self, start: Start) -> None:
        step = start.plan.start.step
        with self._written():
            self._writer = self._closing.enter_context(self._open(purge_step=step + 1 if step else None))

    def recorded(self, record: Line) -> None:
        if isinstance(record, StepRecord | EvaluationRecord):
            group = "train" if record.kind == "step" else "evaluation"
            with self._written():
                for name, value in columns_of(record, "/").items():
                    is_time = name.partition("/")[0].endswith("_s") and name != "samples_per_s"
                    if value is not None and not is_time and name not in ("step", "samples"):
                        self._writer.add_scalar(f"{group}/{name}", value, record.step)

    def close(self) -> None:
        """At the end, and after an error: nothing that was told is lost."""
        with self._written():
            self._closing.close()

    def _written(self) -> AbstractContextManager[None]:
        what = f"events for TensorBoard cannot be written to {self._folder}"
        return failing_with(MachineError, what, "free space there, or another place: --tensorboard DIR")
