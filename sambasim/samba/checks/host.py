"""AP05, AP06, AP07: weights and optimizers that host and device do not exchange; DP02 for backwards of a step.

The device has its own weights. If the host takes optimizer steps of its own, for comparison, its weights are not
compared. Functions of torch are watched for changes and uses of weights on the host:

watched       `model.state_dict()`, `load_state_dict`; `torch.save` of the model or of something that holds it; calls
              of the model and of its modules; clipping of gradients
not watched   `model.forward(x)` of a model without modules; reads of a parameter; pickle and deepcopy; state_dict
              of a module in the model; what `torch.jit`, `torch.compile`, `torch.export` and `torch.func` make
"""

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn, serialization
from torch.jit import _recursive
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.compiler.capture.tensors import held_by
from sambasim.compiler.capture.trial import is_tracing
from sambasim.data.batches import same
from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.values.memory import tensor_sha256
from sambasim.samba.checks.options import HostOptions
from sambasim.samba.device import Machine
from sambasim.samba.process import Code, current, is_called_by_app, report_here
from sambasim.samba.request import Optimizer
from sambasim.units import counted, first_of

_BOUNDS = {"clip_grad_norm_": "max_norm", "_clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}
"""Functions of torch that clip gradients, and the argument of each that is the bound."""


def is_sampled(step: int) -> bool:
    """Whether `step`, which counts from 1, is 1, 2, 8, 64, 512 …: the steps in which slow checks run."""
    return step == 2 or 8 ** round(math.log(step, 8)) == step


class Host:
    """What host and device had in common at the last exchange, for one loaded PEF, and what each has done since."""

    def __init__(self, machine: Machine) -> None:
        self.model = machine.model
        self._machine = machine
        self.options = HostOptions(machine)
        self._requires_grad = {path: parameter.requires_grad for path, parameter in self._parameters()}
        self._weights: Mapping[str, str] = {}
        self._steps_at_exchange = self._runs = self._backwards = 0
        self._backwards_wanted = int(current().flag("grad_accumulation_steps") or 1)  # of the first step
        self._host_trains = False  # whether the app's own optimizers have taken a step since the last exchange
        self._host_has_loaded = False  # other weights into the model, for example the best ones of an earlier time
        self._state_is_new = False
        self._reported: set[str] = set()
        self._compared: dict[str, int] = {}  # by use, the last step in which weights were compared: it takes time
        own = weakref.proxy(self)  # the optimizers belong to the app, and may outlive it
        for optimizer in machine.optimizers:
            for hook in (
                optimizer.register_step_post_hook(lambda *of_step: own._note_host_step(*of_step)),
                optimizer.register_load_state_dict_pre_hook(lambda *of_load: own._note_loading(*of_load)),
            ):
                weakref.finalize(self, hook.remove)
        _watch(self, _changed_by(machine))

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._weights = self._digests()
        self._steps_at_exchange = self._machine.replica.steps
        self._host_trains = self._host_has_loaded = self._state_is_new = False

    def note_run(self, kinds: Collection[SectionKind], given: Mapping[str, float], *, thoroughly: bool) -> None:
        """Sections of `kinds` are about to run with the hyperparameters `given`; `thoroughly`: compares every time."""
        self._runs += 1
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            if self._backwards_wanted not in (1, self._backwards):
                made, wanted = counted(self._backwards, "backward"), self._backwards_wanted
                what = f"--grad-accumulation-steps is {wanted}, but the optimizer step follows {made}"
                remedy = 'section_types=["FWD", "BCKWD"] for each batch, then ["OPT"] once'
                report_here("DP02", what, remedy)
            self._backwards, self._backwards_wanted = 0, 1
            for different in self.options.compare(given):
                self._report("AP05", *different)
            if self._state_is_new and not self._host_trains:
                what = "the app has loaded the state of an optimizer, and the device continues with its own"
                self._report("AP05", "state", what, "samba.session.to_device(model), or load it before trace_graph")
        if thoroughly or is_sampled(self._runs):
            if SectionKind.BCKWD in kinds or SectionKind.OPT in kinds:
                self._compare_requires_grad()
            self._compare_weights()
        if self._backwards == 256:  # no app accumulates the gradients of so many before its first optimizer step
            self._report_backwards()

    def note_fetch(self) -> None:
        """The weights of the device are about to replace those of the host."""
        if self._backwards and not self._machine.replica.steps:
            self._report_backwards()
        elif self._host_trains and self._ahead == 0 and current().trains:
            what = "to_cpu overwrites weights that the app has trained on the host, and the device has trained none"
            remedy = "session.run(…) for backward() and optimizer.step(); or leave to_cpu out"
            self._report("AP07", "AP07", what, remedy)

    def note_replacement(self) -> None:
        """`trace_graph` is about to load another PEF for the same model, with the weights of the host."""
        if self._ahead > 0 and current().trains:
            self._report_behind("trace_graph loads the weights of", "before trace_graph")

    def note_load(self) -> None:
        self._host_has_loaded = True

    def note_read(self, use: str) -> None:
        if self._is_behind(use):
            self._report_behind(f"the app {use} the weights on", "before it")

    def note_clipping(self, function: str, parameters: list[Tensor], arguments: Mapping[str, Any]) -> None:
        """AP05 if the PEF does not clip."""
        bound = float(arguments[_BOUNDS[function]])
        if not (math.isfinite(bound) and current().trains):  # with an infinite bound, it only reads the norm
            return
        training = self._machine.program.training
        clips = training is None or any(section.kind is SectionKind.GRADNORM for section in training.sections)
        clipped = {id(parameter) for parameter in parameters}
        trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        # No mistake: the device clips too, or these are not of the model, or the host has gradients of its own.
        if clips or clipped.isdisjoint(trained) or any(parameter.grad is not None for parameter in parameters):
            return
        has_equivalent = function == "clip_grad_norm_" and arguments.get("norm_type", 2.0) == 2 and trained <= clipped
        norm = bound if has_equivalent else "…"
        call = f"samba.optim.{type(self._machine.optimizers[0]).__name__}(…, max_grad_norm={norm})"
        remedy = f"{call}, a bound of the 2-norm of all gradients together; then compile the app again"
        self._report("AP05", "clipping", "the app clips gradients on the host, and the device does not", remedy)

    @property
    def _ahead(self) -> int:
        return self._machine.replica.steps - self._steps_at_exchange

    def _is_behind(self, use: str) -> bool:
        """Whether the app uses out-of-date weights. Compares weights once a step for each kind of use, and never while
        torch transforms the model, because the comparison would become part of the result."""
        steps, is_reported = self._machine.replica.steps, f"the app {use} the weights on" in self._reported
        if self._ahead <= 0 or self._compared.get(use) == steps or self._host_has_loaded or is_reported:
            return False
        is_transforming = (
            torch.jit.is_tracing()  # type: ignore[no-untyped-call]  # torch gives it no types
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._len_torch_dispatch_stack() > 0
        )
        if is_transforming or not current().trains or not is_called_by_app():
            return False
        self._compared[use] = steps
        if self._host_trains or any(type(now.data) is not Tensor or now.is_meta for _, now in self._parameters()):
            return False  # other tensors are in their place for now
        return self._digests() == self._weights

    def _compare_requires_grad(self) -> None:
        now = {path: parameter.requires_grad for path, parameter in self._parameters()}
        if changed := [path for path, trains in now.items() if self._requires_grad.get(path, trains) != trains]:
            trains = now[changed[0]]
            what = f"requires_grad of {first_of(changed, 1)} is {trains} now, and still {not trains} on the device"
            remedy = "set it where the model is made, and compile the app again: a PEF contains what is trained"
            self._report("AP05", "requires_grad", what, remedy)

    def _compare_weights(self) -> None:
        if self._host_trains or "weights" in self._reported:
            return
        now = self._digests()
        if changed := [path for path, digest in now.items() if self._weights.get(path, digest) != digest]:
            what = f"the app has changed weights of the model, first {changed[0]}, and the device keeps its own"
            self._report("AP05", "weights", what, "samba.session.to_device(model), or load weights before trace_graph")

    def _note_host_step(self, optimizer: Optimizer, *_: object) -> None:
        # Without gradients on the host, its optimizer.step() changes nothing.
        self._host_trains |= any(
            parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
        )

    def _note_loading(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        # State that was just fetched is on the device already.
        self._state_is_new |= not same(state_dict["state"], optimizer.state_dict()["state"])

    def _report_behind(self, use: str, when: str) -> None:
        what = f"{use} the host, and the device has trained for {counted(self._ahead, 'step')} since"
        self._report("AP06", use, what, f"samba.session.to_cpu(model) {when}")

    def _report_backwards(self) -> None:
        what = f"the device has run {counted(self._backwards, 'backward')} and no optimizer step, so nothing is trained"
        remedy = 'add "OPT" to section_types, or leave section_types out: an optimizer.step() on the host has no effect'
        if current().trains and not self._machine.replica.steps:
            self._report("AP07", "AP07", what, remedy)

    def _report(self, code: Code, subject: str, what: str, remedy: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            report_here(code, what, remedy)

    def _digests(self) -> Mapping[str, str]:
        """By path, a digest of each parameter that is on the device too."""
        on_device = {path for symbol in self._machine.program.symbols.values() for path in symbol.torch_names}
        return {path: tensor_sha256(parameter.detach()) for path, parameter in self._parameters() if path in on_device}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((held.name, held.tensor) for held in held_by(self.model) if held.is_parameter)


def _changed_by(machine: Machine) -> Iterator[nn.Module]:
    """The modules that hold, directly or below, a parameter that the device trains or a buffer that it changes."""
    program = machine.program
    changed = {member.parameter for group in program.groups for member in group.members}
    if program.training is not None:
        outputs = {output.symbol for output in program.training.outputs}
        changed |= {name for name in outputs if program.symbols[name].kind is SymbolKind.BUFFER}
    names = {name for symbol in changed for name in program.symbols[symbol].torch_names}
    tensors = {id(held.tensor) for held in held_by(machine.model) if not names.isdisjoint(held.names)}
    for module in machine.model.modules():
        if any(id(tensor) in tensors for tensor in (*module.parameters(), *module.buffers())):
            yield module


_hosts: "MutableMapping[nn.Module, weakref.ref[Host]]" = WeakIdKeyDictionary()
"""By module that the device changes. The module itself gets a hook and nothing else."""


def _watch(host: Host, modules: Iterable[nn.Module]) -> None:
    """Tells `host`, as long as it exists, what the app does with `modules` of its model."""
    modules = list(modules)
    # With hooks, torch leaves its fast path for these layers.
    fast = {id(part) for layer in modules if isinstance(layer, nn.TransformerEncoderLayer) for part in layer.modules()}
    for module in modules:
        _hosts[module] = weakref.ref(host)
        if id(module) not in fast:
            weakref.finalize(host, module.register_forward_pre_hook(_note_forward).remove)
    _replace_functions()


def _of(modules: Iterable[nn.Module]) -> set[Host]:
    return {host for module in modules if module in _hosts and (host := _hosts[module]()) is not None}


@cache
def _replace_functions() -> None:
    for owner, name, watched in (
        # Apps call methods of torch's class.
        (nn.Module, "state_dict", _watched_method),
        (nn.Module, "load_state_dict", _watched_method),
        # `torch.save` and `torch.jit.script` call these by their names in the module, however the app imports them.
        (serialization, "_save", partial(_without_hooks, saves=True)),
        (serialization, "_legacy_save", partial(_without_hooks, saves=True)),
        (_recursive, "create_script_module", partial(_without_hooks, saves=False)),
    ):
        setattr(owner, name, watched(getattr(owner, name)))
    # The app may have imported these before, under any name. Each is a wrapper that holds the real function in a
    # closure cell; replacing the cell reaches all names.
    for name in _BOUNDS:
        (cell,) = getattr(clip_grad, name).__closure__
        cell.cell_contents = _watched_clipping(name, cell.cell_contents)


def _note_forward(module: nn.Module, _: object) -> None:
    """The hook of each module: a function, so that the model can be copied and pickled."""
    if is_tracing():
        return
    for host in _of([module]):
        # In training mode with gradients, a training step on the host may begin.
        if not (host.model.training and torch.is_grad_enabled()):
            host.note_read("computes with")


def _watched_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        result = original(module, *args, **keywords)
        for host in _of([module]):
            if host.model is module and original.__name__ == "load_state_dict":
                host.note_load()
            # Tracers read with a prefix, or keep the variables.
            elif host.model is module and not (args or keywords.get("prefix") or keywords.get("keep_vars")):
                host.note_read("reads")
        return result

    return method


def _watched_clipping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def clip(*args: Any, **keywords: Any) -> Any:
        try:
            call = signature.bind(*args, **keywords)
        except TypeError:
            return original(*args, **keywords)  # which raises
        parameters = call.arguments["parameters"]
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        call.arguments["parameters"] = listed or parameters  # torch warns of an empty generator
        for host in _of(list(_hosts)):
            host.note_clipping(name, listed, call.arguments)
        return original(*call.args, **call.kwargs)

    return clip


def _without_hooks(original: Callable[..., Any], *, saves: bool) -> Callable[..., Any]:
    """`original`, for modules without our hooks: TorchScript would compile them, and a file would need sambasim."""

    @wraps(original)
    def call(owner: object, *args: Any, **keywords: Any) -> Any:
        # A module, or a checkpoint that holds modules beside other things.
        parts = owner.values() if isinstance(owner, Mapping) else owner if isinstance(owner, list | tuple) else [owner]
        modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
        for host in _of(modules if saves else []):
            host.note_read("saves")
        with _hidden_hooks(modules):
            return original(owner, *args, **keywords)

    return call


@contextmanager
def _hidden_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    hooks = [
        (module._forward_pre_hooks, number)
        for module in {id(module): module for module in modules}.values()
        for number, hook in module._forward_pre_hooks.items()
        if hook is _note_forward
    ]
    for of_module, number in hooks:
        of_module.pop(number, None)  # a shallow copy shares the hooks
    try:
        yield
    finally:
        for of_module, number in hooks:
            of_module[number] = _note_forward
