"""Whether a node fits the schema of its operator: rule 25, which only a reader that is about to run it can check.

The schema is torch's own and is given by the caller, so that everything else about a PEF can be read without torch.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sambasim.bounded import shortened
from sambasim.errors import PefError
from sambasim.ir.graph import Argument, Node, Ref
from sambasim.pef.operand_types import fits
from sambasim.pef.rules import COMPILE_AGAIN, OPERANDS

if TYPE_CHECKING:
    from torch import FunctionSchema

_TENSOR = "Tensor"


def returns_one_tensor(schema: "FunctionSchema") -> bool:
    """Whether an operator of this schema returns one tensor, and not several or a list."""
    return [str(value.type) for value in schema.returns] == [_TENSOR]


def check_operands(node: Node, schema: "FunctionSchema") -> None:
    """Checks `node`'s arguments and the number of its results against `schema`.

    What a tensor holds is not checked, and neither is the length of a list of results: nobody knows either before the
    operator runs. Raises PefError.
    """
    fault = next(_faults(node, schema), None)
    if fault is not None:
        raise operands_error(node, fault)


def operands_error(node: Node, fault: str) -> PefError:
    """The error for a node that breaks rule 25."""
    what = f"node {node.name} breaks rule {OPERANDS.number} of the PEF format ({OPERANDS.name}): {shortened(fault)}"
    return PefError(what, where=f"{OPERANDS.part}, {node.source or node.operator}", remedy=COMPILE_AGAIN)


def _faults(node: Node, schema: "FunctionSchema") -> Iterator[str]:
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if len(node.args) > len(positional):
        yield f"{node.operator} takes {len(positional)} positional arguments at most, and has {len(node.args)}"
    given = positional[: len(node.args)]
    known = {argument.name for argument in schema.arguments}
    for name, value in node.kwargs:
        if name not in known:
            yield f"{node.operator} takes no argument {name[:40]!r}"
        if name in given:
            yield f"{node.operator} is given {name} twice"
        if _holds_values(value):
            yield f"{node.operator} is given a list of tensors by the keyword {name}"
        given.append(name)
    for argument in schema.arguments:
        if argument.name not in given and not argument.has_default_value():
            yield f"{node.operator} is not given {argument.name}"
    # A list of tensors stands among the positional arguments, and holds no list itself.
    if any(_holds_values(item) for value in node.args if isinstance(value, tuple) for item in value):
        yield f"{node.operator} is given a list of lists of tensors"
    yield from _type_faults(node, schema)
    yield from _result_faults(node, [str(value.type) for value in schema.returns])


def _type_faults(node: Node, schema: "FunctionSchema") -> Iterator[str]:
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = dict(zip(positional, node.args, strict=False)) | dict(node.kwargs)
    for argument in schema.arguments:
        # The type that is meant: a dtype is an int to the schema's other one.
        kind = str(argument.real_type)
        if argument.name in given and not fits(given[argument.name], kind):
            yield f"{node.operator} is given for {argument.name} what is no {kind}"


def _result_faults(node: Node, returns: Sequence[str]) -> Iterator[str]:
    if all(kind == _TENSOR for kind in returns) and len(node.results) != len(returns):
        yield f"{node.operator} has {len(returns)} results, and {len(node.results)} are stated"


def _holds_values(argument: Argument) -> bool:
    return isinstance(argument, tuple) and any(isinstance(item, Ref) or _holds_values(item) for item in argument)
