"""The model and its loss as one callable of plain tensors, `(inputs…) -> (loss, outputs…)`. Every output but the loss
is detached: the backward starts from the loss alone. Losses have names, or are the user's."""

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from sambasim.compiler.capture.arguments import left_to_run, parameters_of
from sambasim.compiler.capture.recording import forward_line
from sambasim.compiler.capture.results import by_position, check_one_loss, is_in, named_loss, scalars_in, tensors_in
from sambasim.compiler.capture.tensors import dtype_name
from sambasim.compiler.capture.trial import as_written
from sambasim.data.batches import each_value, flat
from sambasim.data.user_code import load_object, summary, user_line
from sambasim.errors import ModelError, OptionError, SambasimError
from sambasim.options.compile import CompileOptions
from sambasim.options.grammar import ignored_class

Loss = Callable[..., Any]
"""Of what the model returns, the target or several, and by name what a run gives: a mean, or a sum and by what to
divide it; or these in a dict, or before one, with scalars to log."""

LossOfSamples = Callable[[Any, Tensor], Tensor]

NAMED_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "cross_entropy": functional.cross_entropy, "nll": functional.nll_loss, "mse": functional.mse_loss,
    "l1": functional.l1_loss, "smooth_l1": functional.smooth_l1_loss, "huber": functional.huber_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits, "kl_div": functional.kl_div,
}  # fmt: skip


def named_losses(name: str, args: Mapping[str, object], *, counts: bool = False) -> tuple[Loss, LossOfSamples | None]:
    """`loss(result, target)` of a batch, the mean over counted elements (for kl_div the sum), or if it `counts` the sum
    and their count; and for evaluation of each of its samples, float[batch]: the mean, or of classes the sum. A named
    loss of torch takes the first output; the callable at `module:name` takes what the model returns, and gives no loss
    per sample. Raises OptionError for other names."""
    if ":" in name:
        loaded = load_object(name, "loss")
        if isinstance(loaded, type):
            loaded, args = loaded(**args), {}
        if not callable(loaded):
            raise ModelError(f"the loss {name} is not callable")
        of_users = partial(loaded, **args)  # no module, which would be one of the step
        vars(of_users)["of_user"] = loaded
        return of_users, None
    if name not in NAMED_LOSSES:
        known = ", ".join(NAMED_LOSSES)
        raise OptionError(f"there is no loss called {name!r}", remedy=f"loss.name takes one of {known}")
    weights = {key: torch.tensor(value) for key, value in args.items() if isinstance(value, (list, tuple))}
    function = NAMED_LOSSES[name]
    # kl_div's "mean" divides by elements, and torch itself warns that it is not the divergence; batchmean is.
    reduction = "batchmean" if name == "kl_div" else "mean"

    def called(result: object, target: Tensor, reduction: str) -> Tensor:
        outputs: Tensor = first_tensor(result)
        tensors = {key: weight.to(outputs.dtype) for key, weight in weights.items()}
        return function(outputs, target, reduction=reduction, **{**args, **tensors})

    def by_sample(result: object, target: Tensor) -> Tensor:
        elements = called(result, target, "none").reshape(len(target), -1)
        is_sum = name == "kl_div" or is_of_classes(name, target)
        return elements.sum(1) if is_sum else elements.mean(1)

    def counted(result: object, target: Tensor) -> tuple[Tensor, Tensor]:
        total = called(result, target, "sum")
        if not is_of_classes(name, target):
            one = first_tensor(result)
            count = len(target) if name == "kl_div" else one.numel() // (one.shape[1] if name == "cross_entropy" else 1)
            return total, total.new_full((), count)
        counts = target.ne(ignored_class(args))
        if "weight" not in weights:
            return total, counts.sum()
        return total, (weights["weight"].to(total.dtype)[target.where(counts, 0)] * counts).sum()

    return counted if counts else (lambda result, target: called(result, target, reduction)), by_sample


def is_of_classes(name: str, target: Tensor) -> bool:
    """Whether the loss called `name` counts elements, by their classes: not all alike."""
    return name in ("cross_entropy", "nll") and not target.is_floating_point()


def first_tensor(result: object) -> Any:
    """The outputs that a loss with a name takes, of all that a model returns."""
    return next(iter(tensors_in(result)), result)


_CASTS = {torch.float32: "float()", torch.float64: "double()", torch.float16: "half()", torch.bfloat16: "bfloat16()"}

Misfit: TypeAlias = tuple[str, str]  # what does not fit, and what to type


def _misfit(error: BaseException) -> Misfit | None:
    """If a loss function of `torch.nn.functional` raised `error`, by what can be seen of its operands."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        given, name = frame.f_locals, frame.f_code.co_name
        outputs, target = given.get("input"), given.get("target")
        if frame.f_globals is vars(nn.functional) and isinstance(outputs, Tensor) and isinstance(target, Tensor):
            if name in ("cross_entropy", "nll_loss", "multi_margin_loss"):
                return _of_classes(name, outputs, target, given.get("ignore_index"))
            return _of_numbers(name, outputs, target)
    return None


def _of_classes(name: str, outputs: Tensor, target: Tensor, ignored: object) -> Misfit | None:
    wanted = (*outputs.shape[:1], *outputs.shape[2:]) if outputs.ndim > 1 else ()
    if target.dtype not in (torch.int64, torch.uint8):
        if target.is_floating_point() and target.shape == outputs.shape:
            return None  # probabilities
        either = f", or probabilities of shape {list(outputs.shape)}" if target.is_floating_point() else ""
        return f"target is {dtype_name(target)}, and {name} needs int64{either}", "y.long()"
    if target.shape != wanted:
        remedy = "give each sample one class"
        if target.numel() == prod(wanted):
            remedy = f"y.reshape({_as_batch(wanted)})"
        elif target.shape == outputs.shape[:-1]:
            remedy = "outputs.movedim(-1, 1), as classes are the second axis of outputs"
        shapes = f"the outputs have {list(outputs.shape)}, classes second, so {name} needs {list(wanted)}"
        return f"target has shape {list(target.shape)}; {shapes}", remedy
    if isinstance(target, FakeTensor):
        return None
    classes, counted = outputs.shape[min(outputs.ndim - 1, 1)], target[target != ignored]
    if not counted.numel() or (counted.min() >= 0 and counted.max() < classes):
        return None
    low, high = int(counted.min()), int(counted.max())
    remedy = f"labels from 0 to {classes - 1}, or a model with {high + 1} outputs"
    if low > 0 and high == classes:
        remedy = f"y - {low}, or a model with {high + 1} outputs"
    elif low < 0:
        remedy = f"labels from 0 to {classes - 1}; those to leave out: torch.nn.CrossEntropyLoss(ignore_index={low})"
    return f"target goes from {low} to {high}, and the model has {classes} classes, 0 to {classes - 1}", remedy


def _of_numbers(name: str, outputs: Tensor, target: Tensor) -> Misfit | None:
    if outputs.dtype is not target.dtype and outputs.dtype in _CASTS:
        return f"target is {dtype_name(target)}, and {name} needs {dtype_name(outputs)}", f"y.{_CASTS[outputs.dtype]}"
    if outputs.shape == target.shape:
        return None
    same = outputs.numel() == target.numel()
    remedy = f"y.reshape({_as_batch(tuple(outputs.shape))})" if same else "give both one shape"
    return f"target has shape {list(target.shape)}, and the outputs {list(outputs.shape)}", remedy


def _as_batch(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, (-1, *shape[1:])))


Losses = Callable[[Sequence[Tensor]], tuple[int, ...]]  # which of a model's outputs are losses


@dataclass(frozen=True, slots=True)
class Fixed:
    """An argument of a model that is no tensor, and the same in every call."""

    value: object


@dataclass(frozen=True, slots=True)
class Whole:
    """An argument of a model that is one for all samples: of input number `index`, which has it for each sample."""

    index: int


class Example(NamedTuple):
    """A batch of inputs by name, and whether the model takes them by name. `arguments`: those of the model, which may
    be dicts, tuples or lists, with positions of inputs in place of tensors, or a Fixed or Whole; None where each input
    is one. `targets`: likewise what a loss takes after the result, of the last inputs, by place or in a dict by its
    parameters; None if it is the last one.
    `of_run`, `of_loss`: the parameters of the model and of the loss that a run gives."""

    inputs: Mapping[str, Tensor]
    by_keyword: bool = False
    arguments: Mapping[str, object] | None = None
    of_run: tuple[str, ...] = ()
    of_loss: tuple[str, ...] = ()
    targets: Sequence[object] | Mapping[str, object] | None = None

    def apart(self, given: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[object], Mapping[str, object]]:
        """The inputs of the model, and the targets, those without and those with names."""
        tensors = given[: len(self.inputs)]
        if self.targets is None:
            return tensors[:-1], tensors[-1:], {}
        targets = each_value(self.targets, lambda at, _: tensors[at])
        rest = tensors[: -sum(1 for _ in flat(targets, ""))]
        return (rest, (), targets) if isinstance(targets, Mapping) else (rest, targets, {})

    def call(self, model: nn.Module, tensors: Sequence[Tensor], of_run: Mapping[str, Tensor] | None = None) -> Any:
        """What `model` returns for `tensors`, in place of as many inputs, and `of_run`."""
        given: Mapping[str, object] = dict(zip([*self.inputs][: len(tensors)], tensors, strict=True))
        if self.arguments is not None:

            def value(at: Any, _: str) -> Any:
                if isinstance(at, Fixed):
                    return at.value
                return tensors[at.index][0] if isinstance(at, Whole) else None if at is None else tensors[at]

            given = each_value(self.arguments, value)
        of_run = of_run or {}
        return model(**given, **of_run) if self.by_keyword else model(*given.values(), **of_run)

    def places(self, model: nn.Module) -> tuple[Sequence[str], Mapping[str, str], Mapping[str, object]]:
        """What the arguments of `forward` are, by their dotted paths: those that a list of arguments gives, and then
        others; the names of inputs, in that order; and the values of all others, and the defaults of arguments that
        are left out, which are constants of a program."""
        names = [*self.inputs]
        called = self.arguments or by_place(model, range(len(names)))
        order = [*dict.fromkeys((*forward_parameters(model), *called))]
        left = (one for one in parameters_of(model) if one.name not in called and one.default is not one.empty)
        constants = {one.name: one.default for one in left}
        inputs: list[tuple[int, int, str]] = []
        for top, value in called.items():
            for path, at in flat(value, top):
                at = at.index if isinstance(at, Whole) else at
                if isinstance(at, int):
                    inputs.append((order.index(top), at, path))
                else:
                    constants[path] = at.value if isinstance(at, Fixed) else None
        return order, {path: names[at] for _, at, path in sorted(inputs)}, constants


class _Step(nn.Module):
    """Takes the inputs of its example, the target of a loss last, and then what a run gives, `of_run`."""

    def __init__(self, model: nn.Module, example: Example, loss: Loss | None) -> None:
        super().__init__()
        self.model, self.loss, self._example = model, loss, example
        self.of_run = tuple(dict.fromkeys((*example.of_run, *example.of_loss)))
        self.counts = False
        """Whether the last call gave a sum and a count in place of a mean: they are the first two outputs."""
        self.logged: Mapping[str, int] = {}
        """By name, the scalars beside the loss in the last call, by their place among the outputs."""

    @property
    def lacks_labels(self) -> bool:
        return "labels" in {one.name for one in parameters_of(self.model)} - self._example.inputs.keys()

    def _named(self, given: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        of_run = dict(zip(self.of_run, given[len(self._example.inputs) :], strict=True))
        return {name: of_run[name] for name in names}

    def _call(self, given: Sequence[Tensor]) -> tuple[object, tuple[Tensor, ...]]:
        inputs = given[: len(self._example.inputs)] if self.loss is None else self._example.apart(given)[0]
        result = self._example.call(self.model, inputs, self._named(given, self._example.of_run))
        tensors = tensors_in(result)
        if not tensors:
            kind = "None" if result is None else f"a {type(result).__name__} without a tensor in it"
            remedy = "return a loss, (loss, outputs…), or outputs with the loss named: --loss cross_entropy"
            raise ModelError(f"the model returns {kind}", where=forward_line(self.model), remedy=remedy)
        return result, tuple(tensors)

    def _loss_first(self, given: Sequence[Tensor]) -> tuple[object, tuple[Tensor, ...]]:
        """What the model returns; and the loss, before its other tensors."""
        result, tensors = self._call(given)
        if self.loss is None:
            named = named_loss(result)
            first = [*named.values()]
            tensors = (*first, *(tensor for tensor in tensors if not is_in(first, tensor)))
            scalars = scalars_in(result)
        else:
            _, by_place, by_name = self._example.apart(given)
            returned = self.loss(result, *by_place, **by_name, **self._named(given, self._example.of_loss))
            named = named_loss(returned)
            first = [*named.values()] or by_position(returned)
            scalars = scalars_in(returned)
            others = [scalar for scalar in scalars.values() if not is_in((*first, *tensors), scalar)]
            tensors = (*first, *others, *tensors)
            scalars = scalars_in(result) | scalars
        self.counts = len(first) == 2
        places = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
        self.logged = {name: places[id(scalar)] for name, scalar in scalars.items() if name not in named}
        return result, tensors


class TrainingStep(_Step):
    """What a training step differentiates. `losses`, of SambaFlow apps: which outputs, kept in order, are losses."""

    def __init__(self, model: nn.Module, example: Example, loss: Loss | None, losses: Losses | None = None) -> None:
        super().__init__(model, example, loss)
        self.losses = losses

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.losses is not None:
            _, tensors = self._call(inputs)
            losses = self.losses(tensors)
            # A backward cannot start from a view of what is returned before it, as a loss of samples may be.
            if len(losses) > 1 or (losses[0] > 0 and tensors[losses[0]].ndim > 0):
                tensors = tuple(tensor.clone() for tensor in tensors)
            return tuple(tensor if index in losses else tensor.detach() for index, tensor in enumerate(tensors))
        result, (loss, *outputs) = self._loss_first(inputs)
        if self.loss is None:
            check_one_loss(result, len(inputs[0]) if inputs[0].ndim else 1)
        return (loss, *(output.detach() for output in outputs))


class EvaluationStep(_Step):
    """`(inputs…) -> (loss, outputs…)` in evaluation mode; with a named loss, one loss for each sample."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        _, outputs = self._loss_first(inputs)
        # A model may turn gradients on, to differentiate in its forward.
        return tuple(output.detach() if output.requires_grad else output for output in outputs)


def both_steps(
    model: nn.Module, example: Example, options: CompileOptions, loss: Loss | None = None, losses: Losses | None = None
) -> tuple[TrainingStep, EvaluationStep]:
    """`loss` replaces that of `options`."""
    named = None if options.inference or loss is not None else options.loss
    counts = named is not None and named.mean_over == "elements"
    mean, by_sample = named_losses(named.name, named.args, counts=counts) if named else (loss, None)
    by_name = example.targets if isinstance(example.targets, Mapping) else {}
    has = {*example.inputs, *by_name, *(named.args if named else ())}
    first = 1 if by_name else 2 if example.targets is None else 1 + len(example.targets)
    example = example._replace(of_loss=left_to_run(mean, options.arguments, has, first) if mean else ())
    return TrainingStep(model, example, mean, losses), EvaluationStep(model, example, by_sample or mean)


def loss_in(outputs: Sequence[Tensor]) -> Tensor:
    """What a TrainingStep differentiates, of its outputs: the first that is not detached, or else the first."""
    return next((output for output in outputs if output.requires_grad), outputs[0])


def forward_parameters(model: nn.Module) -> tuple[str, ...]:
    return tuple(one.name for one in parameters_of(model) if one.kind is not one.KEYWORD_ONLY)


def by_place(model: nn.Module, values: Iterable[Any], skipped: Collection[str] = ()) -> dict[str, Any]:
    """The arguments `values` of `forward`, in order, by its parameters; further ones, for `*args`, as `input_2` …"""
    names = [name for name in forward_parameters(model) if name not in skipped]
    return {names[at] if at < len(names) else f"input_{at}": value for at, value in enumerate(values)}


@contextmanager
def eagerly(step: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """What PyTorch raises where it runs `step` becomes a ModelError with the line, and with what misfits a loss."""
    try:
        with as_written():
            yield
    except SambasimError:
        raise
    except (Exception, SystemExit) as error:
        misfit = _misfit(error)
        if misfit is None and "Found dtype" in str(error) and isinstance(step, TrainingStep) and step.loss is not None:
            # A backward has no frame of the loss.
            misfit = _of_numbers("the loss", next(step.parameters()), inputs[len(step._example.inputs) - 1])
        shapes = ", ".join(f"{dtype_name(tensor)}{list(tensor.shape)}" for tensor in inputs)
        remedy = f"check the model against its inputs, which were {shapes}"
        if "Expected more than 1 value per channel" in str(error):
            remedy = "--set training.batch_size=2, as batch normalization cannot train on one value"
        mode = "" if step.training else ", in evaluation mode"
        what, remedy = misfit or (f"the model does not run on the example batch{mode}: {summary(error)}", remedy)
        raise ModelError(what, where=user_line(error), remedy=remedy) from error
