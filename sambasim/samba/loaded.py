"""A PEF that a session has loaded: inputs, outputs, and the gradients from which its backward starts."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from sambasim.compiler.capture.results import tensors_in
from sambasim.errors import DataError, OptionError
from sambasim.ir.graph import SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind, gradient_name
from sambasim.runtime.engine.executor import Tangent
from sambasim.runtime.run.stepwise import STEP
from sambasim.samba import ending, process
from sambasim.samba.checks.replicas import Checks
from sambasim.samba.device import Hyperparameters, Machine
from sambasim.samba.fingerprint import Request
from sambasim.samba.flags import MEASURING
from sambasim.samba.inputs import Binder, Inputs, fitting, inputs_of, name_of, repeatable
from sambasim.samba.notices import nearest
from sambasim.samba.process import app_error, type_error
from sambasim.samba.tensor import SambaTensor, host_values, of_shape, to_torch

_PART_OF_OPT = frozenset({SectionKind.GRADNORM, SectionKind.REDUCE, SectionKind.GATHER})
"""Kinds that run with OPT, whether they are named or not."""


class Loaded:
    """A loaded PEF, or a graph of one, and the inputs and outputs of its last run."""

    def __init__(self, machine: Machine, asked: Request, inputs: Inputs, traced: Sequence[SambaTensor]) -> None:
        program = machine.program
        self.machine, self.example = machine, asked.example
        self.traced = tuple(traced)
        self.hyperparameters = Hyperparameters(machine)
        self.checks = Checks(machine, ending.communicator(), self.hyperparameters)
        self.wanted: Mapping[str, Symbol] = inputs_of(program)
        self.start = Start(program, [str(tensor.sn_name) for tensor in traced], loss_chosen=bool(asked.loss_indices))
        self.output_gradients: dict[str, Tensor] = {}
        nodes = program.training.nodes if program.training is not None else ()
        # Dropout and batch normalization.
        self.differs_in_evaluation = any(
            OPERATORS[node.operator].draws_random_numbers or "batch_norm" in node.operator for node in nodes
        )
        gradients = {gradient_name(name): name for name in self.wanted}
        self.input_gradients = {name: of for name, of in gradients.items() if name in program.symbols}
        graph, symbols = program.leading, program.symbols
        outputs = [output for output in graph.outputs if symbols[output.symbol].kind is SymbolKind.OUTPUT]
        # Names by operators, `net__fc__linear__outputs__0`; a parameter that the model returns has none.
        of_values = {output.value: output.symbol for output in outputs if output.value in graph.values}
        # Also without the prefix of the model.
        self.aliases = {value.partition("__")[2]: symbol for value, symbol in of_values.items()} | of_values
        self.binder = Binder(machine.model, asked.example)
        self.regions: Mapping[str, str] = {}
        """The regions of inputs and outputs that lie in one."""
        self.whole: Collection[str] = ()
        """The inputs that are one for all samples, of which the device has as many."""
        self.kept: frozenset[str] = frozenset()
        """The inputs that a run may leave out: the device has what was last written to their regions."""
        self._readers: Mapping[str, Sequence[tuple[Loaded, str]]] = {}
        self.given: Mapping[str, SambaTensor] = {}
        self.inputs = self.bind(inputs)
        self.traced_inputs = self.given
        self.gradients: dict[str, Tensor] = {}  # of inputs
        for output in traced:
            output._sn_grads = self.output_gradients
        self.outputs = {str(t.sn_name): SambaTensor(t, name=t.sn_name) for t in traced}

    def bind(self, inputs: Inputs) -> Mapping[str, Tensor]:
        """The batch of a run, by the names of the PEF's inputs."""
        given, size = self.binder.named(inputs, self.kept), self.machine.program.batch_size
        if self.input_gradients:
            self.given = {name: one for name, one in given.items() if isinstance(one, SambaTensor)}
        return {name: fitting(name, self.wanted, one, size, self.whole) for name, one in given.items()}

    def share_regions(self, graphs: "Sequence[Loaded]") -> None:
        """From now on an input in a region has what a run of these `graphs`, this one among them, last wrote there. It
        begins as it was traced. A region whose tensors differ in shape or dtype is none."""
        members = [(graph, name, region) for graph in graphs for name, region in graph.regions.items()]
        types = {(region, *graph._type(name)) for graph, name, region in members}
        whole = {region for region, count in Counter(region for region, *_ in types).items() if count == 1}
        self.kept = frozenset(name for name in self.wanted if self.regions.get(name) in whole)
        self.machine.replica.place({name: self.inputs[name] for name in self.kept})
        self._readers = {
            name: [
                (graph, other)
                for graph, other, at in members
                if at == region and other in graph.wanted and (graph, other) != (self, name)
            ]
            for name, region in self.regions.items()
            if region in whole
        }

    def write_regions(self, batch: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> None:
        """The inputs of a run, and then its results, are written to the inputs in the same regions."""
        for name, readers in self._readers.items():
            value = results.get(name, batch.get(name))
            if value is not None:
                for graph, other in readers:
                    graph.machine.replica.place({other: value.expand(graph.wanted[other].type.shape)})

    def _type(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of an input or output as the app has it."""
        type_ = self.machine.program.symbols[name].type
        return type_.dtype, type_.shape[1:] if name in self.whole else type_.shape

    def chosen(
        self, given: Inputs, of_other_models: Collection[Tensor], of_other_graphs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The tensors in `given`, some of the outputs. Raises OptionError for those of a model that was traced before,
        or of a graph that does not run now, and DataError for anything but tensors."""
        wanted = repeatable(given, "output_tensors")
        for value in wanted.values() if isinstance(wanted, Mapping) else wanted:
            if value is not None and not tensors_in(value):
                remedy = "give some of model.output_tensors"
                raise type_error(DataError, "output_tensors must hold tensors", value, remedy)
        listed = tensors_in(wanted)
        if any(tensor in of_other_models for tensor in listed):
            what = f"output_tensors are of another model than the {type(self.machine.model).__name__} traced last"
            raise app_error(OptionError, what, "trace_graph before a model's run: a session holds one PEF at a time")
        if any(tensor is other for tensor in listed for other in of_other_graphs):
            what = "output_tensors are of another graph than the one that runs"
            raise app_error(OptionError, what, "leave output_tensors out, or give outputs of that graph")
        return listed

    def answer(self, values: Mapping[str, Tensor], wanted: Sequence[Tensor] | None) -> tuple[SambaTensor, ...]:
        """Keeps the results of a run; returns the outputs that are `wanted`, or all."""
        outputs = self.outputs
        for name, value in values.items():
            if name in outputs:
                outputs[name] = outputs[name].with_data(value, name)
            elif name in self.input_gradients:
                self.gradients[name] = value
                for inputs in (self.traced_inputs, self.given):
                    if self.input_gradients[name] in inputs:
                        inputs[self.input_gradients[name]].sn_grad = value
        names = [*outputs] if wanted is None else [name_of(one) or "a tensor without a name" for one in wanted]
        names = [name if name in outputs else self.aliases.get(name, name) for name in names]
        for name in names:
            if name not in outputs:
                what = f"output_tensors has {name}, which is no output of the PEF"
                raise app_error(OptionError, what, f"give model.output_tensors, or some of them: {', '.join(outputs)}")
        return tuple(outputs[name] for name in names)

    def named_tensor(self, name: str) -> SambaTensor:
        """The tensor that an app calls `name`. Raises OptionError for a name that the PEF does not have."""
        symbol = self.machine.program.symbols.get(name)
        if symbol is None:
            name = self.aliases.get(name, name)
        if name in self.outputs:
            return self.outputs[name]
        tensor = self.inputs.get(name, self.gradients.get(name))
        if tensor is not None:
            return SambaTensor(tensor, name=name)
        if symbol is None or symbol.offset is None:
            remedy = f"sambasim inspect {self.machine.program.name} lists them"
            raise app_error(OptionError, f"the PEF has no tensor {name}", remedy)
        return SambaTensor(self.machine.replica.read(name), name=name)

    def on_device(self, kind: SymbolKind) -> dict[str, SambaTensor]:
        """Copies of the tensors of this kind, by name."""
        return {name: self.named_tensor(name) for name in self.machine.program.names_of(kind)}

    def set_tensors(self, tensors: Mapping[str, object]) -> None:
        """`session.ctx.set_tensors`: sets tensors on the device by name; `<output>__grad` starts the next backward."""
        symbols, replica = self.machine.program.symbols, self.machine.replica
        of_outputs = {gradient_name(name): output for name, output in self.aliases.items()}
        of_outputs |= {gradient_name(name): name for name in self.outputs}
        for name, value in dict(tensors).items():
            plain = host_values(torch.as_tensor(value), name)
            if name in symbols and symbols[name].offset is not None:
                of_shape(self.named_tensor(name), plain)
                replica.meet()
                replica.write(name, plain)
                if name in (states := self.machine.program.optimizer_states):
                    replica.begun.setdefault(states[name][0].optimizer, 0)
                replica.meet()
            elif name in of_outputs:
                self.outputs[of_outputs[name]].sn_grad = as_gradient(plain)
            else:
                self.named_tensor(name)  # raises: the PEF has no such tensor


def kinds_of(program: Program, section_types: Sequence[str] | None) -> Collection[SectionKind]:
    """The kinds that `section_types` name, without those that run with OPT; by default a whole training step, or the
    forward of an inference PEF. Raises OptionError for others than the PEF has."""
    if section_types is None:
        return STEP if program.training is not None else frozenset({SectionKind.FWD})
    if not isinstance(section_types, Iterable):
        raise type_error(OptionError, "section_types must be a list of words", section_types, 'section_types=["FWD"]')
    if isinstance(section_types, str):
        what = f"section_types must be a list of words, not the word {section_types!r}"
        raise app_error(OptionError, what, f'section_types=["{section_types}"]')
    known, words = list(SectionKind), [str(word).upper() for word in section_types]
    for word, typed in zip(words, section_types, strict=True):
        if word not in known:
            what = f"section_types has {typed!r}, which is no type of section"
            raise app_error(OptionError, what, nearest(word, known))
    kinds = set(map(SectionKind, words))
    if program.training is None and kinds != {SectionKind.FWD}:
        what = f"this PEF predicts, and has no {', '.join(sorted(kinds - {SectionKind.FWD}))}"
        remedy = "run FWD alone; to train, compile and run without --inference, and give trace_graph the optimizers "
        remedy += "of parameters that require a gradient"
        raise app_error(OptionError, what, remedy)
    return frozenset(kinds - _PART_OF_OPT)


def outputs_of(program: Program) -> Iterator[SambaTensor]:
    """A tensor without data for each output of what a session runs."""
    of_inputs = {gradient_name(name) for name in inputs_of(program)}
    for output in program.leading.outputs:
        symbol = program.symbols[output.symbol]
        if symbol.kind is SymbolKind.OUTPUT and symbol.name not in of_inputs:
            shape, dtype = symbol.type.shape, getattr(torch, symbol.type.dtype)
            batch_dim = 0 if shape[:1] == (program.batch_size,) else None
            yield SambaTensor(shape=shape, dtype=dtype, name=symbol.name, batch_dim=batch_dim)


class Start:
    """The outputs of a program from which its backward starts."""

    def __init__(self, program: Program, outputs: Sequence[str], *, loss_chosen: bool) -> None:
        """outputs: all names, in order; loss_chosen: whether the app gave `loss_indices`"""
        symbols = program.symbols
        tangents = program.names_of(SymbolKind.TANGENT)
        self._outputs = outputs
        self._types = {name: symbols[name].type for name in outputs if gradient_name(name) in tangents}
        types = self._types.items()
        self._means = {name: torch.full(t.shape, 1 / t.numel, dtype=getattr(torch, t.dtype)) for name, t in types}
        self.is_loss = loss_chosen or all(len(t.shape) <= 1 or t.numel == 1 for t in self._types.values())
        """Whether each output is a loss: one number, one for each sample, or one of `loss_indices`."""

    def tangent(
        self, given: Mapping[str, Tensor], for_this_run: Tensor | float | Sequence[Tensor | float | None] | None
    ) -> Tangent:
        """The gradients from which the backward starts: `for_this_run`, one for each output in order; or those `given`,
        the `sn_grad` of outputs by name; or else the mean of the loss. Reports AP09 if there is no loss."""
        gradients = given if for_this_run is None else self._by_name(for_this_run)
        starts: Mapping[str, Tensor] = self._means
        if gradients:
            shaped = {name: self._shaped(name, gradient) for name, gradient in gradients.items()}
            starts = {name: shaped.get(name, torch.zeros_like(mean)) for name, mean in self._means.items()}
        elif not self.is_loss and process.current().command not in MEASURING:
            if len(starts) > 1:
                what = f"AP09: the model returns no loss, and no gradient is set on its outputs: {', '.join(starts)}"
                remedy = "set sn_grad on an output before the backward, or give session.run grad_of_outputs=[…]; or "
                remedy += "return the loss first, as one number; or give loss_indices=[0] to session.compile"
                raise app_error(DataError, what, remedy)
            ((name, mean),) = starts.items()
            what = f"the backward starts from the mean of {name}, of shape {tuple(mean.shape)}: it is no loss"
            process.report_here("AP09", what, "return a loss, or set output.sn_grad before the backward")
        if len(starts) > 1:
            return {gradient_name(name): gradient for name, gradient in starts.items()}
        return next(iter(starts.values()), None)

    def _by_name(self, gradients: Tensor | float | Sequence[Tensor | float | None]) -> Mapping[str, Tensor]:
        listed = list(gradients) if isinstance(gradients, list | tuple) else [gradients]
        if len(listed) > len(self._outputs):
            what = f"grad_of_outputs has {len(listed)} gradients for {len(self._outputs)} outputs"
            raise app_error(OptionError, what, "give one for each output, None where the backward does not start")
        pairs = zip(self._outputs, listed, strict=False)
        return {name: as_gradient(gradient) for name, gradient in pairs if gradient is not None}

    def _shaped(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._types:
            what = f"sn_grad is set on {name}, and the backward of this PEF starts only from {', '.join(self._types)}"
            remedy = f"set sn_grad on {next(iter(self._types), 'the loss')}; or compile with loss_indices=[…]"
            raise app_error(OptionError, what, remedy)
        type_ = self._types[name]
        if gradient.numel() not in (1, type_.numel):
            what = f"sn_grad of {name} has the shape {tuple(gradient.shape)}, and the output {type_.shape}"
            raise app_error(DataError, what, "set one number, or one for each element of the output")
        plain = gradient.to(getattr(torch, type_.dtype))
        shaped = plain.reshape(()).expand(type_.shape) if gradient.numel() == 1 else plain.reshape(type_.shape)
        return shaped.contiguous()


def as_gradient(value: object) -> Tensor:
    """A gradient from an app as a plain tensor. Raises DataError for anything but a tensor or a number."""
    if isinstance(value, Real):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise type_error(DataError, "a gradient must be a tensor or a number", value, "a tensor of the output's shape")
    return to_torch(value).detach()
