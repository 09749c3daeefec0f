"""What an evaluation measures beside the mean loss: metrics of torchmetrics by name, and functions of the user.

A metric of torchmetrics is updated with each batch, and the states of the batches are merged in the order of the data,
wherever they were computed: it has the bits of one process that updates it with batch after batch. A function gets the
outputs and targets of all samples, in the order of the data.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sambasim.data.user_code import guarded, load_object
from sambasim.errors import OptionError
from sambasim.ir.program import Program
from sambasim.ir.ranks import without_loss
from sambasim.ir.types import SymbolKind
from sambasim.options.grammar import is_top_k
from sambasim.options.problem import one_of
from sambasim.options.training import LossOptions

Function = Callable[..., object]
Outcome = dict[str, list[Any]]
"""Of one batch or of several: states of metrics of torchmetrics, outputs and targets for functions, by metric."""

_OF_CLASSES = {"accuracy": "Accuracy", "precision": "Precision", "recall": "Recall", "f1": "F1Score", "auroc": "AUROC"}
_OF_NUMBERS = {"mae": "MeanAbsoluteError", "mse": "MeanSquaredError", "r2": "R2Score"}
_IGNORED = -100  # the index that losses of torch ignore by default


def has_accuracy(loss: LossOptions | None) -> bool:
    """Whether evaluations with this loss count what is classified correctly."""
    return loss is not None and loss.name in ("cross_entropy", "nll", "bce_with_logits")


class _Task(NamedTuple):
    """What outputs and targets are: `kind` as torchmetrics calls it, with its arguments; `dim`: of the classes."""

    kind: str
    arguments: dict[str, object]
    dim: int = 1


class Metrics:
    """The metrics of `asked`, names and functions with their options, of what `program` computes. `given`: functions by
    name, in place of those in files. Raises OptionError for a metric that cannot be of such outputs and targets."""

    def __init__(
        self,
        program: Program,
        asked: Mapping[str, Mapping[str, object]],
        loss: LossOptions | None,
        given: Mapping[str, Function],
    ) -> None:
        self._loss, self._functions, self._metrics = loss, dict[str, Function](), dict[str, Any]()
        self._task, self._targets = _Task("Binary", {}), list[str]()
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
                function = given.get(name) or load_object(name, "metric")
                if not callable(function):
                    raise OptionError(f"the metric {name} is of type {type(function).__name__}, which cannot be called")
                self._functions[name] = partial(function, **options)
            elif len(self._targets) > 1:
                what = f"{name} compares outputs with one target, and the loss has {', '.join(self._targets)}"
                raise OptionError(what, remedy="name a function, which gets all in a dict: file.py:NAME")
            else:
                target = inputs[self._targets[0]]
                zeros = [torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in (outputs, target)]
                with _explained(name, f"outputs {outputs} and targets {target}"):
                    self._task = self._task if name in _OF_NUMBERS else self._task_of(*zeros)
                    self._metrics[name] = self._metric(name, options)
                    _number(name, self._computed(name, [self._state(name, *zeros)] * 2))

    def check_has(self, name: str, others: Iterable[str]) -> None:
        """Raises OptionError if an evaluation has no number called `name`. A function may give numbers of any names."""
        known = ["loss", *(["accuracy"] if has_accuracy(self._loss) else []), *others, *self._metrics]
        if name not in known and not self._functions:
            what = f"evaluations have no {name}, which is to say which is the best"
            raise OptionError(what, remedy=f"--keep-best {one_of(known)}")

    def of_batch(self, outputs: Tensor, batch: Mapping[str, Tensor], count: int) -> Outcome:
        """What is kept of the first `count` samples of a batch."""
        targets = {name: batch[name][:count].clone() for name in self._targets}
        found: Outcome = {name: [(outputs.clone(), targets)] for name in self._functions}
        for name in self._metrics:
            with _explained(name, "this batch"):
                found[name] = [self._state(name, outputs, targets[self._targets[0]])]
        return found

    def over(self, batches: Iterable[Outcome]) -> dict[str, float]:
        """The numbers over all `batches`, which are in the order of the data."""
        kept: Outcome = {name: [] for name in (*self._metrics, *self._functions)}
        for batch in batches:
            for name, parts in batch.items():
                kept[name] += parts
        found: list[tuple[str, float]] = []
        for name in self._metrics:
            with _explained(name, "these samples"):
                found.append((name, _number(name, self._computed(name, kept[name]))))
        for name, function in self._functions.items():
            outputs = torch.cat([part for part, _ in kept[name]])
            by_name = {one: torch.cat([targets[one] for _, targets in kept[name]]) for one in self._targets}
            given = outputs, by_name if len(by_name) > 1 else by_name[self._targets[0]]
            value = guarded(partial(function, *given), f"the metric {name}", OptionError)
            several = value if isinstance(value, Mapping) else {name.rpartition(":")[2]: value}
            found += [(str(key), _number(name, one)) for key, one in several.items()]
        if len(found) > len(dict(found)):
            names = ", ".join(name for name, _ in found)
            raise OptionError(f"two metrics have the same name: {names}", remedy="rename one of the functions")
        return dict(found)

    def _task_of(self, output: Tensor, target: Tensor) -> _Task:
        name, args = (None, {}) if self._loss is None else (self._loss.name, self._loss.args)
        ignored = {"ignore_index": args.get("ignore_index", _IGNORED)}
        is_last = name not in ("cross_entropy", "nll") and output.shape[:-1] == target.shape
        dim = output.ndim - 1 if is_last else 1
        if output.ndim == target.ndim + 1 and not target.is_floating_point() and output.shape[dim] > 1:
            return _Task("Multiclass", {"num_classes": output.shape[dim], **ignored}, dim)
        if name in ("cross_entropy", "nll", "kl_div"):
            raise ValueError("targets are no class indices")
        several = output.ndim > 1 and output.shape[1] > 1
        return _Task("Multilabel", {"num_labels": output.shape[1]}) if several else _Task("Binary", {})

    def _metric(self, name: str, options: Mapping[str, object]) -> Any:
        torchmetrics, kind = _library(), self._task.kind
        how = {**options, "sync_on_compute": False}
        if name in _OF_NUMBERS:
            return getattr(torchmetrics, _OF_NUMBERS[name])(**how)
        if kind != "Multiclass" and (name == "perplexity" or is_top_k(name)):
            raise ValueError("targets are no class indices")
        if name == "perplexity":
            return torchmetrics.text.Perplexity(**{"ignore_index": self._task.arguments["ignore_index"], **how})
        how = {**self._task.arguments, **how}
        if kind == "Multiclass" and (name == "accuracy" or is_top_k(name)):
            how = {"average": "micro", "top_k": int(name[3:]) if is_top_k(name) else 1, **how}
        return getattr(torchmetrics.classification, f"{kind}{_OF_CLASSES.get(name, 'Accuracy')}")(**how)

    def _state(self, name: str, output: Tensor, target: Tensor) -> dict[str, Any]:
        """That of a metric of torchmetrics after this batch alone."""
        metric, task = self._metrics[name], self._task
        output = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        if name not in _OF_NUMBERS and task.kind == "Multiclass":
            output = output.movedim(task.dim, -1).flatten(0, -2)
            target = target.flatten()
            if name == "auroc" and self._loss is not None and self._loss.name in ("cross_entropy", "nll"):
                output = output.softmax(1)  # torchmetrics does it only for a batch with a number outside of 0 to 1
            if name == "perplexity":
                output, target = output.unsqueeze(0), target.unsqueeze(0)
        elif name not in _OF_NUMBERS:
            target = target.gt(0.5).long()
            if self._loss is not None and self._loss.name == "bce_with_logits":
                output = output.sigmoid()
            if task.kind == "Binary":
                output, target = output.flatten(), target.flatten()
        metric.reset()
        metric.update(output, target)
        held = metric.metric_state.items()
        return {key: [*map(torch.clone, one)] if isinstance(one, list) else one.clone() for key, one in held}

    def _computed(self, name: str, states: Iterable[Mapping[str, Any]]) -> object:
        metric = self._metrics[name]
        metric.reset()
        for state in states:
            metric.merge_state(dict(state))
        return metric.compute()


def _number(name: str, value: object) -> float:
    tensor = torch.as_tensor(value) if isinstance(value, Tensor | int | float) or hasattr(value, "item") else None
    if tensor is None or tensor.numel() != 1:
        what = type(value).__name__ if tensor is None else f"{tensor.numel()} numbers"
        raise OptionError(f"the metric {name} gives {what}", remedy="it must give a number, or a dict of numbers")
    return float(tensor)


@contextmanager
def _explained(name: str, of_what: str) -> Iterator[None]:
    """An exception of torchmetrics becomes OptionError; its warnings about how it is used are for others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        what = f"torchmetrics cannot measure {name} of {of_what}: {' '.join(str(error).split())}"
        remedy = f"leave it out, correct evaluation.metrics.{name}, or name a function: file.py:NAME"
        raise OptionError(what, remedy=remedy) from error


def _library() -> Any:
    try:
        import torchmetrics.classification
        import torchmetrics.text
    except ModuleNotFoundError as error:
        what = f"metrics by name need the package {error.name}, which is not installed"
        raise OptionError(what, remedy="pip install 'sambasim[train]'") from None
    return torchmetrics
