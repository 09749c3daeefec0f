"""Values of tensors by which Python decides, and which a capture may take from the example batch: those that libraries
ask for, and branches that only raise or warn. The graph checks in each step that they are the same."""

import ast
import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.compiler.capture.explain import Obstacle, Occurrence, all_occurrences
from sambasim.compiler.capture.recording import Recording, frames, line_of, mark_line, running_line
from sambasim.compiler.capture.trial import Attributes, with_values
from sambasim.errors import CaptureError
from sambasim.whose_code import is_library_file, is_package_file, is_users_file, torch_folder

_TORCH = torch_folder()
_REPORTS = {"warn", "warning", "warning_once", "warn_once", "print", "debug", "info", "error", "exception", "critical"}
_OTHER_WAY = "a branch of forward() goes another way than for the example batch"
_OTHER_VALUE = "forward() computes with a number, or a count of elements, that is another than for the example batch"
_ADAPTIVE = f"{_TORCH}nn/modules/adaptive.py"
_UNTRACED = (Tensor, nn.Parameter)
_DRAWS = 1000  # so often is a comparison with a random number repeated, to see whether it always has one result

_TRIED = Obstacle(
    "an error that values cause, and after which forward() goes on",
    "choose by what says whether it fails: inverse, info = torch.linalg.inv_ex(a); torch.where(info == 0, inverse, b)",
)


Asks: TypeAlias = Literal["branch", "number", "places", "selection"]
"""What a call asks of the values of a tensor; the last two: which elements are not zero, and those of a mask."""


class _Answer(NamedTuple):
    """`said`: what is wrong if it is another, None if nothing is; `place`: the file and line that asked."""

    value: int | list[Any]
    said: str | None
    place: tuple[str, int] | None


class Asked(TorchFunctionMode):
    """Around one eager call: records what is asked of values. `refused`: the user's own code asks, other than in a
    branch that only raises or warns. `result`: the digest of what the call gives first. `changed`: the labels of what
    calls change. `names`: by id, of tensors that are none of the model's. Raises CaptureError for a branch on random
    numbers."""

    def __init__(self, recording: Recording | None = None) -> None:
        super().__init__()
        self.recording, self.result = recording or Recording({}), ""
        self.answers: list[_Answer] = []
        self.changed: Set[str] = frozenset()
        self.names: Mapping[int, str] = {}
        self._refused: list[tuple[frozenset[str] | None, CaptureError]] = []
        self._drawn: dict[int, tuple[Tensor, Callable[[], Any]]] = {}  # what depends on random numbers alone

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _as_traced(func, args, kwargs or {})
        is_known = [self._answer("number", size, int(size)) for size in _sizes(func, args)]
        begin = len(self.recording.ops)
        self.recording.function = f"{_name(func)}/{len(args) + len(kwargs)}"
        result = func(*args, **kwargs)
        self.recording.function = ""
        asks = _asked(func, args)
        if asks is None:
            self._remember(func, args, kwargs, result)
        elif asks in ("branch", "number"):
            is_known.append(self._answer(asks, args[0], result if isinstance(result, list) else int(result)))
        else:
            mask = args[asks == "selection"]
            is_known.append(self._answer(asks, mask, int(mask.count_nonzero())))
        if is_known and all(is_known):
            self.recording.know(begin)
        return result

    def _answer(self, asks: Asks, asked: Tensor, answer: int | list[Any]) -> bool:
        """Whether a capture may take `answer`."""
        place, is_known = _asker(), True
        if id(asked) in self._drawn and not self._is_constant(asked):
            raise CaptureError(
                "a branch on random numbers, such as a layer that is dropped, cannot be captured",
                where=str(running_line() or ""),
                remedy="never drop layers: layerdrop=0 in the config of a model of transformers; in a model of your "
                "own, drop by a factor: x + keep * layer(x), with keep = torch.bernoulli(…)",
            )
        said: str | None = _OTHER_VALUE
        try:
            said = _said(place, asks)
        except CaptureError as error:
            is_known = False
            self._refused.append((self.recording.made_of([asked]), error))
        self.answers.append(_Answer(answer, said, place))
        return is_known

    @property
    def refused(self) -> CaptureError | None:
        """Values of buffers that no call changes may be asked for."""
        return next((error for of, error in self._refused if of is None or not of.isdisjoint(self.changed)), None)

    def _is_constant(self, drawn: Tensor) -> bool:
        _, again = self._drawn[id(drawn)]
        with torch.random.fork_rng(devices=[]), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return len({int(again()) for _ in range(_DRAWS)}) == 1

    def _remember(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], made: object) -> None:
        if not isinstance(made, Tensor) or made.numel() != 1:
            return
        tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)]
        is_draw = func in (torch.rand, torch.randn, torch.randint, torch.rand_like)
        if is_draw or (tensors and all(id(tensor) in self._drawn for tensor in tensors)):
            draws = [self._drawn.get(id(argument), (argument, lambda value=argument: value))[1] for argument in args]
            self._drawn[id(made)] = made, lambda: func(*(draw() for draw in draws), **kwargs)


class LinesMarked(TorchFunctionMode):
    """Marks what is traced with the user's line."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        mark_line()
        return func(*args, **(kwargs or {}))


class Followed(TorchFunctionMode):
    """Around a trace of `step`: each question has the answer that was recorded, and an assertion says so. Tensors that
    are none of the model's are constants. Marks what is traced with the user's line."""

    def __init__(self, asked: Asked, step: nn.Module, attributes: Attributes) -> None:
        super().__init__()
        self._answers, self._next = asked.answers, 0
        self._step, self._attributes, self._is_running, self._asked = step, attributes, False, asked
        self._detached: dict[int, Tensor] = {}
        self._paths = {id(tensor): path for path, tensor in (*step.named_parameters(), *step.named_buffers())}
        self._hooks = (
            step.register_forward_pre_hook(lambda *given: self._begin()),
            step.register_forward_hook(lambda *given: setattr(self, "_is_running", False), always_call=True),
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_running and torch._C._current_graph_task_id() < 0:  # torch prepares the trace
            mark_line(is_users=False)
            return func(*args, **(kwargs or {}))
        args, kwargs = _as_traced(func, args, kwargs or {})
        if any(type(leaf) in _UNTRACED for leaf in tree_leaves((args, kwargs))):
            mark_line()  # of the constants too
            args, kwargs = tree_map(self._as_constant, (args, kwargs), is_leaf=_is_size)
        elif _name(func) == "__get__":  # an attribute, such as the shape
            return func(*args)
        mark_line()
        if sizes := {id(size): self._number(size) for size in _sizes(func, args)}:
            args = tree_map(lambda leaf: sizes.get(id(leaf), leaf), args, is_leaf=_is_size)
        match _asked(func, args):
            case "branch":
                way, said, _ = self._answer()
                if said is not None:
                    torch._assert_async(args[0] if way else args[0].logical_not(), said)
                return bool(way)
            case "number":
                return self._number(args[0])
            case "selection":
                return args[0][self._places(args[1]).unbind(1)]
            case "places":
                places = self._places(args[0])
                return places.unbind(1) if func is torch.where or kwargs.get("as_tuple") else places
        return func(*args, **kwargs)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        """The trace runs the step more than once: each time it begins with what the model had."""
        self._attributes.begin()
        self._is_running = True

    def _as_constant(self, value: Any) -> Any:
        """`value`, or the traced constant for a tensor that the trace knows nothing of, such as a global. Raises
        CaptureError for those that may change from step to step."""
        if not self._is_running or type(value) not in _UNTRACED:
            return value
        if torch._is_functional_tensor(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return value
        if id(value) in self._paths:  # it is read from a list, say, and not from its module
            return attrgetter(self._paths[id(value)])(self._step)
        if value.requires_grad and not value.is_leaf:
            what = "a tensor with a gradient that was computed before is read: the graph would not see it change"
            remedy = "compute it in forward(), or keep it detached in a buffer"
            raise CaptureError(what, where=str(running_line() or ""), remedy=remedy)
        with torch._C.DisableTorchFunction():
            is_parameter = isinstance(value, nn.Parameter)  # frozen ones too, which fake tensors do not take
            return torch.ops.aten.lift_fresh.default(
                self._without_gradient(value) if value.requires_grad or is_parameter else value
            )

    def _without_gradient(self, leaf: Tensor) -> Tensor:
        """The same tensor each time, with the name of `leaf`."""
        if id(leaf) not in self._detached:
            with torch._C._DisableTorchDispatch():
                detached = self._detached[id(leaf)] = leaf.detach()
            self._asked.names = {**self._asked.names, id(detached): self._asked.names.get(id(leaf), "foreign")}
        return self._detached[id(leaf)]

    def _answer(self) -> _Answer:
        """The next one. Raises CaptureError if another line asks than did before."""
        answer = self._answers[self._next % len(self._answers)] if self._answers else None  # the step runs repeatedly
        self._next += 1
        if answer is None or answer.place != _asker():
            what = "forward() asks for other values of tensors each time"
            remedy = "let each call ask for the same values, or keep them tensors: leave out .item() and int()"
            raise CaptureError(what, where=str(running_line() or ""), remedy=remedy)
        return answer

    def _number(self, asked: Tensor) -> Any:
        answer = self._answer().value
        is_same = (asked == torch.tensor(answer)).all() if isinstance(answer, list) else asked == answer
        torch._assert_async(is_same, _OTHER_VALUE)
        return answer

    def _places(self, mask: Tensor) -> Tensor:
        return torch.nonzero_static(mask, size=self._number(torch.count_nonzero(mask)))


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _is_size(value: object) -> bool:
    """A torch.Size stays one: Tensor.new() takes a tuple for values."""
    return isinstance(value, torch.Size)


def _as_traced(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, without torch's own generator, from which an operator draws if none is given, and with a condition
    that is none of bytes, which torch's kernels take, and its tracers do not."""
    kwargs = {key: value for key, value in kwargs.items() if value is not torch.default_generator}
    place = 1 if func is Tensor.where else 0
    if func in (torch.where, Tensor.where) and len(args) > 1 and args[place].dtype is torch.uint8:
        args = (*args[:place], args[place].bool(), *args[place + 1 :])
    return args, kwargs


def _asked(func: Callable[..., Any], args: tuple[Any, ...]) -> Asks | None:
    name = _name(func)
    if name not in _NAMES or not args or not isinstance(args[0], Tensor):
        return None
    if name in ("nonzero", "where"):
        return "places" if len(args) == 1 else None
    if name == "__getitem__":
        return "selection" if isinstance(args[1], Tensor) and args[1].dtype is torch.bool else None
    if args[0].dtype is torch.bool:
        return "branch" if name in ("__bool__", "item") else None
    is_integer = not args[0].is_floating_point() and not args[0].is_complex()
    return "number" if is_integer and name != "__bool__" else None


def _sizes(func: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Tensor]:
    """The tensors that `func` takes for sizes, which are numbers."""
    leaves = tree_leaves(args[_SIZES[_name(func)]]) if _name(func) in _SIZES else ()
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 0 and not leaf.is_floating_point()]


_SIZES = {
    **dict.fromkeys(("arange", "zeros", "ones"), slice(None)),
    **dict.fromkeys(("view", "reshape", "expand", "repeat", "narrow", "as_strided"), slice(1, None)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty"), slice(1, None)),
    **{"full": slice(1), "new_full": slice(1, 2)},
}
"""By function, which of its arguments are sizes."""

_NAMES = ("__bool__", "item", "__int__", "__index__", "tolist", "nonzero", "where", "__getitem__")


def _asker() -> tuple[str, int] | None:
    """The file and line that ask for a value: the user's, or of torch.nn and torch.distributions."""
    places = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames())
    return next((place for place in places if _may_ask(place[0])), None)


@cache
def _may_ask(file: str) -> bool:
    return file.startswith((f"{_TORCH}nn/", f"{_TORCH}distributions/")) or not is_library_file(file)


def _said(place: tuple[str, int] | None, asks: Asks) -> str | None:
    """What is wrong if the answer at `place` is another. Raises CaptureError if the user's code decides by it."""
    if place is None:
        return _OTHER_WAY
    file, line = place
    if file == _ADAPTIVE:
        what = "AdaptiveLogSoftmaxWithLoss, which selects samples by their labels: sizes depend on values"
        remedy = "the loss over all classes: functional.nll_loss(self.softmax.log_prob(x), target)"
        raise CaptureError(what, where=str(running_line() or ""), remedy=remedy)
    for node in _syntax_nodes(file) if asks == "branch" else ():
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or line):
            refuse_tried(AssertionError)
            return str(node.msg.value) if isinstance(node.msg, ast.Constant) else ast.unparse(node)
        is_test = isinstance(node, ast.If) and node.test.lineno <= line <= (node.test.end_lineno or line)
        if is_test and isinstance(node, ast.If) and not node.orelse and _only_reports(node, _syntax_nodes(file)):
            return ast.unparse(node.body[-1]) if isinstance(node.body[-1], ast.Raise) else None
    if is_library_file(file) or is_package_file(file):
        return _OTHER_WAY
    raise CaptureError("the values of a tensor decide", where=line_of(file, line))


def refuse_tried(kind: type[Exception]) -> None:
    """Raises CaptureError if the user's code catches an error of this kind, and goes on."""
    caught = {error.__name__.removeprefix("_") for error in kind.__mro__}
    for frame in frames():
        file, line = frame.f_code.co_filename, frame.f_lineno
        for node in _syntax_nodes(file) if is_users_file(file) else ():
            if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line):
                for handler in node.handlers:
                    names = re.findall(r"\w+", "Exception" if handler.type is None else ast.unparse(handler.type))
                    if not (caught.isdisjoint(names) or isinstance(handler.body[-1], ast.Raise)):
                        raise all_occurrences([Occurrence(_TRIED, line_of(file, line))], training=True)


@cache
def _syntax_nodes(file: str) -> Iterable[ast.AST]:
    try:
        return tuple(ast.walk(ast.parse(Path(file).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return ()


def _only_reports(branch: ast.If, nodes: Iterable[ast.AST]) -> bool:
    """Whether the branch raises, or only says something: what it computes for that is read nowhere else."""
    if not all(map(_reports, branch.body)):
        return False
    inside = {id(node) for node in ast.walk(branch)}
    named = {node.id for node in ast.walk(branch) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    read = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return not any(node.id in named and id(node) not in inside for node in read)


def _reports(statement: ast.stmt) -> bool:
    match statement:
        case ast.Raise() | ast.AugAssign(target=ast.Name()):
            return True
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Name) for target in targets)
        case ast.If(body=body, orelse=orelse):
            return all(map(_reports, (*body, *orelse)))
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in _REPORTS
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=name))):
            # Of `warnings` or a logger: other objects may do more by such a name.
            called = ast.unparse(owner).lower()
            return name in _REPORTS and ("log" in called or called == "warnings")
    return False


def _has_own(*values: object) -> bool:
    """Whether an operand is of a subclass of Tensor with operators of its own: a mode does not count."""
    return torch._C._is_torch_function_enabled() and any(
        isinstance(leaf, Tensor)
        and type(leaf).__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
        for leaf in tree_leaves(values)
    )


def modes_reach_inside() -> contextlib.AbstractContextManager[None]:
    """Functions of torch that are written in Python, such as `torch.nn.functional.gaussian_nll_loss`, call torch's
    operators one by one, where a mode would otherwise see only the function, and nothing inside of it."""
    asking = (torch.overrides, torch.functional, torch.nn.functional, torch._tensor, torch._lowrank)
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    places = [(module, name) for module, name in itertools.product(asking, names) if hasattr(module, name)]
    return with_values([(FunctionalTensor, "tolist", Tensor.tolist), *((*place, _has_own) for place in places)])
