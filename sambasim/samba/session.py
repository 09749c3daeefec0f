"""The session: compile a model, load its PEF, run its sections, and move weights between host and device.

There is one for each process, `samba.session`. Host and device have weights of their own: those of the host are the
model's, and change only by `to_cpu`; those of the device change by `run`, and by `to_device`.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.compiler.names import gradient_name
from sambasim.errors import DataError, OptionError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import PefDocument
from sambasim.runtime.section_clock import SectionClock
from sambasim.samba import context
from sambasim.samba.absent import AbsentNameError, no_such_name
from sambasim.samba.binding import bind
from sambasim.samba.checks import arguments
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.checks.place import app_line
from sambasim.samba.loaded import Loaded, named_tensor, samba_tensors
from sambasim.samba.machine import Machine
from sambasim.samba.notices import say_once
from sambasim.samba.profiler import Profiler
from sambasim.samba.request import (
    LOSS_INDICES,
    Inputs,
    Optimizer,
    as_mapping,
    as_sequence,
    build_fields,
    fingerprint_of,
    flat,
    name_of,
    repeatable,
    request,
    unwrapped,
)
from sambasim.samba.section_types import kinds_of
from sambasim.samba.start import as_gradient
from sambasim.samba.tensor import SambaTensor, to_torch

_PROFILE, _RUNTIME_PROFILE = "samba_profile", "runtime_profile"


class Session:
    """What apps call `samba.session`."""

    def __init__(self) -> None:
        self.profiler = Profiler()
        self.ctx = SimpleNamespace(set_tensors=self._set_tensors)
        self._config: Mapping[str, object] | None = None
        self._now: Loaded | None = None
        self._of_other_models = WeakIdKeyDictionary()

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
        io_host_memory: bool | None = None,
        metadata: Mapping[str, object] | None = None,
        is_split_batch: bool | None = None,
        graph_transform_hook: Callable[..., object] | None = None,
        loss_indices: Sequence[int] | int | None = None,
    ) -> str:
        """Compile `model` for the batch `inputs`, and write the PEF. Returns its absolute path.

        config_dict: what the command line said, `vars(args)`: --pef-name, --output-folder, --data-parallel and the
            rest; None for what `setup` was given, or else for what `parse_app_args` returned
        pef_metadata, metadata: kept in the PEF as text
        loss_indices: the outputs from which the backward starts; None where `compiler.step.losses_among` finds them

        `app_dir` is where the app lies; a PEF goes into the working directory's `out` unless --output-folder says
        otherwise. squeeze_bs_dim, init_output_grads, io_host_memory, is_split_batch and graph_transform_hook have no
        effect.
        Raises ModelError and CaptureError for what the model does wrong, OptionError for options that do not fit.
        """
        # They take seconds to import, and a run does without.
        from sambasim.compiler.compile import Stopwatch, assemble, capture_model
        from sambasim.samba.compile_report import print_compiled, tell_phase

        if graph_transform_hook is not None:
            say_once("graph_transform_hook", "the graph is compiled as it was captured", app_line())
        typed = context.current().arguments
        config = self._config if config_dict is None else as_mapping("config_dict", config_dict)
        if config is None:
            config = {} if typed is None else vars(typed)
        forward_only = bool(config.get("inference")) if inference is None else inference
        arguments.note_not_passed_on(typed, config, inference=forward_only)
        model = unwrapped(model)
        fields = build_fields(config, name or type(model).__name__.lower())
        asked = request(
            model,
            repeatable(inputs),
            as_sequence(optimizers),
            fields,
            inference=forward_only,
            loss_indices=loss_indices,
        )
        metadata = {**(pef_metadata or {}), **(metadata or {})}
        kept = {str(getattr(key, "key", key)): str(value) for key, value in metadata.items()}
        parsed = getattr(typed, "parsed_batch_size", None)
        if parsed is not None:  # a run without -b takes it
            kept.setdefault("parsed_batch_size", str(parsed))
        watch = Stopwatch(tell_phase)
        built = capture_model(
            model,
            asked.inputs,
            asked.options,
            by_keyword=asked.by_keyword,
            any_loss=True,
            loss_indices=asked.loss_indices,
            watch=watch,
        )
        # A capture must not meet what a call has left behind, in a cache, say; so the fingerprint is taken after it.
        kept |= fingerprint_of(asked) | fingerprint_of(replace(asked, updates=()))
        if asked.loss_indices:
            kept[LOSS_INDICES] = ",".join(map(str, asked.loss_indices))
        compiled = assemble(built, model, asked.options, watch, asked.updates or None, kept)
        print_compiled(compiled)
        return str(compiled.path.absolute())

    def load(
        self, machine: Machine, inputs: Inputs, traced: Sequence[SambaTensor], *, loss_is_chosen: bool = False
    ) -> None:
        """`machine` is run from now on. For `utils.trace_graph`.

        inputs: the batch that it was traced with
        traced: its outputs, which stand for those of every run: an `sn_grad` that is set on one of them holds for all
        loss_is_chosen: whether the app said which output is the loss
        """
        if self._now is not None:
            if self._now.machine.model is machine.model:
                self._now.checks.before_replacement()
            else:
                for tensor in self._now.traced:
                    self._of_other_models[tensor] = True
        self._now = Loaded(machine, inputs, traced, loss_is_chosen=loss_is_chosen)

    @checks_keywords
    def run(
        self,
        input_tensors: Inputs | None = None,
        output_tensors: Tensor | Sequence[Tensor] | None = None,
        hyperparam_dict: Mapping[str, object] | None = None,
        data_parallel: bool = False,
        reduce_on_rdu: bool = False,
        section_types: Sequence[str] | None = None,
        grad_of_outputs: Tensor | float | Sequence[Tensor | float | None] | None = None,
        data_parallel_mode: str = "normal",
        graph_name: str | None = None,
    ) -> tuple[SambaTensor, ...]:
        """Run sections on a batch: by default all, which is a whole training step, or the forward of an inference PEF.

        input_tensors: the batch, bound by name, and by position where tensors have none; not needed without FWD
        output_tensors: which outputs are wanted: one tensor, or several; None for all
        hyperparam_dict: lr, momentum, weight_decay … of all optimizers, and dropout rates, from this step on
        data_parallel, reduce_on_rdu: whether gradients are synced with the other replicas, and where
        section_types: FWD, BCKWD, OPT, in any case of letters; GRADNORM, REDUCE and GATHER run with OPT
        grad_of_outputs: the gradient of each output for this run, None where the backward does not start; without it
            the `sn_grad` of outputs counts

        Returns the outputs that were asked for. data_parallel_mode and graph_name have no effect: a PEF has one graph.
        Raises OptionError and DataError for what does not fit the PEF, and what the checks of data parallelism find.
        """
        now = self._loaded()
        machine = now.machine
        kinds = kinds_of(machine.program, section_types)
        batch: Mapping[str, Tensor] = {}
        if input_tensors is not None:
            input_tensors = repeatable(input_tensors)
            batch = bind(now.wanted, machine.program.batch_size, machine.model, input_tensors)
            if now.input_gradients:
                now.given = samba_tensors(batch, input_tensors)
        if SectionKind.FWD in kinds and not batch:
            raise OptionError("section FWD needs a batch", where=app_line(), remedy="session.run(input_tensors=[…], …)")
        if isinstance(output_tensors, Iterator):
            output_tensors = [*output_tensors]
        if output_tensors is not None and output_tensors is not now.accepted:
            self._check_outputs(machine, output_tensors)
            now.accepted = output_tensors
        if now.differs_in_evaluation and not machine.model.training:
            why = "a training PEF runs in training mode; --inference predicts with it"
            say_once("model.eval()", why, app_line())
        now.inputs = batch or now.inputs
        if hyperparam_dict:
            now.hyperparameters.take(hyperparam_dict)
        if SectionKind.FWD in kinds:
            now.hyperparameters.begin_forward()
        mode = now.checks.mode(kinds, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
        now.checks.before(kinds, batch, mode, now.hyperparameters.told)
        tangent = now.start.tangent(now.output_gradients, grad_of_outputs) if SectionKind.BCKWD in kinds else None
        if torch.is_autocast_enabled("cpu"):
            say_once(
                "torch.autocast", "the PEF says in which type it computes: --dtype bf16 at the compile", app_line()
            )
            with torch.autocast("cpu", enabled=False):
                found = machine.replica.run(kinds, batch, tangent, mode)
        else:
            found = machine.replica.run(kinds, batch, tangent, mode)
        if SectionKind.OPT in kinds:
            machine.note_step()
        if now.start.is_loss and not isfinite(machine.replica.loss):
            now.checks.report_loss()
        return self._answer(now, found, output_tensors)

    @checks_keywords
    def setup(self, cfg: Namespace | Mapping[str, object]) -> None:
        """What `compile` takes where it is given no config_dict: what `parse_app_args` returned, a SambaConfig, an
        SNConfig, or names with values. Raises OptionError for anything else."""
        self._config = dict(as_mapping("cfg", cfg))

    def reset(self) -> None:
        """Forget the PEF that is loaded, and what `setup` was given."""
        self._now, self._config = None, None

    @property
    def tracing(self) -> bool:
        """Whether a model's forward is being traced now, by `compile` or `trace_graph`, and is not computed. Setting it
        has no effect: a forward that the app calls is always computed."""
        return torch.compiler.is_compiling()

    @tracing.setter
    def tracing(self, traces: bool) -> None:
        pass

    @checks_keywords
    def start_samba_profile(self) -> None:
        """The event `samba_profile` of `profiler` begins."""
        self.profiler.start_event(_PROFILE)

    @checks_keywords
    def end_samba_profile(self, filename: str | Path | None = None) -> None:
        """The event `samba_profile` of `profiler` ends; all events go to `filename` as JSON, if it is given."""
        self._end_profile(_PROFILE, filename)

    @checks_keywords
    def start_runtime_profile(self) -> None:
        """The event `runtime_profile` of `profiler` begins."""
        self.profiler.start_event(_RUNTIME_PROFILE)

    @checks_keywords
    def end_runtime_profile(self, filename: str | Path | None = None) -> None:
        """The event `runtime_profile` of `profiler` ends; all events go to `filename` as JSON, if it is given."""
        self._end_profile(_RUNTIME_PROFILE, filename)

    def enable_pinned_memory(self, *arguments: object, **options: object) -> None:
        """No effect: a session copies inputs in the memory of its process."""
        say_once("session.enable_pinned_memory", "inputs are copied within the memory of the process", app_line())

    def disable_graphamp(self, *arguments: object, **options: object) -> None:
        """No effect: a PEF computes in the type that --dtype says."""
        say_once("session.disable_graphamp", "--dtype says in which type a PEF computes", app_line())

    def use_static_functional(self, *arguments: object, **options: object) -> None:
        """No effect: operators are captured as the model calls them."""
        say_once("session.use_static_functional", "operators are captured as the model calls them", app_line())

    @contextmanager
    def timed(self, model: nn.Module) -> Iterator[SectionClock]:
        """Within it, whole steps and forwards are timed section by section, and sections run one after another: sync
        does not go on beside the backward. Raises OptionError if no PEF is loaded for `model`."""
        replica = self._loaded(model).machine.replica
        replica.clock = clock = SectionClock()
        try:
            yield clock
        finally:
            replica.clock = None

    def program(self, model: nn.Module) -> Program:
        """What the loaded PEF holds. Raises OptionError if none is loaded for `model`."""
        return self._loaded(model).machine.program

    def document(self, model: nn.Module) -> PefDocument:
        """All that the loaded PEF says. Raises OptionError if none is loaded for `model`."""
        return self._loaded(model).machine.document

    @property
    def machine(self) -> Machine | None:
        """The PEF that is loaded, with its model and its replica; None before `trace_graph`."""
        return None if self._now is None else self._now.machine

    @property
    def example_inputs(self) -> Mapping[str, Tensor] | None:
        """The last batch, or the one that `trace_graph` was given, by name; None if no PEF is loaded."""
        return None if self._now is None else self._now.inputs

    @checks_keywords
    def to_cpu(self, model: nn.Module | None = None, optimizers: object = None) -> None:
        """The weights, buffers and optimizer state of the device to the host: always of all optimizers."""
        now = self._loaded(model)
        now.checks.before_fetch()
        now.machine.to_host()
        now.checks.after_exchange()

    @checks_keywords
    def to_device(self, model: nn.Module | None = None, optimizers: object = None) -> None:
        """The weights and buffers of the host, and the state of its optimizers, to the device."""
        now = self._loaded(model)
        now.checks.before_new_weights()
        now.machine.to_device()
        now.checks.after_exchange()

    to_rdu = to_device

    def device_gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient on the device of a parameter of the loaded model: `param.sn_grad`. None for any other tensor."""
        return None if self._now is None else self._now.machine.gradient(tensor)

    def device_value(self, tensor: Tensor) -> Tensor | None:
        """What the device has for a parameter or buffer of the loaded model: `param.sn_data`. None for others."""
        return None if self._now is None else self._now.machine.value(tensor)

    @checks_keywords
    def get_tensors_by_name(self, names: Sequence[str]) -> list[SambaTensor]:
        """Tensors by the names of their symbols: copies of what is on the device, or the last inputs and outputs.

        Raises OptionError for a name that the PEF does not have.
        """
        now = self._loaded()
        if isinstance(names, str):
            raise OptionError(
                f"names is the word {names!r}, and must be a list of such words",
                where=app_line(),
                remedy=f'samba.session.get_tensors_by_name(["{names}"])',
            )
        return [named_tensor(now, name) for name in names]

    @checks_keywords
    def get_tensors(self, tensors: Tensor | Sequence[Tensor]) -> tuple[SambaTensor, ...]:
        """Outputs of the last run, for output tensors of `trace_graph`."""
        return self._answer(self._loaded(), {}, tensors)

    def get_dropout_rate_argin_names(self) -> tuple[str, ...]:
        """The keys of `hyperparam_dict` that set dropout rates, one for each dropout: `net__drop__dropout_p`."""
        return self._loaded().hyperparameters.rates

    @property
    def tensor_dict(self) -> Mapping[str, object]:
        """The inputs and outputs of the last run, by name; and all inputs under `inputs`, all gradients of trained
        parameters under `grads`."""
        now = self._loaded()
        inputs = {name: SambaTensor(tensor, name=name) for name, tensor in now.inputs.items()}
        symbols = now.machine.program.symbols.values()
        grads = [symbol.name for symbol in symbols if symbol.kind is SymbolKind.GRADIENT]
        groups = {"inputs": inputs, "grads": {name: named_tensor(now, name) for name in grads}}
        return {**groups, **inputs, **now.outputs}

    @property
    def buffer_dict(self) -> Mapping[str, SambaTensor]:
        """Copies of the buffers on the device, by the names of their symbols."""
        now = self._loaded()
        symbols = now.machine.program.symbols.values()
        return {one.name: named_tensor(now, one.name) for one in symbols if one.kind is SymbolKind.BUFFER}

    @property
    def optim_dict(self) -> Mapping[str, Optimizer]:
        """The app's optimizers, by the names that the PEF has for them."""
        machine = self._loaded().machine
        # The PEF has one for each group of parameters that has any to train.
        owners = [
            optimizer
            for optimizer in machine.optimizers
            for group in optimizer.param_groups
            if any(parameter.requires_grad for parameter in group["params"])
        ]
        return dict(zip((one.name for one in machine.program.optimizers), owners, strict=True))

    def __getattr__(self, name: str) -> object:
        told = no_such_name("samba.session", name, [known for known in dir(type(self)) if not known.startswith("_")])
        remedy = "leave it out; where it is for several graphs, compile a PEF for each: a PEF holds one graph here"
        raise AbsentNameError(str(told), where=app_line(), remedy=remedy)

    def _loaded(self, model: nn.Module | None = None) -> Loaded:
        if self._now is None:
            raise OptionError(
                "no PEF is loaded",
                where=app_line(),
                remedy="call samba.utils.trace_graph(model, inputs, optim, pef=args.pef)",
            )
        if model is not None and unwrapped(model) is not self._now.machine.model:
            raise OptionError(
                f"this {type(model).__name__} is not the model that was traced",
                where=app_line(),
                remedy="give the model that trace_graph was called with",
            )
        return self._now

    def _check_outputs(self, machine: Machine, wanted: Tensor | Sequence[Tensor]) -> None:
        """Raises OptionError for outputs of a model that was traced before the one that is loaded, and DataError for
        what is no tensors."""
        if not isinstance(wanted, Iterable):
            raise DataError(
                f"output_tensors is of type {type(wanted).__name__}, and must be tensors",
                where=app_line(),
                remedy="give model.output_tensors, or some of them",
            )
        if any(tensor in self._of_other_models for tensor in flat(wanted)):
            raise OptionError(
                f"output_tensors are of another model than the {type(machine.model).__name__} that was traced last",
                where=app_line(),
                remedy="call trace_graph for a model before its run: a session holds one PEF at a time",
            )

    def _answer(
        self, now: Loaded, found: Mapping[str, Tensor], wanted: Tensor | Sequence[Tensor] | None
    ) -> tuple[SambaTensor, ...]:
        """What was `found` takes the place of what the last run gave; returns what is `wanted` of it."""
        outputs = now.outputs
        for name, value in found.items():
            if name in outputs:
                outputs[name] = outputs[name].with_data(value, name)
            else:
                now.gradients[name] = value
                for inputs in (now.traced_inputs, now.given):
                    if now.input_gradients[name] in inputs:
                        inputs[now.input_gradients[name]].sn_grad = value
        if wanted is None:
            return tuple(outputs.values())
        tensors = flat(wanted)
        answers = [outputs.get(name_of(tensor) or "") for tensor in tensors]
        known = tuple(answer for answer in answers if answer is not None)
        if len(known) < len(answers):
            unknown = name_of(tensors[answers.index(None)])
            raise OptionError(
                f"output_tensors has {unknown or 'a tensor without a name'}, which is no output of the PEF",
                where=app_line(),
                remedy=f"give model.output_tensors, or some of them: {', '.join(outputs)}",
            )
        return known

    def _set_tensors(self, tensors: Mapping[str, object]) -> None:
        """`session.ctx.set_tensors`: by the name of a symbol, arrays or tensors for what is on the device. The gradient
        of an output, `<output>__grad`, is what the next backward starts from.

        Raises OptionError for a name that the PEF does not have, and DataError for another shape than it has there.
        """
        now = self._loaded()
        symbols = now.machine.program.symbols
        outputs = {name: name for name in now.outputs}
        of_outputs = {gradient_name(name): output for name, output in {**now.aliases, **outputs}.items()}
        for name, value in dict(tensors).items():
            plain = to_torch(torch.as_tensor(value))
            if name in symbols and symbols[name].offset is not None:
                if tuple(plain.shape) != symbols[name].type.shape:
                    raise DataError(
                        f"{name} has the shape {symbols[name].type.shape}, and the given data {tuple(plain.shape)}",
                        where=app_line(),
                        remedy="give data of that shape",
                    )
                now.machine.replica.meet()
                now.machine.replica.write(name, plain)
                now.machine.replica.meet()
            elif name in of_outputs:
                now.outputs[of_outputs[name]].sn_grad = as_gradient(plain)
            else:
                named_tensor(now, name)  # raises: the PEF has no such tensor

    def _end_profile(self, event: str, filename: str | Path | None) -> None:
        self.profiler.end_event(event)
        if filename is not None:
            self.profiler.write(filename)


session = Session()
"""The session of this process."""
