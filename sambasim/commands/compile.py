"""The use case of compiling: the work is done in a child of this process, and the PEF is compared with its model in a
second one. The caller's model, generators, caches and process stay as they were."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from sambasim.commands.child import OnPhase, can_fork, in_child
from sambasim.commands.outputs import check_output_file
from sambasim.commands.proof.eager import LiveModel, check_modes
from sambasim.commands.proof.prove import own_memory, prove, too_large
from sambasim.compiler.capture.state import NotSound, begin_again
from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import Compiled, Stopwatch, capture_model, compile_model, recorded
from sambasim.compiler.front import build_model, example_batch
from sambasim.compiler.passes import schedule_of
from sambasim.data.sources import Source, open_source
from sambasim.errors import MachineError, SambasimError
from sambasim.hardware.host import available_bytes
from sambasim.options.compile import CompileOptions
from sambasim.pef import Checked, peek, seal
from sambasim.units import format_bytes

_PROVE, _NOT_COMPARED = "compare with eager PyTorch", "not compared with eager PyTorch"

_children = 0
"""How many times this process has compiled in a child."""


@contextmanager
def weights_fit() -> Iterator[None]:
    """Raises MachineError as soon as the parameters that are made have more bytes than this machine has available, for
    which the system would end the process without a word."""
    available = available_bytes()
    bytes_of: dict[int, int] = {}  # by address: a tied parameter is registered several times
    made_bytes = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made_bytes
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return
        made_bytes += parameter.nbytes - bytes_of.get(parameter.data_ptr(), 0)
        bytes_of[parameter.data_ptr()] = parameter.nbytes
        if available is not None and made_bytes > available:
            raise MachineError(
                f"the weights of this model need more than the {format_bytes(available)} of memory that are available",
                remedy="a machine with more memory; `sambasim simulate` and `plan` take a model of any size",
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True, slots=True)
class Proved:
    """What was compiled, and how it was compared with its model; None if it was not."""

    compiled: Compiled
    checked: Checked | None


class Named(NamedTuple):
    """What options name: the model, a batch of its training data, that data, and notices about the batch."""

    model: nn.Module
    example: Example
    source: Source
    notices: tuple[str, ...]


def named_in(options: CompileOptions, on_phase: OnPhase = lambda phase: None) -> Named:
    """What `options` name. Raises OptionError, before anything else, if the PEF could not be written, or for a schedule
    that cannot be."""
    check_output_file(options.pef_path, "the PEF", "--output-folder FOLDER")
    schedule_of(options)
    on_phase("build the model")
    with weights_fit():
        model = build_model(options)
    on_phase("read an example batch")
    notices: list[str] = []
    source = open_source(options.data, None)
    return Named(model, example_batch(model, options, notices.append, source), source, tuple(notices))


def compile_named(options: CompileOptions, on_phase: OnPhase = lambda phase: None) -> Proved:
    """Compile what `options` name, and compare it with its model. Raises as `named_in` and `compile_proved`."""
    model, (inputs, by_keyword, arguments), source, notices = named_in(options, on_phase)
    live = LiveModel(model, inputs, by_keyword, arguments=arguments)
    done = compile_proved(live, options, on_phase, source)
    compiled = replace(done.compiled, notices=(*notices, *done.compiled.notices))
    return replace(done, compiled=compiled)


def compile_live(live: LiveModel, options: CompileOptions, on_phase: OnPhase, path: Path | None) -> Compiled:
    example = Example(live.inputs, live.by_keyword, live.arguments)
    return compile_model(live.model, example, options, loss=live.loss, on_phase=on_phase, path=path)


def compile_proved(
    live: LiveModel,
    options: CompileOptions,
    on_phase: OnPhase = lambda phase: None,
    source: Source | None = None,
    work: Callable[[OnPhase, Path | None], Compiled] | None = None,
) -> Proved:
    """Compile `live` into the PEF that `options` name, and compare it with its model in so many steps as they say.
    `work` does so at a path, if not `compile_live`. Raises ModelError and CaptureError, also for a PEF that does not
    compute what the model does; then there is none."""

    def compiled(phase: OnPhase, path: Path | None) -> Compiled:
        if path is not None:
            own_memory(live.model)
            check_modes(live.model, training=not options.inference)
        return compile_live(live, options, phase, path) if work is None else work(phase, path)

    path, before = options.pef_path, _model_of(options.pef_path)
    why = too_large(live) if can_fork() else "this system cannot fork"
    if why is not None:
        done = compiled(on_phase, None)
        told = (f"{_NOT_COMPARED}: {why}", *_replaced(before, path))
        return Proved(replace(done, notices=(*done.notices, *told)), None)
    _before_a_child()
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        done = _in_children(lambda phase: compiled(phase, hidden), on_phase)
        notices, phases_s = list(done.notices), dict(done.phases_s)
        checked = None
        if options.check != 0:
            on_phase(_PROVE)
            began_s = time.perf_counter()
            try:
                checked, told = in_child(lambda phase: prove(hidden, live, options, source, options.check), on_phase)
                notices += told
                if checked is None:
                    notices.append(f"{_NOT_COMPARED}: PyTorch takes no batch of this kind")
            except MachineError as error:
                notices.append(f"{_NOT_COMPARED}: {error.what}")
            phases_s[_PROVE] = time.perf_counter() - began_s
        digest = seal(hidden, path, checked)
    except MachineError as error:
        error.what = error.what.replace(str(hidden), str(path))
        raise
    finally:
        hidden.unlink(missing_ok=True)
    notices += [*(_notices(checked) if checked is not None else ()), *recorded(digest), *_replaced(before, path)]
    return Proved(replace(done, path=path, digest=digest, notices=tuple(notices), phases_s=phases_s), checked)


def _model_of(path: Path) -> tuple[str, str] | None:
    """What the PEF at `path` was compiled from, which may be empty, and the class of the model; None if there is no
    PEF."""
    try:
        header = peek(path)
    except (SambasimError, OSError):
        return None
    model = header.compile_options.get("model")
    target = model.get("target") if isinstance(model, dict) else None
    return str(target or ""), str(header.metadata.get("model", "")).partition("(")[0]


def _replaced(before: tuple[str, str] | None, path: Path) -> Iterator[str]:
    """A notice if the PEF at `path`, which was that of `before`, is now of another model."""
    now = _model_of(path)
    if before is None or now is None:
        return
    which = 0 if before[0] and now[0] else 1
    if before[which] != now[which]:
        yield f"{path} was the PEF of another model, {before[which]}, and is replaced: --pef-name NAME keeps both"


def _in_children(compiled: Callable[[OnPhase], Compiled], on_phase: OnPhase) -> Compiled:
    """A large model is captured at once, and in another child only if it has to be observed first."""

    def at_once(phase: OnPhase) -> Compiled:
        begin_again()
        return compiled(phase)

    try:
        return in_child(at_once, on_phase)
    except NotSound:
        return in_child(compiled, on_phase)


def _notices(checked: Checked) -> list[str]:
    """One for each line of the model."""
    by_line: dict[str, list[str]] = {}
    for one in checked.exceptions:
        by_line.setdefault(one.source, []).append(str(one))
    return [
        f"differs from eager PyTorch by rounding: {', '.join(names)}{f', at {line}' * bool(line)}"
        for line, names in by_line.items()
    ]


def _before_a_child() -> None:
    global _children
    _children += 1
    if _children == 2:  # one alone would take as long
        warm_up()


def warm_up() -> None:
    """Capture something small here, so that each child does not do again what torch does at its first trace."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(1, 1)
    options = CompileOptions.model_validate({"loss": {"name": "mse"}, "optimizer": {"name": "sgd"}, "pef_name": "warm"})
    one = torch.zeros(1, 1)
    capture_model(model, Example({"x": one, "target": one}), options, Stopwatch(lambda phase: None))
