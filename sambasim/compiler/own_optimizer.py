"""Optimizers of the user's own. One is a function that updates a parameter and its states, zeros at first, in place:

    def lion(parameter, gradient, exp_avg, *, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
        direction = exp_avg.lerp(gradient, 1 - beta1).sign_()
        parameter.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
        exp_avg.lerp_(gradient, 1 - beta2)

Hyperparameters, and `step` from 1 if it wants that, are numbers of Python; in the trace symbolic ones, whose arithmetic
the graph keeps. It runs on flat slices of many parameters: only element-wise operators are possible."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from sambasim.compiler.capture.recording import first_line, source_line
from sambasim.compiler.capture.trace import capture_update
from sambasim.compiler.translate import ALIASES, Translation
from sambasim.compiler.update import Update
from sambasim.data.user_code import load_object
from sambasim.errors import CaptureError, OperatorError, OptionError
from sambasim.ir.graph import Graph, Output, Section, SectionKind, with_sections
from sambasim.ir.operators import ELEMENTWISE, NUMBERS
from sambasim.ir.program import AVERAGE, MASTER, STEP
from sambasim.ir.types import PART
from sambasim.optimizers import FORM_OF_OWN, OWN
from sambasim.options.training import BOUNDS, OptimizerOptions

OwnUpdate: TypeAlias = Callable[..., object]

_OF_NUMBERS = (
    "for if on numbers write at = torch.zeros_like(gradient) + step, and torch.where(at < 10, lr * 0.1, lr); for min "
    "torch.sym_min, for max torch.sym_max, for sqrt x**0.5, for sub_(y, alpha=x) add_(y, alpha=-x)"
)


def own_update(target: str, given: Mapping[str, OwnUpdate]) -> OwnUpdate:
    """The function that a target names; one of those that are `given`, which may be anywhere."""
    function = given.get(target) or load_object(target, "optimizer")
    if inspect.isfunction(function):
        return function
    raise OptionError(f"the optimizer {target} is no function", remedy=f"give the function itself: {FORM_OF_OWN}")


def updates_of(optimizer: OptimizerOptions, given: Mapping[str, OwnUpdate]) -> list[Update]:
    """The updates that options ask for, of one group of parameters each. Raises OptionError and CaptureError."""
    updates, patterns = [], (None, *(frozenset(group.match) for group in optimizer.all_groups()))
    for options, names in zip(optimizer.updates(), patterns, strict=True):
        numbers, graph = options.hyperparameters(), None
        if options.is_own:
            defaults, graph = _captured(own_update(options.name, given), options.name)
            if unknown := numbers.keys() - {*defaults, *BOUNDS}:
                what = f"the optimizer {options.name} takes no {min(unknown)}"
                raise OptionError(what, remedy=f"it takes {', '.join(defaults)}")
            numbers = {**defaults, **numbers}
        updates.append(Update(OWN if options.is_own else options.name, numbers, names, graph=graph))
    return updates


def _captured(function: OwnUpdate, target: str) -> tuple[Mapping[str, float], Graph]:
    """The defaults of hyperparameters, and the graph."""
    name, line = target.rpartition(":")[2], str(first_line(function))
    given = inspect.signature(function).parameters.values()
    by_place = [one.name for one in given if one.kind is one.POSITIONAL_OR_KEYWORD]
    numbers = {one.name: one.default for one in given if one.kind is one.KEYWORD_ONLY}
    defaults = {name: value for name, value in numbers.items() if name != STEP}
    reserved = {"parameter", "gradient", STEP, MASTER, AVERAGE, *BOUNDS}.intersection((*by_place[2:], *defaults))
    others = [name for name, value in defaults.items() if type(value) not in (int, float)]
    others += sorted(reserved) + [one.name for one in given if one.name not in (*by_place, *numbers)]
    if others or len(by_place) < 2 or "lr" not in numbers:
        what = f"the optimizer {target} has other arguments: {', '.join(others) or 'no keyword lr, or no gradient'}"
        remedy = f"give the function itself, {FORM_OF_OWN}; a keyword has one number (beta1, beta2), {STEP} none"
        raise OptionError(what, where=line, remedy=remedy)
    try:
        regions = "parameter", "gradient", *by_place[2:]
        captured = capture_update(function, regions, tuple(numbers), PART.shape)
    except CaptureError as error:
        error.where = error.where or line
        if "branch" in error.what:
            error.what += ", or of a number that is not known before a run"
        error.remedy = _OF_NUMBERS if re.search("branch|Sym(Bool|Float)", error.what) else error.remedy
        raise
    for node in captured.graph.nodes:
        operator, called = str(node.target), getattr(node.target, "__name__", "")
        if operator.startswith("<") and f"number.{called}" not in NUMBERS:
            what = f"the optimizer {target} uses {called} of numbers, which are not known before a run"
            raise OperatorError(what, where=str(source_line(node) or line), remedy=_OF_NUMBERS)
        if operator.startswith("aten.") and operator not in ELEMENTWISE | ALIASES:
            remedy = "an update runs on slices of many parameters: without sums, norms, products of matrices, .item()"
            raise OperatorError(f"{operator} is not element-wise", where=str(source_line(node) or line), remedy=remedy)
    if str(captured.graph) != str(capture_update(function, regions, tuple(numbers), (3, 5)).graph):
        what = f"the optimizer {target} depends on the shape of a tensor, or on what earlier calls have left in Python"
        raise OptionError(what, where=line, remedy="give groups of parameters other numbers, and count by states")
    translation = Translation(captured, name, {name: role.name for name, role in captured.inputs.items()})
    written = zip(translation.outputs, (role.name for _, role in captured.outputs), strict=True)
    outputs = tuple(Output(value, region) for value, region in written if region != "gradient")
    if all(output.symbol != "parameter" for output in outputs):
        remedy = "change it in place: parameter.add_(update, alpha=-lr)"
        raise OptionError(f"the optimizer {target} does not change the parameter", where=line, remedy=remedy)
    graph = Graph(name, translation.inputs, (), outputs, translation.values)
    return defaults, with_sections(graph, [(Section(0, SectionKind.OPT, name, 0, 0), translation.nodes)])
