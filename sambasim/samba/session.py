"""The session: compile a model, load its PEF, run its sections, and move weights between host and device.

There is one for each process, `samba.session`. Host and device have weights of their own: those of the host are the
model's, and change only by `to_cpu`; those of the device change by `run`, and by `to_device`.
"""

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.errors import DataError, OptionError
from sambasim.ir.graph import SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.pef import PefDocument
from sambasim.runtime.section_clock import SectionClock
from sambasim.samba import context
from sambasim.samba.absent import no_such_name
from sambasim.samba.binding import bind, inputs_of
from sambasim.samba.checks import arguments
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.replicas import Checks
from sambasim.samba.hyperparameters import change, numbers_of
from sambasim.samba.machine import Machine
from sambasim.samba.notices import say_once
from sambasim.samba.profiler import Profiler
from sambasim.samba.request import (
    Inputs,
    Optimizer,
    as_sequence,
    build_fields,
    fingerprint_of,
    flat,
    name_of,
    request,
)
from sambasim.samba.section_types import kinds_of
from sambasim.samba.tensor import SambaTensor

_PROFILE = "samba_profile"


class Session:
    """What apps call `samba.session`."""

    def __init__(self) -> None:
        self.profiler = Profiler()
        self._config: Mapping[str, object] = {}
        self._machine: Machine | None = None
        self._checks: Checks | None = None
        self._traced: Sequence[SambaTensor] = ()
        self._of_other_models = WeakIdKeyDictionary()
        self._accepted: object = None
        self._wanted: Mapping[str, Symbol] = {}
        self._of_the_mean: Tensor | None = None
        self._differs_in_evaluation = False
        self._inputs: Mapping[str, Tensor] = {}
        self._given: Mapping[str, float] = {}
        self._outputs: dict[str, SambaTensor] = {}

    @checks_keywords
    def compile(
        self,
        model: nn.Module,
        inputs: Inputs,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        name: str | None = None,
        app_dir: str | Path | None = None,
        config_dict: Mapping[str, object] | None = None,
        pef_metadata: Mapping[str, object] | None = None,
        squeeze_bs_dim: bool = False,
        init_output_grads: bool = True,
        inference: bool | None = None,
        io_host_memory: bool = False,
        metadata: Mapping[str, object] | None = None,
    ) -> str:
        """Compile `model` for the batch `inputs`, and write the PEF. Returns its absolute path.

        config_dict: what the command line said, `vars(args)`: --pef-name, --output-folder, --data-parallel and the
            rest; None for what `setup` was given
        pef_metadata, metadata: kept in the PEF as text

        `app_dir` is where the app lies; a PEF goes into the working directory's `out` unless --output-folder says
        otherwise. What has no meaning here is taken and changes nothing: squeeze_bs_dim, io_host_memory.
        Raises ModelError and CaptureError for what the model does wrong, OptionError for options that do not fit.
        """
        # They take seconds to import, and a run does without.
        from sambasim.compiler.compile import Stopwatch, assemble, capture_model
        from sambasim.samba.compile_report import print_compiled, tell_phase

        config = dict(self._config if config_dict is None else config_dict)
        forward_only = bool(config.get("inference")) if inference is None else inference
        arguments.note_not_passed_on(context.current().arguments, config, inference=forward_only)
        fields = build_fields(config, name or type(model).__name__.lower())
        asked = request(model, inputs, as_sequence(optimizers), fields, inference=forward_only)
        kept = {str(key): str(value) for key, value in {**(pef_metadata or {}), **(metadata or {})}.items()}
        watch = Stopwatch(tell_phase)
        built = capture_model(
            model, asked.inputs, asked.options, by_keyword=asked.by_keyword, any_loss=True, watch=watch
        )
        # A capture must not meet what a call has left behind, in a cache, say; so the fingerprint is taken after it.
        kept |= fingerprint_of(asked)
        compiled = assemble(built, model, asked.options, watch, asked.updates or None, kept)
        print_compiled(compiled)
        return str(compiled.path.absolute())

    def load(self, machine: Machine, traced: Sequence[SambaTensor]) -> None:
        """`machine` is run from now on; `traced` are its outputs, which stand for those of every run: an `sn_grad` that
        is set on one of them holds for all. For `utils.trace_graph`."""
        if self._machine is not None and self._machine.model is not machine.model:
            for tensor in self._traced:
                self._of_other_models[tensor] = True
        self._machine, self._traced = machine, tuple(traced)
        self._checks = Checks(machine, context.communicator())
        self._wanted, self._of_the_mean = inputs_of(machine.program), tangent_of_mean(machine.program)
        self._inputs, self._given = {}, {}
        self._differs_in_evaluation = _trains_otherwise(machine.program)
        self._outputs = {str(t.sn_name): SambaTensor(t, name=t.sn_name) for t in traced}

    @checks_keywords
    def run(
        self,
        input_tensors: Inputs | None = None,
        output_tensors: Tensor | Sequence[Tensor] | None = None,
        hyperparam_dict: Mapping[str, float] | None = None,
        data_parallel: bool = False,
        reduce_on_rdu: bool = False,
        section_types: Sequence[str] | None = None,
        graph_name: str | None = None,
    ) -> SambaTensor | tuple[SambaTensor, ...]:
        """Run sections on a batch: by default all, which is a whole training step, or the forward of an inference PEF.

        input_tensors: the batch, bound by name, and by position where tensors have none; not needed without FWD
        output_tensors: which outputs are wanted: one tensor, or several; None for all
        hyperparam_dict: lr, momentum, weight_decay … of all optimizers, from this step on
        data_parallel, reduce_on_rdu: whether gradients are synced with the other replicas, and where
        section_types: FWD, BCKWD, GRADNORM, REDUCE, OPT, GATHER in any case of letters
        graph_name: of the one graph that a PEF holds

        Returns the outputs that were asked for: one tensor for one, else a tuple.
        Raises OptionError and DataError for what does not fit the PEF, and what the checks of data parallelism find.
        """
        machine, checks = self._loaded()
        kinds = kinds_of(machine.program, section_types)
        batch: Mapping[str, Tensor] = {}
        if input_tensors is not None:
            batch = bind(self._wanted, machine.program.batch_size, machine.model, input_tensors)
        if SectionKind.FWD in kinds and not batch:
            raise OptionError("section FWD needs a batch", remedy="session.run(input_tensors=[…], …)")
        if isinstance(output_tensors, Iterator):
            output_tensors = [*output_tensors]
        if output_tensors is not None and output_tensors is not self._accepted:
            self._check_outputs(machine, output_tensors)
            self._accepted = output_tensors
        if self._differs_in_evaluation and not machine.model.training:
            why = "a training PEF runs in training mode; compile with --inference to predict"
            say_once("model.eval()", why, app_line())
        self._inputs = batch or self._inputs
        if hyperparam_dict:
            numbers = numbers_of(hyperparam_dict)
            given = {**self._given, **numbers}
            if given != self._given:
                change(machine, numbers)
                self._given = given
        mode = checks.mode(kinds, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
        checks.before(kinds, batch, mode, self._given)
        if torch.is_autocast_enabled("cpu"):
            say_once(
                "torch.autocast", "the PEF says in which type it computes: --dtype bf16 at the compile", app_line()
            )
            with torch.autocast("cpu", enabled=False):
                found = machine.replica.run(kinds, batch, self._tangent(machine, kinds), mode)
        else:
            found = machine.replica.run(kinds, batch, self._tangent(machine, kinds), mode)
        if SectionKind.OPT in kinds:
            machine.note_step()
        return self._answer(found, output_tensors)

    def setup(self, cfg: Namespace | Mapping[str, object]) -> None:
        """What `compile` takes where it is given no config_dict: what `parse_app_args` returned, a SambaConfig, an
        SNConfig, or names with values. Raises OptionError for anything else."""
        if not isinstance(cfg, Namespace | Mapping):
            raise OptionError(
                f"a session is set up from names with values, and this is of type {type(cfg).__name__}",
                remedy="session.setup(args), with what parse_app_args returned",
            )
        self._config = dict(cfg if isinstance(cfg, Mapping) else vars(cfg))

    @property
    def tracing(self) -> bool:
        """Whether a model's forward is being traced now, by `compile` or `trace_graph`, and is not computed."""
        return torch.compiler.is_compiling()

    def start_samba_profile(self) -> None:
        """The event `samba_profile` of `profiler` begins."""
        self.profiler.start_event(_PROFILE)

    def end_samba_profile(self) -> None:
        """The event `samba_profile` of `profiler` ends. Raises OptionError if it has not begun."""
        self.profiler.end_event(_PROFILE)

    @contextmanager
    def timed(self, model: nn.Module) -> Iterator[SectionClock]:
        """Within it, whole steps and forwards are timed section by section, and sections run one after another: sync
        does not go on beside the backward. Raises OptionError if no PEF is loaded for `model`."""
        replica = self._loaded(model)[0].replica
        replica.clock = clock = SectionClock()
        try:
            yield clock
        finally:
            replica.clock = None

    def program(self, model: nn.Module) -> Program:
        """What the loaded PEF holds. Raises OptionError if none is loaded for `model`."""
        return self._loaded(model)[0].program

    def document(self, model: nn.Module) -> PefDocument:
        """All that the loaded PEF says. Raises OptionError if none is loaded for `model`."""
        return self._loaded(model)[0].document

    def to_cpu(self, model: nn.Module | None = None) -> None:
        """The weights, buffers and optimizer state of the device to the host."""
        machine, checks = self._loaded(model)
        checks.before_fetch()
        machine.to_host()
        checks.after_exchange()

    def to_device(self, model: nn.Module | None = None) -> None:
        """The weights and buffers of the host, and the state of its optimizers, to the device."""
        machine, checks = self._loaded(model)
        checks.before_new_weights()
        machine.to_device()
        checks.after_exchange()

    to_rdu = to_device

    def get_tensors_by_name(self, names: Sequence[str]) -> list[SambaTensor]:
        """Tensors by the names of their symbols: copies of what is on the device, or the last inputs and outputs.

        Raises OptionError for a name that the PEF does not have.
        """
        machine, _ = self._loaded()
        if isinstance(names, str):
            raise OptionError(
                f"names is the word {names!r}, and must be a list of such words",
                where=app_line(),
                remedy=f'samba.session.get_tensors_by_name(["{names}"])',
            )
        return [self._tensor(machine, name) for name in names]

    @property
    def tensor_dict(self) -> Mapping[str, SambaTensor]:
        """The inputs and outputs of the last run, by name."""
        inputs = {name: SambaTensor(tensor, name=name) for name, tensor in self._inputs.items()}
        return {**inputs, **self._outputs}

    @property
    def buffer_dict(self) -> Mapping[str, SambaTensor]:
        """Copies of the buffers on the device, by the names of their symbols."""
        machine, _ = self._loaded()
        symbols = machine.program.symbols.values()
        names = [symbol.name for symbol in symbols if symbol.kind is SymbolKind.BUFFER]
        return dict(zip(names, self.get_tensors_by_name(names), strict=True))

    @property
    def optim_dict(self) -> Mapping[str, Optimizer]:
        """The app's optimizers, by the names that the PEF has for them."""
        machine, _ = self._loaded()
        # The PEF has one for each group of parameters that has any to train.
        owners = [
            optimizer
            for optimizer in machine.optimizers
            for group in optimizer.param_groups
            if any(parameter.requires_grad for parameter in group["params"])
        ]
        return dict(zip((one.name for one in machine.program.optimizers), owners, strict=True))

    def __getattr__(self, name: str) -> object:
        raise no_such_name("samba.session", name, [known for known in dir(type(self)) if not known.startswith("_")])

    def _loaded(self, model: nn.Module | None = None) -> tuple[Machine, Checks]:
        if self._machine is None or self._checks is None:
            raise OptionError(
                "no PEF is loaded", remedy="call samba.utils.trace_graph(model, inputs, optim, pef=args.pef)"
            )
        if model is not None and model is not self._machine.model:
            raise OptionError(
                f"this {type(model).__name__} is not the model that was traced",
                remedy="give the model that trace_graph was called with",
            )
        return self._machine, self._checks

    def _tangent(self, machine: Machine, kinds: Collection[SectionKind]) -> Tensor | None:
        """What the backward starts from: `sn_grad` of the loss, or the gradient of its mean."""
        program = machine.program
        if SectionKind.BCKWD not in kinds or program.loss is None:
            return None
        # What is set on an output of `trace_graph` holds for every run, and before what is set on one of the last run.
        outputs = (*self._traced, *self._outputs.values())
        started = [(tensor.sn_name, tensor.sn_grad) for tensor in outputs if tensor.sn_grad is not None]
        if not started:
            return self._of_the_mean
        others = [name for name, _ in started if name != program.loss]
        if others:
            raise OptionError(
                f"sn_grad is set on {others[0]}, and the backward starts from {program.loss} alone",
                remedy="set sn_grad on the first output",
            )
        (_, given), type_ = started[0], program.symbols[program.loss].type
        if given.ndim and tuple(given.shape) != type_.shape:
            raise DataError(
                f"sn_grad of {program.loss} has the shape {tuple(given.shape)}, and the output {type_.shape}",
                remedy="set one number, or one for each element of the output",
            )
        return given.to(getattr(torch, type_.dtype)).expand(type_.shape).contiguous()

    def _check_outputs(self, machine: Machine, wanted: Tensor | Sequence[Tensor]) -> None:
        """Raises OptionError for outputs of a model that was traced before the one that is loaded."""
        if any(tensor in self._of_other_models for tensor in flat(wanted)):
            raise OptionError(
                f"output_tensors are of another model than the {type(machine.model).__name__} that was traced last",
                where=app_line(),
                remedy="call trace_graph for a model before its run: a session holds one PEF at a time",
            )

    def _answer(
        self, found: Mapping[str, Tensor], wanted: Tensor | Sequence[Tensor] | None
    ) -> SambaTensor | tuple[SambaTensor, ...]:
        """What was `found` takes the place of what the last run gave; returns what is `wanted` of it."""
        outputs = self._outputs
        for name, value in found.items():
            outputs[name] = outputs[name].with_data(value, name)
        if wanted is None:
            return tuple(outputs.values())
        tensors = flat(wanted)
        answers = [outputs.get(name_of(tensor) or "") for tensor in tensors]
        known = tuple(answer for answer in answers if answer is not None)
        if len(known) < len(answers):
            unknown = name_of(tensors[answers.index(None)])
            raise OptionError(
                f"output_tensors has {unknown or 'a tensor without a name'}, which is no output of the PEF",
                remedy=f"give model.output_tensors, or some of them: {', '.join(outputs)}",
            )
        return known[0] if isinstance(wanted, Tensor) else known

    def _tensor(self, machine: Machine, name: str) -> SambaTensor:
        if name in self._outputs:
            return self._outputs[name]
        if name in self._inputs:
            return SambaTensor(self._inputs[name], name=name)
        symbol = machine.program.symbols.get(name)
        if symbol is None or symbol.offset is None:
            raise OptionError(
                f"the PEF has no tensor {name}", remedy=f"sambasim inspect {machine.program.name} lists them"
            )
        return SambaTensor(machine.replica.read(name), name=name)


def _trains_otherwise(program: Program) -> bool:
    """Whether a training step draws what evaluation does not, or normalizes by its batch."""
    nodes = program.training.nodes if program.training is not None else ()
    return any(OPERATORS[node.operator].draws_random_numbers or "batch_norm" in node.operator for node in nodes)


def tangent_of_mean(program: Program) -> Tensor | None:
    """The gradient of the mean of the loss, of the type of the loss; None for an inference PEF."""
    if program.loss is None:
        return None
    type_ = program.symbols[program.loss].type
    return torch.full(type_.shape, 1 / type_.numel, dtype=getattr(torch, type_.dtype))


def outputs_of(program: Program) -> Iterator[SambaTensor]:
    """A tensor without data for each output of what a session runs."""
    graph = program.training or program.evaluation
    for output in graph.outputs:
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.OUTPUT:
            batched = bool(symbol.type.shape) and symbol.type.shape[0] == program.batch_size
            yield SambaTensor(
                shape=symbol.type.shape,
                dtype=getattr(torch, symbol.type.dtype),
                name=symbol.name,
                batch_dim=0 if batched else None,
            )


session = Session()
"""The session of this process."""
