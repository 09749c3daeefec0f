"""The session: compile a model, run sections of its PEF, and move weights between host and device.

There is one session a process, `samba.session`. The model has the weights of the host, which only `to_cpu` changes;
`run` and `to_device` change those of the device.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import OptionError
from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.watch.observer import SectionClock
from sambasim.samba.checks import replicas
from sambasim.samba.device import Machine
from sambasim.samba.inputs import Inputs, repeatable
from sambasim.samba.loaded import Loaded, kinds_of
from sambasim.samba.notices import AbsentNameError, checks_keywords, nearest, say_once, without_effect
from sambasim.samba.process import app_error, current, type_error
from sambasim.samba.profiler import Profiler
from sambasim.samba.request import Optimizer, as_mapping, as_sequence, build_fields, compile_request, request, unwrapped
from sambasim.samba.tensor import SambaTensor

if TYPE_CHECKING:
    from sambasim.samba.graph import FwdGraph


class Session:
    """What apps call `samba.session`."""

    def __init__(self) -> None:
        self.profiler = Profiler()
        self.ctx = SimpleNamespace(set_tensors=lambda tensors: self.loaded().set_tensors(tensors))
        self._config: Mapping[str, object] | None = None
        self._now: Loaded | None = None
        self._graphs: dict[str, Loaded] = {}
        """All that is loaded, by the name of the graph: "" of `trace_graph`. The last one is `_now`."""
        self._trace_graphs: Callable[..., None]  # set by trace.py, which imports this file
        self._added: dict[str, FwdGraph] = {}
        self._are_used = False  # whether the added graphs are compiled or loaded
        self._of_other_models = WeakIdKeyDictionary()

    @checks_keywords()
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
        """Compiles `model` for the batch `inputs`, and writes the PEF. Returns its absolute path.

        config_dict: the command line, `vars(args)`; by default that of `setup`, or else of `parse_app_args`
        pef_metadata, metadata: kept in the PEF as text
        loss_indices: the outputs from which the backward starts; by default found by `inputs.losses_among`

        Raises ModelError and CaptureError for models that cannot be compiled. No effect: app_dir, squeeze_bs_dim,
        init_output_grads, io_host_memory, is_split_batch, graph_transform_hook."""
        if graph_transform_hook is not None:
            say_once("graph_transform_hook", "the graph is compiled as it was captured")
        config = self._config_of(config_dict)
        forward_only = bool(config.get("inference")) if inference is None else inference
        replicas.note_not_passed_on(config, inference=forward_only)
        model, listed, batch = unwrapped(model), as_sequence(optimizers), repeatable(inputs)
        fields = build_fields(config, name or type(model).__name__.lower())
        asked = request(model, batch, listed, fields, inference=forward_only, loss_indices=loss_indices)
        return compile_request({"": asked}, {**(pef_metadata or {}), **(metadata or {})})

    def _config_of(self, config_dict: Mapping[str, object] | None) -> Mapping[str, object]:
        default = current().arguments if self._config is None else self._config
        return as_mapping("config_dict", default if config_dict is None else config_dict)

    @checks_keywords()
    def add_graph(self, graph: "FwdGraph") -> None:
        """Adds a graph to those that are compiled or loaded together next. Raises OptionError for a name that another
        of them has."""
        from sambasim.samba.graph import FwdGraph  # importing it has calls remembered

        if not isinstance(graph, FwdGraph):
            raise type_error(OptionError, "add_graph takes a graph", graph, "FwdGraph(inputs, outputs, name)")
        if self._are_used:
            self._added, self._are_used = {}, False
        if graph.name in self._added:
            raise app_error(OptionError, f"two graphs are called {graph.name}", "give each a name= of its own")
        self._added[graph.name] = graph

    @checks_keywords()
    def compile_multigraph(
        self,
        name: str | None = None,
        config_dict: Mapping[str, object] | None = None,
        pef_metadata: Mapping[str, object] | None = None,
        enable_hypersection: bool = True,
        inference: bool = True,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
    ) -> str:
        """Compiles the added graphs into one PEF, in which equal weights are stored once: see `compile`.
        enable_hypersection has no effect. Raises OptionError without graphs, and for training; else as `compile`."""
        graphs, config = self._take_graphs(), self._config_of(config_dict)
        if not inference or as_sequence(optimizers):
            remedy = "leave out inference=False and the optimizers; session.compile makes a PEF that trains"
            raise app_error(OptionError, "a PEF of several graphs predicts, and trains nothing", remedy)
        replicas.note_not_passed_on(config, inference=True)
        fields = build_fields(config, name or type(next(iter(graphs.values())).model).__name__.lower())
        return compile_request({name: one.request(fields) for name, one in graphs.items()}, pef_metadata or {})

    @checks_keywords()
    def init_multigraph_runtime(self, pef: str = "", config_dict: Mapping[str, object] | None = None) -> None:
        """Loads the added graphs, all of `pef` or some, and copies the weights to the device. Raises OptionError
        without graphs, for a PEF of one graph, and for a graph that it does not have; else as `trace_graph`."""
        self._trace_graphs(self._take_graphs(), pef, config_dict)

    def _take_graphs(self) -> Mapping[str, "FwdGraph"]:
        if not self._added:
            what = "there are no graphs in the session"
            raise app_error(OptionError, what, "samba.session.add_graph(FwdGraph(inputs, outputs, name)) for each")
        self._are_used = True
        return self._added

    def load(self, graphs: Mapping[str, Loaded]) -> None:
        """Makes these graphs, by name, what the session runs."""
        model = next(iter(graphs.values())).machine.model
        if self._now is not None and self._now.machine.model is model:
            self._now.checks.host.note_replacement()
        elif self._now is not None:
            for graph in self._graphs.values():
                self._of_other_models.update(dict.fromkeys(graph.traced, True))
        self._graphs = dict(graphs)
        for self._now in graphs.values():
            self._now.share_regions([*graphs.values()])

    def _choose(self, graph_name: str | None) -> Loaded:
        """The loaded graph of this name, which is now the last. A PEF of `trace_graph` has one, whatever its name."""
        if "" in self._graphs or self._now is None:
            return self.loaded()
        if graph_name is None and len(self._graphs) > 1:
            what = f"session.run needs the name of a graph: {', '.join(self._graphs)} are loaded"
            raise app_error(OptionError, what, f"graph_name={next(iter(self._graphs))!r}")
        name = graph_name or next(iter(self._graphs))
        if name not in self._graphs:
            raise app_error(OptionError, f"no graph {name} is loaded", nearest(name, [*self._graphs]))
        self._graphs[name] = self._now = self._graphs.pop(name)
        vars(self._now.machine.model)["output_tensors"] = self._now.traced  # as in trace_graph
        return self._now

    @checks_keywords()
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
        """Runs sections on a batch: by default a whole training step, or the forward of an inference PEF.

        input_tensors: the batch, bound by name, or by position if tensors have no names; not needed without FWD
        output_tensors: the outputs to return: one tensor, or several; None for all
        hyperparam_dict: lr, momentum, weight_decay … of all optimizers, and dropout rates, from this step on
        data_parallel, reduce_on_rdu: whether gradients are synced with the other replicas, and where
        graph_name: of a PEF of several graphs, the one to run. Inputs in a region may be left out
        section_types: FWD, BCKWD, OPT, in any case; GRADNORM, REDUCE and GATHER run with OPT
        grad_of_outputs: for this run, the gradient of each output, or None; by default the `sn_grad` of outputs

        Raises OptionError and DataError for arguments that do not fit the PEF, and for findings of the checks."""
        now = self._choose(graph_name)
        machine = now.machine
        kinds = kinds_of(machine.program, section_types)
        given = [] if input_tensors is None and now.kept else input_tensors
        batch = {} if given is None else now.bind(repeatable(given))
        if SectionKind.FWD in kinds and not (batch or now.kept):
            raise app_error(OptionError, "section FWD needs a batch", "session.run(input_tensors=[…], …)")
        others = [one for graph in self._graphs.values() if graph is not now for one in graph.traced]
        wanted = None if output_tensors is None else now.chosen(output_tensors, self._of_other_models, others)
        if now.differs_in_evaluation and not machine.model.training:
            say_once("model.eval()", "a training PEF runs in training mode; --inference predicts with it")
        now.inputs = batch or now.inputs
        if hyperparam_dict:
            now.hyperparameters.take(hyperparam_dict)
        if SectionKind.FWD in kinds:
            now.hyperparameters.begin_forward()
        mode = now.checks.before(kinds, batch, data_parallel=data_parallel, reduce_on_rdu=reduce_on_rdu)
        tangent = now.start.tangent(now.output_gradients, grad_of_outputs) if SectionKind.BCKWD in kinds else None
        is_cast = torch.is_autocast_enabled("cpu")
        if is_cast:
            say_once("torch.autocast", "the PEF decides in which type it computes: --dtype bf16 at the compile")
        with torch.autocast("cpu", enabled=False) if is_cast else nullcontext():
            results = machine.replica.run(kinds, batch, tangent, mode)
        if SectionKind.OPT in kinds:
            for optimizer in machine.optimizers:
                optimizer._opt_called = True  # for torch's schedulers
        if now.start.is_loss and not isfinite(machine.replica.loss):
            now.checks.report_nonfinite_loss()
        now.write_regions(batch, results)
        return now.answer(results, wanted)

    @checks_keywords()
    def setup(self, cfg: Namespace | Mapping[str, object]) -> None:
        """Sets the default of `config_dict` of `compile`: what `parse_app_args` returned, a SambaConfig, an SNConfig,
        or a dictionary. Raises OptionError for anything else."""
        self._config = dict(as_mapping("cfg", cfg))

    def reset(self) -> None:
        """Forgets the loaded PEF, added graphs, and what `setup` was given."""
        self._now, self._config, self._graphs, self._added = None, None, {}, {}

    @property
    def tracing(self) -> bool:
        """Whether a model's forward is being traced. Assigning has no effect."""
        return is_tracing()

    @tracing.setter
    def tracing(self, traces: bool) -> None: ...

    @checks_keywords()
    def start_samba_profile(self) -> None:
        """Starts the event `samba_profile` of `profiler`."""
        self.profiler.start_event("samba_profile")

    @checks_keywords()
    def end_samba_profile(self, filename: str | Path | None = None) -> None:
        """Ends that event, and adds all new events to `filename` as lines of JSON."""
        self.profiler.end_event("samba_profile", filename)

    @checks_keywords()
    def start_runtime_profile(self) -> None:
        """Starts the event `runtime_profile` of `profiler`."""
        self.profiler.start_event("runtime_profile")

    @checks_keywords()
    def end_runtime_profile(self, filename: str | Path | None = None) -> None:
        """Ends that event, and adds all new events to `filename` as lines of JSON."""
        self.profiler.end_event("runtime_profile", filename)

    enable_pinned_memory = without_effect("session.enable_pinned_memory", "inputs are copied within the process")
    disable_graphamp = without_effect("session.disable_graphamp", "--dtype decides in which type a PEF computes")
    use_static_functional = without_effect("session.use_static_functional", "operators are captured as they are called")

    @contextmanager
    def timed(self, model: nn.Module) -> Iterator[SectionClock]:
        """Within it, whole steps and forwards are timed section by section, without overlap of sync and backward.
        Raises OptionError if no PEF is loaded for `model`."""
        replica = self.loaded(model).machine.replica
        clock = SectionClock()
        replica.time_by(clock)
        try:
            yield clock
        finally:
            replica.time_by(None)

    @property
    def machine(self) -> Machine | None:
        """The loaded PEF with its model and replica; None before `trace_graph`."""
        return None if self._now is None else self._now.machine

    @checks_keywords()
    def to_cpu(self, model: nn.Module | None = None, optimizers: object = None) -> None:
        """Copies weights, buffers and the state of all optimizers from the device to the host."""
        for now in self._graphs_of(model):
            now.checks.host.note_fetch()
            if not now.machine.replica.has_weights_of_another:
                now.machine.to_host()
            now.checks.host.note_exchange()

    @checks_keywords()
    def to_device(self, model: nn.Module | None = None, optimizers: object = None) -> None:
        """Copies weights, buffers and the state of all optimizers from the host to the device."""
        for now in self._graphs_of(model):
            now.checks.replaced = True
            if not now.machine.replica.has_weights_of_another:
                now.machine.to_device()
            if kept := now.checks.host.options.taken_from_checkpoint():
                now.hyperparameters.take_from_checkpoint(kept)
            now.checks.host.note_exchange()

    to_rdu = to_device

    @checks_keywords()
    def get_tensors_by_name(self, names: Sequence[str]) -> list[SambaTensor]:
        """Tensors by the names of their symbols: copies of those on the device, or the last inputs and outputs. Raises
        OptionError for a name that the PEF does not have."""
        if isinstance(names, str):
            what = f"names must be a list of words, not the word {names!r}"
            raise app_error(OptionError, what, f'samba.session.get_tensors_by_name(["{names}"])')
        return [self._named(name) for name in names]

    def _named(self, name: str) -> SambaTensor:
        """That of the graph that ran last, of those that have the name."""
        for loaded in reversed(self._graphs.values()):
            with suppress(OptionError):
                return loaded.named_tensor(name)
        return self.loaded().named_tensor(name)  # raises

    @checks_keywords()
    def get_tensors(self, tensors: Tensor | Sequence[Tensor]) -> tuple[SambaTensor, ...]:
        """Outputs of the last run, for output tensors of `trace_graph`."""
        return self.loaded().answer({}, self.loaded().chosen(tensors, self._of_other_models, ()))

    def get_dropout_rate_argin_names(self) -> tuple[str, ...]:
        """The keys of dropout rates in `hyperparam_dict`: `net__drop__dropout_p`."""
        return tuple(self.loaded().hyperparameters.rates)

    @property
    def tensor_dict(self) -> Mapping[str, object]:
        """Inputs and outputs of the last run by name, and in `inputs` and `grads` all inputs and all gradients."""
        now = self.loaded()
        inputs = {name: SambaTensor(tensor, name=name) for name, tensor in now.inputs.items()}
        return {"inputs": inputs, "grads": now.on_device(SymbolKind.GRADIENT), **inputs, **now.outputs}

    @property
    def buffer_dict(self) -> Mapping[str, SambaTensor]:
        """Copies of the buffers on the device, by the names of their symbols."""
        return self.loaded().on_device(SymbolKind.BUFFER)

    @property
    def optim_dict(self) -> Mapping[str, Optimizer]:
        """The app's optimizers, by the names that the PEF has for them."""
        machine = self.loaded().machine
        groups = ((optimizer, group) for optimizer in machine.optimizers for group in optimizer.param_groups)
        # The PEF has one for each parameter group with trained parameters.
        owners = [owner for owner, group in groups if any(parameter.requires_grad for parameter in group["params"])]
        return dict(zip((optimizer.name for optimizer in machine.program.optimizers), owners, strict=True))

    def __getattr__(self, name: str) -> object:
        known = [one for one in dir(type(self)) if not one.startswith("_")]
        near = ", ".join(get_close_matches(name, known, n=4))
        hint = f"; similar names: {near}" if near else ""
        raise app_error(AbsentNameError, f"samba.session has no {name}{hint}", "leave it out")

    def loaded(self, model: nn.Module | None = None) -> Loaded:
        """The loaded PEF. Raises OptionError if there is none, or one for another model than `model`."""
        if self._now is None:
            raise app_error(OptionError, "no PEF is loaded", "samba.utils.trace_graph(model, inputs, optim, pef=…)")
        if model is None or unwrapped(model) is self._now.machine.model:
            return self._now
        others = [one for one in self._graphs.values() if one.machine.model is unwrapped(model)]
        if not others:
            what = f"this {type(model).__name__} is not the model that was traced"
            raise app_error(OptionError, what, "give the model that trace_graph was called with")
        return others[-1]

    def _graphs_of(self, model: nn.Module | None) -> list[Loaded]:
        """What is loaded for `model`, or for all models."""
        now = self.loaded(model)
        return [one for one in self._graphs.values() if model is None or one.machine.model is now.machine.model]


session = Session()
