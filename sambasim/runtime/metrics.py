"""What an evaluation measures beside the mean loss: metrics of torchmetrics by name, and functions of the user.

A metric of torchmetrics is updated with each batch, and the states of the batches are merged in the order of the data,
wherever they were computed: it has the bits of one process that updates it with batch after batch. A function gets the
outputs and targets of all samples, in the order of the data, padded to the longest where lengths differ.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sambasim.data.user_code import guarded, load_function
from sambasim.errors import OptionError
from sambasim.ir.program import Program
from sambasim.ir.ranks import without_loss
from sambasim.ir.types import SymbolKind
from sambasim.options.grammar import ignored_class, is_top_k
from sambasim.options.problem import one_of
from sambasim.options.training import LossOptions

Function: TypeAlias = Callable[..., object]
Targets: TypeAlias = Mapping[str, Tensor]
Outcome: TypeAlias = Mapping[str, Any]
"""Of one batch, by metric: the state of one of torchmetrics, outputs and targets for a function."""

_OF_NUMBERS = {"mae": "MeanAbsoluteError", "mse": "MeanSquaredError", "r2": "R2Score"}
_CLASSES = {"precision": "Precision", "recall": "Recall", "f1": "F1Score", "auroc": "AUROC", "perplexity": "Perplexity"}
_CLASSES |= _OF_NUMBERS
_OF_INDICES = ("cross_entropy", "nll")


def missing(name: str, known: Iterable[str]) -> OptionError:
    what = f"evaluations have no {name}, which is to say which is the best"
    return OptionError(what, remedy=f"--evaluation-metrics {name}, or --keep-best {one_of(dict.fromkeys(known))}")


def has_accuracy(loss: LossOptions | None) -> bool:
    """Whether evaluations with this loss count what is classified correctly."""
    return loss is not None and loss.name in (*_OF_INDICES, "bce_with_logits")


class Metrics:
    """The metrics of `asked`, names and functions with their options, of what `program` computes. `given`: functions by
    name, in place of those in files; `padding`: of targets, by name. Raises OptionError for a metric that cannot be of
    such outputs and targets."""

    def __init__(
        self,
        program: Program,
        asked: Mapping[str, Mapping[str, object]],
        loss: LossOptions | None,
        given: Mapping[str, Function],
        padding: Mapping[str, float],
    ) -> None:
        self._metrics, self._targets = dict[str, _Function | _OfTorchmetrics](), list[str]()
        self._taken: Sequence[str] = ("loss",)
        if not asked:
            return
        types = [program.symbols[output.symbol].type for output in program.evaluation.outputs]
        inputs = {name: program.symbols[name].type for name in program.names_of(SymbolKind.INPUT)}
        others, size = {*range(program.loss_outputs), *program.evaluated.values()}, program.batch_size
        outputs = next((one for at, one in enumerate(types) if at not in others and one.shape[:1] == (size,)), None)
        self._targets = sorted(inputs.keys() - set(without_loss(program).names_of(SymbolKind.INPUT)))
        if outputs is None or not self._targets:
            lacks = "an output for each sample" if outputs is None else "an input that only the loss reads, the targets"
            remedy = "leave out evaluation.metrics, or let forward return its output beside the loss"
            raise OptionError(f"metrics compare outputs and targets, and {program.name} lacks {lacks}", remedy=remedy)
        for name, options in asked.items():
            if ":" in name:
                function = partial(given.get(name) or load_function(name, "metric"), **options)
                self._metrics[name] = _Function(name, function, padding)
            elif len(self._targets) > 1:
                what = f"{name} compares outputs with one target, and the loss has {', '.join(self._targets)}"
                raise OptionError(what, remedy="name a function, which gets all in a dict: file.py:NAME")
            else:
                target = inputs[self._targets[0]]
                zeros = [torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in (outputs, target)]
                with _explained(name, f"outputs {outputs} and targets {target}"):
                    metric = self._metrics[name] = _OfTorchmetrics(name, options, loss, *zeros)
                    _number(name, metric.over([metric.of_batch(zeros[0], {"": zeros[1]})] * 2)[name])

    def check_has(self, name: str, others: Iterable[str]) -> None:
        """Raises OptionError if an evaluation has no number called `name`, of these or `others`, or two of one name. A
        function may give numbers of any names."""
        self._taken = (*others,)
        functions = [one.rpartition(":")[2] for one in self._metrics if ":" in one]
        known = [*self._taken, *(one for one in self._metrics if ":" not in one)]
        if twice := next((one for at, one in enumerate(functions) if one in (*known, *functions[:at])), None):
            what = f"a metric is a function called {twice}, and evaluations have another number of that name"
            raise OptionError(what, remedy="rename the function")
        if name not in known and not functions:
            raise missing(name, known)

    def of_batch(self, outputs: Tensor, batch: Mapping[str, Tensor], count: int) -> Outcome:
        """What is kept of the first `count` samples of a batch."""
        targets = {name: batch[name][:count].clone() for name in self._targets}
        return {name: metric.of_batch(outputs, targets) for name, metric in self._metrics.items()}

    def over(self, batches: Iterable[Outcome]) -> dict[str, float]:
        """The numbers over all `batches`, which are in the order of the data."""
        kept, found = [batch for batch in batches if batch], list[tuple[str, float]]()
        for name, metric in self._metrics.items() if kept else ():
            numbers = metric.over([batch[name] for batch in kept])
            found += [(str(one), _number(name, value)) for one, value in numbers.items()]
        names = [name for name, _ in found]
        if len(names) > len({*names}) or {*names}.difference(self._metrics).intersection(self._taken):
            what = f"two numbers of an evaluation have the same name: {', '.join((*self._taken, *names))}"
            raise OptionError(what, remedy="rename what the functions give")
        return dict(found)


class _Function(NamedTuple):
    name: str
    call: Function
    padding: Mapping[str, float]

    def of_batch(self, outputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        return outputs.clone(), targets

    def over(self, batches: Sequence[tuple[Tensor, Targets]]) -> Mapping[Any, object]:
        def called() -> object:
            outputs = _joined([part for part, _ in batches])
            targets = {
                name: _joined([parts[name] for _, parts in batches], self.padding.get(name, 0))
                for name in batches[0][1]
            }
            return self.call(outputs, targets if len(targets) > 1 else next(iter(targets.values())))

        value = guarded(called, f"the metric {self.name}", OptionError)
        return value if isinstance(value, Mapping) else {self.name.rpartition(":")[2]: value}


def _joined(parts: Sequence[Tensor], value: float = 0) -> Tensor:
    """Samples side by side, the shorter ones padded with `value`."""
    longest = (*map(max, zip(*(part.shape[1:] for part in parts), strict=True)),)
    if all(part.shape[1:] == longest for part in parts):
        return torch.cat([*parts])
    whole, at = parts[0].new_full((sum(map(len, parts)), *longest), value), 0
    for part in parts:
        whole[slice(at, at := at + len(part)), *map(slice, part.shape[1:])] = part
    return whole


class _OfTorchmetrics:
    """The metric `name` of such an `output` and `target`. Raises ValueError if there is none."""

    def __init__(
        self, name: str, options: Mapping[str, object], loss: LossOptions | None, output: Tensor, target: Tensor
    ) -> None:
        import torchmetrics.text

        self._name, (self._loss, args) = name, ("", {}) if loss is None else (loss.name, loss.args)
        is_last = self._loss not in _OF_INDICES and output.shape[:-1] == target.shape
        self._dim = output.ndim - 1 if is_last else 1
        classes = output.shape[self._dim] if output.ndim > 1 else 1
        are_indices = output.ndim == target.ndim + 1 and not target.is_floating_point() and classes > 1
        needs_indices = name == "perplexity" or is_top_k(name) or self._loss in (*_OF_INDICES, "kl_div")
        if needs_indices and not are_indices and name not in _OF_NUMBERS:
            raise ValueError("targets are no class indices")
        self._task = "multiclass" if are_indices else "multilabel" if classes > 1 else "binary"
        counts = are_indices and (name == "accuracy" or is_top_k(name))
        ignored = {"ignore_index": ignored_class(args)} if are_indices else {}
        of_task = {"task": self._task, "num_classes": classes, "num_labels": classes, **ignored}
        of_task |= {"average": "micro" if counts else "macro", **({"top_k": int(name[3:])} if is_top_k(name) else {})}
        own = {} if name in _OF_NUMBERS else ignored if name == "perplexity" else of_task
        library = torchmetrics.text if name == "perplexity" else torchmetrics
        made = getattr(library, _CLASSES.get(name, "Accuracy"))
        self._metric: Any = made(**{**own, **options, "sync_on_compute": False})

    def _seen(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """As torchmetrics takes them: a row for each element that has a class, or labels."""
        output = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        if self._name in _OF_NUMBERS:
            return output, target
        if self._task == "multiclass":
            output, target = output.movedim(self._dim, -1).flatten(0, -2), target.flatten()
            if self._name == "auroc" and self._loss in _OF_INDICES:
                output = output.softmax(1)  # torchmetrics does it only for a batch with a number outside of 0 to 1
            return (output[None], target[None]) if self._name == "perplexity" else (output, target)
        target = target.gt(0.5).long()
        output = output.sigmoid() if self._loss == "bce_with_logits" else output
        return (output.flatten(), target.flatten()) if self._task == "binary" else (output, target)

    def of_batch(self, outputs: Tensor, targets: Targets) -> dict[str, Any]:
        """The state after this batch alone."""
        with _explained(self._name, "this batch"):
            self._metric.reset()
            self._metric.update(*self._seen(outputs, *targets.values()))
            return copy.deepcopy(self._metric.metric_state)

    def over(self, batches: Sequence[Mapping[str, Any]]) -> Mapping[Any, object]:
        with _explained(self._name, "these samples"):
            self._metric.reset()
            for state in batches:
                self._metric.merge_state(dict(state))
            return {self._name: self._metric.compute()}


def _number(name: str, value: Any) -> float:
    with suppress(TypeError, ValueError, RuntimeError):  # the last of a tensor of several
        return float(value)
    what = f"{value.numel()} numbers" if isinstance(value, Tensor) else type(value).__name__
    raise OptionError(f"the metric {name} gives {what}", remedy="it must give a number, or a dict of numbers")


@contextmanager
def _explained(name: str, of_what: str) -> Iterator[None]:
    """An exception of torchmetrics becomes OptionError; its warnings about how it is used are for others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as error:
        what = f"metrics by name need the package {error.name}, which is not installed"
        raise OptionError(what, remedy="pip install 'sambasim[train]'") from None
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        what = f"torchmetrics cannot measure {name} of {of_what}: {' '.join(str(error).split())}"
        remedy = f"leave it out, correct evaluation.metrics.{name}, or name a function: file.py:NAME"
        raise OptionError(what, remedy=remedy) from error
