"""What a capture would lose silently: state that forward() assigns, gradient hooks, and backwards of the user's own."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from sambasim.compiler.calls import Calls, draws_of_python
from sambasim.compiler.explain import Finding, Obstacle, all_findings, user_frame, where_of
from sambasim.compiler.names import is_library_file
from sambasim.compiler.step import loss_in
from sambasim.compiler.tensors import NO_HOOK
from sambasim.compiler.trial import cloned, replaced, trial

_ASSIGNED = Obstacle(
    "state that forward() keeps by assignment, from one call to the next",
    'keep it in a buffer, self.register_buffer("ema", torch.zeros(())), and change that in place: self.ema.copy_(…)',
)
_HOOK = Obstacle("a gradient hook, which a graph does not call", NO_HOOK)
_SAVED = Obstacle("hooks on the tensors that are saved for the backward, which a graph does not call", "leave them out")
_NO_ZEROS = Obstacle(
    "set_materialize_grads(False), where a graph has zeros", "leave it out: an unused output has a gradient of zeros"
)
_CHECKPOINTED = Obstacle(
    "activation checkpointing that changes results: use_reentrant=True of inputs without a gradient, or "
    "preserve_rng_state=False",
    "use_reentrant=False, and leave out preserve_rng_state",
)
_SEEDED = Obstacle(
    "a seed or a state of the generator of random numbers, which a graph does not set",
    "draw the numbers once, and keep them in a buffer: self.register_buffer(name, torch.randn(…))",
)
_VERSION = Obstacle(
    "_version, which counts the changes of a tensor, and stays as it is in a graph",
    'count in a buffer: self.register_buffer("steps", torch.zeros(())), and self.steps.add_(1)',
)
_INFERENCE_MODE = Obstacle("torch.inference_mode(), through which a graph would send gradients", "torch.no_grad()")
_NO_BACKWARD = "write its forward with PyTorch's own differentiable operators, and leave the backward to autograd"


def refuse_lost_effects(
    step: nn.Module, inputs: Sequence[Tensor], *, fake: bool = True, keeps_backwards: bool = True
) -> bool:
    """Raises CaptureError if a capture would lose something that a call of `step` does. Returns False if the call
    failed, as fake tensors have no values. `keeps_backwards`: a capture keeps backwards of the user's own."""
    findings = lost_effects(step, inputs, fake=fake, keeps_backwards=keeps_backwards)
    if findings:
        raise all_findings(findings, step.training)
    return findings is not None


def lost_effects(
    step: nn.Module, inputs: Sequence[Tensor], *, fake: bool = True, keeps_backwards: bool = True
) -> Sequence[Finding] | None:
    """What `step` does in its mode that a capture would lose silently; with `fake`, nothing is computed. The model, the
    inputs and the random generators are left as they are. Returns None if the call fails."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    convert: Callable[[Tensor], Tensor] = mode.from_tensor if mode else cloned
    effects, calls = _Effects(step.training, keeps_backwards), Calls(fake=fake)

    def call() -> None:
        given = [convert(tensor.clone()) for tensor in inputs]  # of each call its own, which no other may read
        calls.begin(given)
        with mode or contextlib.nullcontext(), calls:
            outputs = step(*given)
            wanted = [one for one in step.parameters() if one.requires_grad] if step.training else []
            if wanted and any(output.requires_grad for output in outputs):
                with contextlib.suppress(Exception):  # a capture says what is wrong with a backward
                    torch.autograd.grad(loss_in(outputs).sum(), wanted, allow_unused=True)

    try:
        with trial(step, convert), effects.recorded():
            with draws_of_python(effects.findings):
                call()
            for _ in range(2):  # what the first call alone does may fill a cache
                if calls.finding is not None:
                    effects.next_call()
                    call()
            effects.findings += calls.of_generators
            if calls.finding is not None and not effects.findings:
                effects.findings.append(calls.finding)
            if effects.written and step.training:
                effects.next_call(only_written=True)
                step.eval()
                call()
    except (Exception, SystemExit):
        return effects.findings or None
    return effects.findings


_REFUSED_BY_NAME = ("torch.utils.checkpoint", "torch._library.autograd")
"""Modules of torch's own Functions for checkpointing and users' operators, which capture and translation refuse."""


class _Effects:
    """Records what modules are assigned, and what else a graph would lose. A number or tensor is state if a call reads
    it before it assigns it; a buffer that a state_dict holds is state in any case."""

    def __init__(self, training: bool, keeps_backwards: bool) -> None:
        self.findings: list[Finding] = []
        self.written: dict[tuple[int, str], str] = {}
        self._training = training
        self._keeps_backwards = keeps_backwards
        self._touched: set[tuple[int, str]] = set()
        self._read: set[tuple[int, str]] = set()
        self._only_written = False

    def next_call(self, *, only_written: bool = False) -> None:
        """Another call of the model begins. With `only_written`, it must not read what the call before wrote."""
        self._touched.clear()
        self._read.clear()
        if not only_written:
            self.written.clear()  # what a second call does not write again is a cache, which every call may read
        self._only_written = only_written

    def _find(self, obstacle: Obstacle, where: str) -> None:
        finding = Finding(obstacle, where)
        if finding not in self.findings:
            self.findings.append(finding)

    def _reads(self, module: nn.Module, name: str) -> None:
        key = id(module), name
        if key not in self._touched:
            self._touched.add(key)
            self._read.add(key)
            if self._only_written and key in self.written:
                self._find(_ASSIGNED, self.written[key])

    def _writes(self, module: nn.Module, name: str, value: object) -> None:
        key = id(module), name
        state = vars(module)
        buffers, parameters = state.get("_buffers", {}), state.get("_parameters", {})
        old = next((place[name] for place in (parameters, buffers, state) if name in place), None)
        self._touched.add(key)
        frame = user_frame()
        if frame is None or old is value or not (_is_state(old) or _is_state(value)):
            return
        if not isinstance(old, Tensor) and not isinstance(value, Tensor) and old == value:
            return
        self.written.setdefault(key, where_of(frame))
        kept = name in parameters or (name in buffers and name not in state["_non_persistent_buffers_set"])
        if kept or (key in self._read and _is_state(old)):
            self._find(_ASSIGNED, where_of(frame))

    def _calls(self, obstacle: Obstacle) -> None:
        if self._training and not self._only_written:
            self._find_here(obstacle)

    def _find_here(self, obstacle: Obstacle) -> None:
        frame = user_frame()
        if frame is not None:
            self._find(obstacle, where_of(frame))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the attributes of all modules, calls of autograd Functions, and gradient hooks."""
        set_attribute, get_attribute = nn.Module.__setattr__, nn.Module.__getattribute__
        apply = torch.autograd.Function.__dict__["apply"]

        def assigned(module: nn.Module, name: str, value: Any) -> None:
            self._writes(module, name, value)
            set_attribute(module, name, value)

        def read(module: nn.Module, name: str) -> object:
            if not name.startswith("__"):
                self._reads(module, name)
            return get_attribute(module, name)

        def applied(cls: type, *args: Any, **kwargs: Any) -> object:
            if cls is CheckpointFunction:
                needs = any(isinstance(one, Tensor) and one.requires_grad for one in args[2:])
                if not (needs and args[1]):
                    self._calls(_CHECKPOINTED)
            if not self._keeps_backwards and cls.__module__ not in _REFUSED_BY_NAME:
                what = f"the backward of {cls.__qualname__}, a torch.autograd.Function, with --dtype bf16 or fp16"
                self._calls(Obstacle(what, _NO_BACKWARD))
            return apply.__func__(cls, *args, **kwargs)

        enter = torch.inference_mode.__enter__

        def entered(block: torch.inference_mode) -> None:
            if _is_users_block(sys._getframe(1)):
                self._calls(_INFERENCE_MODE)
            enter(block)

        checkpointed = checkpoint._checkpoint_without_reentrant_generator

        def checkpoints(function: Callable[..., object], preserve_rng_state: bool = True, *args: Any, **kw: Any) -> Any:
            if not preserve_rng_state:
                self._calls(_CHECKPOINTED)
            return checkpointed(function, preserve_rng_state, *args, **kw)

        materialize = FunctionCtx.set_materialize_grads

        def materializes(context: FunctionCtx, value: bool) -> None:
            if not value:
                self._calls(_NO_ZEROS)
            materialize(context, value)

        save = saved_tensors_hooks.__enter__

        def saved(block: saved_tensors_hooks) -> None:
            if _is_users_block(sys._getframe(1)) and not isinstance(block, save_on_cpu):
                self._calls(_SAVED)
            save(block)

        def seeded(set_state: Callable[..., object]) -> Callable[..., object]:
            def called(*args: Any, **kwargs: Any) -> object:
                if _is_users_block(sys._getframe(1)):
                    self._find_here(_SEEDED)
                return set_state(*args, **kwargs)

            return called

        def hooked(register: Callable[..., object]) -> Callable[..., object]:
            def registered(tensor: Tensor, *args: Any, **kwargs: Any) -> object:
                self._calls(_HOOK)
                return register(tensor, *args, **kwargs)

            return registered

        count_of = vars(torch._C.TensorBase)["_version"].__get__

        def counted(tensor: Tensor) -> int:
            if _is_users_block(sys._getframe(1)):
                self._find_here(_VERSION)
            return int(count_of(tensor))

        with contextlib.ExitStack() as stack:
            for owner, name, substitute in (
                (Tensor, "_version", property(counted)),
                (nn.Module, "__setattr__", assigned),
                (nn.Module, "__getattribute__", read),
                (torch.autograd.Function, "apply", classmethod(applied)),
                (torch.inference_mode, "__enter__", entered),
                (saved_tensors_hooks, "__enter__", saved),
                (checkpoint, "_checkpoint_without_reentrant_generator", checkpoints),
                (FunctionCtx, "set_materialize_grads", materializes),
                *((torch, name, seeded(getattr(torch, name))) for name in ("manual_seed", "seed", "set_rng_state")),
                (torch.random, "fork_rng", seeded(torch.random.fork_rng)),
                (Tensor, "register_hook", hooked(Tensor.register_hook)),
                (Tensor, "register_post_accumulate_grad_hook", hooked(Tensor.register_post_accumulate_grad_hook)),
            ):
                stack.enter_context(replaced(owner, name, substitute))
            yield


def _is_users_block(frame: FrameType | None) -> bool:
    """Whether the user's code has entered a block of torch, by `with` or by a decorator; torch enters some itself."""
    while frame is not None and frame.f_code.co_filename == _DECORATORS:
        frame = frame.f_back
    return frame is not None and not is_library_file(frame.f_code.co_filename)


_DECORATORS = torch.utils._contextlib.__file__


def _is_state(value: object) -> bool:
    return isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)
