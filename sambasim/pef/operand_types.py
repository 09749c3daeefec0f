"""Whether a constant of a node is of the type that the schema of its operator states: a part of rule 25.

Torch takes more than its schemas say (any number for a memory format, for one), and some of it ends the process.
"""

from sambasim.ir.graph import Argument, Ref, TorchConstant

_CONSTANTS = frozenset({"ScalarType", "Layout", "MemoryFormat", "Device"})
"""Types in a schema that are constants of torch."""

_OPTIONAL, _LIST, _END = "Optional[", "List[", "]"
_LARGEST = 1 << 63
"""Integers of torch are from minus this to below it."""


def fits(argument: Argument, kind: str) -> bool:
    """Whether `argument` can stand where a schema has the type `kind`: `Tensor`, `Optional[List[int]]`, …"""
    if kind.startswith(_OPTIONAL):
        return argument is None or fits(argument, kind.removeprefix(_OPTIONAL).removesuffix(_END))
    if kind.startswith(_LIST):
        return _fits_list(argument, kind.removeprefix(_LIST).removesuffix(_END))
    if kind in _CONSTANTS:
        # Of which kind it is, torch looks at itself.
        return isinstance(argument, TorchConstant)
    match kind:
        case "Tensor":
            # A number is as good as a tensor without dimensions to most operators.
            return isinstance(argument, Ref) or _is_number(argument)
        case "bool":
            return isinstance(argument, bool)
        case "int":
            return _is_integer(argument)
        case "float":
            return _is_number(argument) and not isinstance(argument, bool)
        case "number":
            return _is_number(argument)
        case "str":
            return isinstance(argument, str)
    return False  # a generator, a storage: nothing that a PEF can say


def _fits_list(argument: Argument, kind: str) -> bool:
    if isinstance(argument, tuple):
        # A list of tensors holds no numbers in their place.
        return all(fits(item, kind) and not (kind == "Tensor" and not isinstance(item, Ref)) for item in argument)
    return kind in ("int", "bool", "float") and fits(argument, kind)


def _is_integer(argument: Argument) -> bool:
    return isinstance(argument, int) and not isinstance(argument, bool) and -_LARGEST <= argument < _LARGEST


def _is_number(argument: Argument) -> bool:
    return isinstance(argument, bool | float) or _is_integer(argument)
