"""Compiles in a child of this process, and compares the PEF with its model in a second one, as `verify --against` also
does. The caller's model, generators, caches and process stay as they were."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from sambasim.commands.child import OnPhase, in_child
from sambasim.commands.proof.eager import COMPUTES, PLAYS, LiveModel, check_modes
from sambasim.commands.proof.prove import Proof, own_memory, prove, too_large
from sambasim.compiler.capture.state import NotSound, Observer
from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import assemble, capture_model
from sambasim.compiler.front import build_model, example_batch, inferred_options
from sambasim.compiler.own_optimizer import updates_of
from sambasim.compiler.passes import schedule_of
from sambasim.data.buckets import Fitted, check_padding, of_length
from sambasim.data.datasets import Source, open_source
from sambasim.errors import CaptureError, DataError, MachineError, ModelError, OptionError, SambasimError
from sambasim.files import check_output_file, replacing
from sambasim.hardware.budget import available_bytes
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.ranks import without_loss
from sambasim.ir.types import SymbolKind
from sambasim.options.base import build
from sambasim.options.compile import CompileOptions
from sambasim.options.given import as_table
from sambasim.options.grammar import FLOAT_DTYPES, SYNTHETIC, TARGET, synthetic_data
from sambasim.options.training import ModelOptions
from sambasim.pef import PefDocument, read, seal
from sambasim.pef.document import Compiled
from sambasim.pef.files import compile_several, record_compiled, writing
from sambasim.runtime.run.replica import input_specs
from sambasim.units import format_bytes

_PROVE, _NOT_COMPARED = "compare with eager PyTorch", "not compared with eager PyTorch"

_children = 0  # how many times this process has compiled in a child


@contextmanager
def weights_fit() -> Iterator[None]:
    """Raises MachineError for parameters larger than the memory; the system would end the process without a word."""
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
            room = f"the {format_bytes(available)} of memory that are available"
            remedy = "a machine with more memory; `sambasim simulate` and `plan` take a model of any size"
            raise MachineError(f"the weights of this model need more than {room}", remedy=remedy)

    with register_module_parameter_registration_hook(count):
        yield


def named_in(
    options: CompileOptions, on_phase: OnPhase = lambda phase: None
) -> tuple[nn.Module, Example, Source, tuple[str, ...]]:
    """What options name: the model, a batch of its training data, that data, and notices about the batch."""
    check_output_file(options.pef_path, "the PEF", "--output-folder FOLDER")
    schedule_of(options)
    _check_data(options)
    on_phase("build the model")
    with weights_fit():
        model = build_model(options)
    on_phase("read an example batch")
    notices: list[str] = []
    source = open_source(options.padded_data, None)
    return model, example_batch(model, options, notices.append, source), source, tuple(notices)


def _check_data(options: CompileOptions) -> None:
    """Raises DataError if data, or the inputs of synthetic ones, are not named, with those that follow from the config
    of the model."""
    data = options.data
    if data.inputs or data.source not in (None, SYNTHETIC) or options.loss is not None or options.inference:
        return
    unnamed = options.model_copy(update={"data": data.model_copy(update={"source": None})})
    if inferred := cast("dict[str, Any]", inferred_options(unnamed)):
        tokens = [(name, token) for name, token in inferred["model"].args.items() if name not in options.model.args]
        typed = [
            synthetic_data(inferred["data"].inputs),
            *(f"--set model.args.{name}={token}" for name, token in tokens),
        ]
        remedy = f"--set data.source=module:function, or synthetic samples, of any length: {' '.join(typed)}"
        raise DataError("no data source with inputs is named", remedy=remedy)


def compile_named(options: CompileOptions, on_phase: OnPhase = lambda phase: None) -> Compiled:
    """Compile what `options` name, and compare it with its model. Raises as `compile_proved`."""
    model, example, source, notices = named_in(options, on_phase)
    compiled = compile_lengths(LiveModel(model, example), options, on_phase, source)
    return replace(compiled, notices=(*notices, *compiled.notices, *options.notes))


def compile_lengths(
    live: LiveModel, options: CompileOptions, on_phase: OnPhase = lambda phase: None, source: Source | None = None
) -> Compiled:
    """As `compile_proved`; with `data.buckets` a graph for each length, the longest first, in one PEF."""
    data = options.padded_data
    if not data.buckets:
        return compile_proved(live, options, on_phase, source)

    done: list[Compiled] = []

    def of_one(length: int, folder: Path) -> Compiled:
        change, fitted = partial(of_length, length=length, padding=data.padding, lengths=lengths), source
        if source is not None:
            fitted = replace(source, train=source.train.with_collate(Fitted(source.train.collate, change)))
        whole = None if live.whole is None else change(live.whole)
        one = replace(live, example=live.example._replace(inputs=change(live.example.inputs)), whole=whole)
        chosen, samples = options.model_copy(update={"output_folder": folder}), f"samples of length {length}"
        groups = done[0].program.groups if done else ()
        work = partial(compile_live, one, chosen, groups=groups)
        done.append(compile_proved(one, chosen, lambda phase: on_phase(f"{phase}, {samples}"), fitted, work))
        check_padding(data.padding, input_specs(done[0].program))
        _check_alike(done[0].program, done[-1].program, length)
        return done[-1]

    lengths = sorted(data.buckets, reverse=True)
    first, *_ = compile_several(options.pef_path, {str(length): partial(of_one, length) for length in lengths}).values()
    phases_s = {name: sum(one.phases_s.get(name, 0.0) for one in done) for name in first.phases_s}
    told = [f"a graph for each length of samples, {', '.join(map(str, lengths[::-1]))}, captured one after another"]
    known = (*without_loss(first.program).names_of(SymbolKind.INPUT), *data.padding)
    integers = [one.name for one in input_specs(first.program) if one.shape and one.dtype not in FLOAT_DTYPES]
    if filled := [name for name in integers if name not in known]:
        how = f"--set data.padding.{filled[0]}=-100, if the loss leaves it out"
        told.append(f"{', '.join(filled)} of shorter samples is filled up with 0, which is a class as any other: {how}")
    each = dict.fromkeys(notice for one in (*done, first) for notice in one.notices)
    return replace(first, notices=(*told, *each), phases_s=phases_s)


def _check_alike(longest: Program, program: Program, length: int) -> None:
    """Raises CaptureError if two graphs of a model have other parameters, buffers or inputs."""
    own = (SymbolKind.INPUT, SymbolKind.CONSTANT, SymbolKind.OUTPUT)

    def shared(program: Program) -> list[object]:
        types = {name: symbol.type for name, symbol in program.symbols.items() if symbol.kind not in own}
        members = [(group.optimizer, group.members) for group in program.groups]
        told = program.loss, program.count, program.logged, program.evaluated, program.single is None
        return [types, members, program.names_of(SymbolKind.INPUT), *told]

    if shared(longest) != shared(program):
        what = f"for samples of length {length} the model uses other parameters, buffers or inputs than for longer ones"
        raise CaptureError(what, remedy="use the same for each length, or leave out data.buckets")


def compile_live(
    live: LiveModel,
    options: CompileOptions,
    on_phase: OnPhase,
    path: Path | None,
    groups: Sequence[ParameterGroup] = (),
) -> Compiled:
    built = capture_model(live.model, live.example, options, on_phase, loss=live.loss)
    updates = updates_of(options.optimizer, live.own) if options.optimizer and live.own else None
    gradients = built.program.names_of(SymbolKind.GRADIENT)
    if {member.gradient for group in groups for member in group.members} != {*gradients}:
        groups = ()
    return assemble(built, live.model, options, on_phase, updates, path=path, groups=groups)


class Stopwatch:
    """Seconds by phase. `on_phase` gets each that begins."""

    def __init__(self, on_phase: OnPhase) -> None:
        self._on_phase, self._phase, self._began_s = on_phase, "", 0.0
        self.phases_s: defaultdict[str, float] = defaultdict(float)

    def begin(self, phase: str) -> None:
        self.end()
        self._phase, self._began_s = phase, time.perf_counter()
        self._on_phase(phase)

    def end(self) -> None:
        if self._phase:
            self.phases_s[self._phase] += time.perf_counter() - self._began_s
        self._phase = ""


def compile_proved(
    live: LiveModel,
    options: CompileOptions,
    on_phase: OnPhase = lambda phase: None,
    source: Source | None = None,
    work: Callable[[OnPhase, Path | None], Compiled] | None = None,
) -> Compiled:
    """Compile `live` into the PEF that `options` name, and compare it with its model. `work` compiles at a path in
    place of `compile_live`. Raises ModelError and CaptureError, also for a PEF that does not compute what the model
    does; then there is none."""
    global _children

    def compiled(phase: OnPhase, path: Path | None) -> Compiled:
        if path is not None:
            own_memory(live.model)
            check_modes(live.model, training=not options.inference)
        return compile_live(live, options, phase, path) if work is None else work(phase, path)

    path, before, watch = options.pef_path, _model_of(options.pef_path), Stopwatch(on_phase)
    if (why := too_large(live)) is not None:
        done = compiled(watch.begin, None)
        watch.end()
        told = (f"{_NOT_COMPARED}: {why}", *_replaced(before, path))
        return replace(done, notices=(*done.notices, *told), phases_s=watch.phases_s)
    _children += 1
    if _children == 2:  # one alone would take as long
        warm_up()
    with _hidden(path) as hidden:

        def at_once(phase: OnPhase) -> Compiled:
            Observer.may_begin_again = True
            return compiled(phase, hidden)

        try:  # a large model is captured at once, and in another child only if it has to be observed first
            done = in_child(at_once, watch.begin)
        except NotSound:
            done = in_child(lambda phase: compiled(phase, hidden), watch.begin)
        notices, checked = list(done.notices), None
        if options.check != 0:
            watch.begin(_PROVE)
            try:
                checked, told = in_child(
                    lambda phase: prove(hidden, live, options, source, options.check, phase), ends=_ends()
                )
                notices += told
                if checked is None:
                    notices.append(f"{_NOT_COMPARED}: PyTorch takes no batch of this kind")
            except MachineError as error:
                notices.append(f"{_NOT_COMPARED}: {error.what}")
        watch.end()
        digest = seal(hidden, checked)
    by_line: dict[str, list[str]] = {}
    for exception in checked.exceptions if checked is not None else ():
        by_line.setdefault(exception.source and f", at {exception.source}", []).append(str(exception))
    notices += [f"differs from eager PyTorch by rounding: {', '.join(names)}{at}" for at, names in by_line.items()]
    notices += [*record_compiled(digest), *_replaced(before, path)]
    return replace(done, path=path, digest=digest, notices=tuple(notices), phases_s=watch.phases_s, checked=checked)


def _ends() -> Mapping[str, MachineError]:
    """What is raised if a proof's process ends, by what it was doing."""
    what = "the process of eager PyTorch has ended, by a crash or for lack of memory"
    return {COMPUTES: MachineError(what, remedy="a smaller batch or model; or --check 0")}


@contextmanager
def _hidden(path: Path) -> Iterator[Path]:
    """Where to compile the PEF that is then to appear at `path`."""
    with writing(path, "free space there, or --output-folder FOLDER"), replacing(path) as hidden:
        try:
            yield hidden
        except MachineError as error:
            error.what = error.what.replace(str(hidden), str(path))
            error.where = error.where and error.where.replace(str(hidden.parent), str(path.parent))
            raise


def _model_of(path: Path) -> tuple[str, str] | None:
    """From what the PEF at `path` was compiled, if known, and the class of the model; None without a PEF."""
    try:
        document = read(path)
    except (SambasimError, OSError):
        return None
    model = document.compile_options.get("model")
    target = model.get("target") if isinstance(model, dict) else None
    return str(target or ""), document.metadata.get("model_repr", "").partition("(")[0]


def _replaced(before: tuple[str, str] | None, path: Path) -> Iterator[str]:
    """A notice if the PEF at `path`, which was that of `before`, is now of another model."""
    if before is None or (now := _model_of(path)) is None:
        return
    which = 0 if before[0] and now[0] else 1
    if before[which] != now[which]:
        yield f"{path} was the PEF of another model, {before[which]}, and is replaced: --pef-name NAME keeps both"


def warm_up() -> None:
    """Capture something small here, so that each child does not do again what torch does at its first trace."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(1, 1)
    options = CompileOptions.model_validate({"loss": {"name": "mse"}, "optimizer": {"name": "sgd"}, "pef_name": "warm"})
    number = torch.zeros(1, 1)
    capture_model(model, Example({"x": number, "target": number}), options)


def verify_against(path: Path, target: str, steps: int | None = None, on_phase: OnPhase = lambda phase: None) -> Proof:
    """Compare the PEF at `path` with the model that `target` names, with the PEF's weights, on batches of its data, or
    random ones without. Raises CaptureError for a difference, and OptionError for a PEF whose loss has no name."""
    document = read(path)
    options = _options_of(document, target)
    specs = tuple(input_specs(document.program))
    if document.has_several:
        remedy = "compile it again, which compares each"
        raise OptionError(f"{path.name} has several graphs: {', '.join(document.graphs)}", remedy=remedy)
    if "step_sha256" in document.metadata:  # which only apps write
        remedy = "compile it again by its app, which compares it: python APP.py compile"
        raise OptionError(f"{path.name} was compiled by an app, whose optimizers it does not name", remedy=remedy)
    if options.loss is None and any(spec.name == TARGET for spec in specs):
        what = f"{path.name} was compiled in Python with a function as its loss, which it does not name"
        remedy = "compile it again in Python, which compares it; or give the loss as module:function"
        raise OptionError(what, remedy=remedy)

    def proof(phase: OnPhase) -> Proof:
        phase("build the model")
        try:
            model = build_model(options)
        except ModelError as error:
            if "--set" in (error.remedy or ""):  # which `verify` has not
                error.remedy = "name the compiled model, or a function without arguments that returns one like it"
            raise
        phase("read the data")
        source = open_source(options.data, specs)
        live = LiveModel(model, example_batch(model, options, source=source))
        phase(_PROVE)
        return prove(path, live, options, source, steps, phase, with_own_weights=False)

    try:
        return in_child(proof, lambda phase: None if phase in (COMPUTES, PLAYS) else on_phase(phase), _ends())
    except CaptureError as error:
        error.remedy = "name the model that was compiled; if it has changed since, compile it again"
        raise


def _options_of(document: PefDocument, target: str) -> CompileOptions:
    """What the PEF was compiled with, for the model that `target` names."""

    def place(target: str) -> tuple[str, str]:
        """The module, or the file without its folder, which may be named from another one; and the name in it."""
        module, _, name = target.rpartition(":")
        return (Path(module).name if module.endswith(".py") else module), name

    given, data = document.compile_options, document.data_source
    model = as_table(given.get("model"))
    is_same = place(str(model.get("target") or target)) == place(target)
    args = model.get("args") if is_same else None
    named = build(ModelOptions, {"target": target, "args": args or {}}, where=f"--against {target}")
    data = {**data, "source": data.get("source") or SYNTHETIC}
    return build(CompileOptions, {**document.training_defaults, **given, "data": data, "model": named})
