"""Compile a live model in Python, or load what was compiled."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from inspect import isfunction
from pathlib import Path
from typing import Any, cast

from rich.console import RenderableType
from torch import Tensor, nn
from torch.optim import Optimizer

from sambasim.api.given import batch_of, collated, loss_of, optimizer_of, optimizers_in
from sambasim.api.ranks import connected, same_call, speaks_python
from sambasim.commands.compile import compile_lengths
from sambasim.commands.proof.eager import LiveModel
from sambasim.commands.torch_optimizers import taken_over
from sambasim.compiler.front import inputs_of, refuse_torchscript
from sambasim.data.batches import each_value
from sambasim.data.datasets import Collate
from sambasim.errors import ModelError, OptionError, say
from sambasim.ir.program import Program
from sambasim.options.compile import options_in_python
from sambasim.options.python_words import in_python
from sambasim.pef import Checked, PefDocument, digest_of, locate, map_weights, read
from sambasim.report.inspect import contents, inspection, summary_table
from sambasim.report.summaries import next_command
from sambasim.report.tables import Row, Shown, Tables
from sambasim.runtime.values.memory import state_dict
from sambasim.terminal.output import phases

_EVALUATING = "the model was in evaluation mode; it is trained in training mode, with dropout and BatchNorm"
_STATE = "the optimizer has taken steps before; its states, such as momentum, begin at zero here"


class Pef(Shown):
    """A compiled model on disk: its program, its weights, and how it was compiled. `notices` are those of `compile`."""

    def __init__(self, path: Path, notices: tuple[str, ...] = ()) -> None:
        self.path, self.notices = path.absolute(), notices
        self.digest: str = digest_of(path)
        """SHA-256 of the PEF, in hexadecimal."""

    @cached_property
    def document(self) -> PefDocument:
        self.check()
        return read(self.path)

    def check(self) -> None:
        """Raises OptionError if the file holds another PEF by now."""
        if (now := digest_of(self.path)) != self.digest:
            what = f"{self.path} was compiled again: it has the digest {now[:12]}, and was {self.digest[:12]}"
            raise OptionError(what, remedy="give each PEF a name of its own: sambasim.compile(…, name=…)")

    @property
    def checked(self) -> Checked | None:
        """How it was compared with its model in eager PyTorch; None if it was not."""
        return self.document.first.checked

    @property
    def program(self) -> Program:
        return self.document.program

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def command(self) -> str:
        """The command that runs it."""
        return next_command(self.program, self.path)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Copies of its parameters and buffers, by the names of the model's `state_dict`."""
        self.check()
        return dict(state_dict(self.program, dict(map_weights(self.path)).__getitem__))

    @cached_property
    def contents(self) -> Row:
        """What `sambasim inspect --json` prints."""
        return contents(self.path, self.document)

    def inspect(self, *, everything: bool = False) -> Tables:
        """Its sections, operators and sizes; with `everything` also symbols, runtime arguments and options."""
        return Tables([inspection(self.contents, everything=everything)], self.contents)

    def parts(self) -> list[RenderableType]:
        return [summary_table(self.contents), *(f"notice: {notice}" for notice in self.notices)]

    def __repr__(self) -> str:
        graph = self.program.leading
        return f"Pef({str(self.path)!r}: {len(graph.sections)} sections, {len(graph.nodes)} operators)"


@speaks_python(compiles=True)
def compile(
    model: nn.Module,
    example: object,
    *,
    loss: str | Callable[..., Any] | None = None,
    optimizer: str | Optimizer | Sequence[Optimizer] | Callable[..., object] = "adamw",
    arguments: Mapping[str, Any] | None = None,
    collate_fn: Collate | str | None = None,
    name: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> Pef:
    """Capture the training step of a live model, and write it as `out/NAME/NAME.pef`, with the model's weights.

    - `example`: one batch of a replica, batch first: `(x, target)` by position, or `{"x": x, "target": y}` by name
    - `loss`: a name (`"cross_entropy"`) or a loss of torch, which take the model's first output, or a function of what
      the model returns and the target; the last value of the example is the target. None for a model that returns its
      loss first, or in a dictionary as "loss"
    - `optimizer`: a name, whose options are flags (`lr=3e-4`), or an optimizer of torch, or a list of them, or a
      function of your own, which updates a parameter
    - `arguments`: what a run gives parameters of these names: numbers, or schedules such as
      `{"schedule": "linear", "to": 1.0, "steps": 1000}`
    - `collate_fn`: makes the example of a list of samples; its name, `"net.py:collate"`, is kept for runs
    - `name`: of the PEF; by default that of the model's class, in lower case
    - `quiet`: print no progress and no notices
    - `options`: flags of `sambasim compile` by keyword, such as `data_parallel=True, world_size=2`, and
      `set={"data.shuffle": False}`

    The work is done in a copy of the process, so the model and the process stay as they are. In another copy the PEF is
    compared with the model, bit for bit, in `check=N` steps: see `checked` of the result. Under mpirun rank 0 compiles,
    and every rank returns the PEF. Raises OptionError, ModelError, CaptureError and DataError.
    """
    if not isinstance(model, nn.Module):
        remedy = f"give an instance: {model.__name__}(…)" if isinstance(model, type) else "give the model itself"
        raise ModelError(f"the model is of type {type(model).__name__}, not a torch.nn.Module", remedy=remedy)
    model = unwrapped(model)
    refuse_torchscript(model)

    own = {f"{optimizer.__module__}:{optimizer.__name__}": optimizer} if isfunction(optimizer) else {}
    optimizer = next(iter(own), cast(Any, optimizer))

    def compiled() -> Pef:
        batch, size = batch_of(example if collate_fn is None else collated(example, collate_fn))
        table, function = loss_of(loss)
        training: dict[str, object] = {"batch_size": size}
        tables, taken = dict[str, object](training=training, arguments=dict(arguments or {})), None
        if not options.get("inference"):
            tables["optimizer"], taken = optimizer_of(optimizer, model)
        if taken is not None:
            training["schedule"] = taken.schedule.model_dump(exclude_unset=True)
        if table is not None:
            tables["loss"] = table
        if isinstance(collate_fn, str):
            tables["data"] = {"collate": collate_fn}
        chosen = options_in_python(tables, {"pef_name": name or type(model).__name__.lower(), **options})
        named = None if loss is None else chosen.loss.name if chosen.loss else getattr(loss, "__name__", "given")
        if chosen.training.batch_size != size:
            what = f"batch_size is {chosen.training.batch_size}, and the example has {size} samples"
            raise OptionError(what, remedy="leave it out: the example is one batch of a replica")
        notices = [_EVALUATING] if not (model.training or chosen.inference) else []
        bound = partial(inputs_of, model=model, loss=named, options=chosen, function=function)
        micro = each_value(batch, lambda tensor, _: tensor[: chosen.micro_batch_size])
        of_pass = bound(micro, notice=notices.append)
        whole = bound(batch).inputs if chosen.micro_batch_size < size else None
        users = () if isinstance(optimizer, str) or chosen.inference else optimizers_in(optimizer)
        # Some optimizers make their states before their first step.
        states = [state for one in users for state in one.state.values()]
        if any(state and ("step" not in state or float(state["step"]) > 0) for state in states):
            notices.append(_STATE)
        if taken and chosen.optimizer and chosen.training.schedule == taken.schedule:
            notices.append((taken_over(users, chosen.training.steps or 0) or taken).notice(chosen.optimizer))
        with phases(quiet=quiet) as on_phase:
            theirs = () if taken else users  # whose rates of now are those of the first step
            users_loss = None if chosen.inference else function
            live = LiveModel(model, of_pass, users_loss, optimizers=theirs, whole=whole, own=own)
            done = compile_lengths(live, chosen, on_phase)
        said = tuple(in_python(notice, compiles=True) for notice in (*notices, *chosen.notes, *done.notices))
        if said and not quiet:
            say("\n".join(f"notice: {notice}" for notice in said), sys.stderr)
        return Pef(done.path, said)

    world = connected()
    same_call(world, "called sambasim.compile")
    return world.from_first(compiled)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within `torch.compile` or `nn.DataParallel`, whose weights have other names."""
    model = getattr(model, "_orig_mod", model)
    return unwrapped(model.module) if isinstance(model, nn.DataParallel) else model


@speaks_python()
def load(pef: str | Path, *, output_folder: str | Path = "out") -> Pef:
    """The PEF at a path, or NAME for `out/NAME/NAME.pef`. Raises OptionError if there is none, PefError if it is not
    valid."""
    loaded = Pef(locate(str(pef), Path(output_folder)))
    read(loaded.path)  # raises for a PEF that is not valid
    return loaded


def opened(pef: Pef | str | Path) -> Pef:
    """Raises OptionError for a Pef that was compiled again."""
    loaded = pef if isinstance(pef, Pef) else load(pef)
    loaded.check()
    return loaded
