"""From torch's FX graphs to ours: nodes with SambaFlow's names (`logreg__lin_layer__weight`), the user's source lines
and recorded types."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import getitem
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx

from sambasim.compiler.capture.recording import source_line
from sambasim.compiler.capture.tensors import dtype_name
from sambasim.compiler.capture.trace import CapturedGraph
from sambasim.compiler.names import UniqueNames, symbol_name
from sambasim.errors import OperatorError
from sambasim.ir.dataflow import has_effect, needed_for
from sambasim.ir.graph import TORCH_CONSTANTS, Argument, ComplexNumber, Node, Ref, SourceLine, TorchConstant
from sambasim.ir.operators import ASSERTION, NUMBERS, OPERATORS, OperatorKind
from sambasim.ir.types import NUMBER, VALUE_BYTES, TensorType

_NAMED_BY_LAYER = {
    OperatorKind.MATMUL, OperatorKind.CONVOLUTION, OperatorKind.RECURRENT, OperatorKind.NORMALIZATION,
    OperatorKind.POOLING, OperatorKind.RESIZE, OperatorKind.LOSS,
}  # fmt: skip


def layer_name(node: fx.Node, operator: str) -> str | None:
    """`linear` for the matrix product of an nn.Linear, as SambaFlow names it; None for an operator that is no layer of
    torch.nn, or only prepares or finishes the work of one."""
    _, layer = module_of(node)
    if layer is None or OPERATORS[operator].kind not in _NAMED_BY_LAYER or layer.__name__ == "MultiheadAttention":
        return None
    return layer.__name__.lower() if layer.__module__.startswith("torch.nn.modules.") else None


def module_of(node: fx.Node) -> tuple[str, type | None]:
    """The path and the class of the module that made `node`, as the trace has noted them."""
    noted = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module: tuple[str, type | None] = next(iter(noted.values()), ("", None))
    return module


_REFUSED = "refused"  # stands for the results of a refused operator, so that the rest of the graph can be checked too

ALIASES = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default"})
"""Operators that only autograd needs, and that are left out."""


def tensor_type(tensor: Tensor) -> TensorType:
    """The recorded type of a real or fake tensor. Raises OperatorError for a dtype that a PEF cannot hold."""
    dtype = dtype_name(tensor)
    if dtype not in VALUE_BYTES:
        what, remedy = f"a tensor of dtype {dtype} cannot be in a PEF", f"use one of {', '.join(VALUE_BYTES)}"
        raise OperatorError(what, remedy=remedy)
    return TensorType(dtype, tuple(int(extent) for extent in tensor.shape))


class Translation:
    """Our nodes for a captured graph, of whose placeholders and constants `symbol_of` gives the symbols, its `inputs`;
    the type of every value, which nodes are `backward`, and the outputs' values. Raises one OperatorError for all
    operators that a PEF may not hold."""

    def __init__(self, captured: CapturedGraph, prefix: str, symbol_of: Mapping[str, str]) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, TensorType] = {}
        self.inputs = tuple(dict.fromkeys(symbol_of.values()))
        self.backward: set[str] = set()
        self._prefix, self._names = prefix, UniqueNames()
        self._value_of: dict[fx.Node, str] = {}
        self._result_of: dict[tuple[fx.Node, int], str] = {}
        self._refused: dict[str, SourceLine | None] = {}
        self._backward: set[fx.Node] = set()
        for node in captured.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._value_of[node] = symbol_of[node.name if node.op == "placeholder" else str(node.target)]
            elif node.op == "call_function":
                self._call(node)
        if self._refused:
            self._refuse()
        self.outputs = [self._value_of[value] for value, _ in captured.outputs]
        self._drop_dead_code()

    def _call(self, node: fx.Node) -> None:
        is_function = isinstance(node.target, FunctionType | BuiltinFunctionType)
        operator = getattr(node.target, "__name__", "") if is_function else str(node.target)
        if node.target is getitem:
            self._value_of[node] = self._result_of.get(_item(node), _REFUSED)
        elif operator in ("aten._assert_async.default", "aten._assert_async.msg"):
            self._assert(node)
        elif operator in ALIASES:
            self._value_of[node] = self._value_of[node.all_input_nodes[0]]
        elif f"number.{operator}" in NUMBERS and is_function:
            self._emit(node, f"number.{operator}")
        elif operator not in OPERATORS or operator.startswith("sambasim."):
            # Metadata, which are dtypes and shapes, hold for good once the trace has checked them.
            if operator != "aten._assert_tensor_metadata.default":
                self._refused.setdefault(operator, source_line(node))
                self._value_of[node] = _REFUSED
        else:
            self._emit(node, operator)

    def _assert(self, node: fx.Node) -> None:
        condition, *message = node.args
        if not isinstance(condition, fx.Node) or condition not in self._value_of:
            return  # of the trace's own, on a number
        module, _ = module_of(node)
        name = self._take_name(module, "assert")
        if self._is_backward(node):
            self.backward.add(name)
        kwargs = (("message", str(message[0])),) if message else ()
        args = (self._argument(condition),)
        self.nodes.append(Node(name, ASSERTION, args, kwargs, (), module, source_line(node)))

    def _take_name(self, module: str, short: str) -> str:
        return self._names.take(symbol_name(self._prefix, f"{module}.{short}" if module else short))

    def _is_backward(self, node: fx.Node) -> bool:
        """Also of a backward of the user's own, which has no tag."""
        has_tag = node.meta.get("partitioner_tag") == "is_backward"
        return has_tag or not self._backward.isdisjoint(node.all_input_nodes)

    def _emit(self, node: fx.Node, operator: str) -> None:
        backward, (module, _), line = self._is_backward(node), module_of(node), source_line(node)
        short = layer_name(node, operator) or operator.split(".")[1].lstrip("_")
        name = self._take_name(module, f"{short}_bwd" if backward and "backward" not in short else short)
        if backward:
            self._backward.add(node)
            self.backward.add(name)
        try:
            args = tuple(self._argument(argument) for argument in self._relative(node, operator))
            kwargs = tuple((key, self._argument(value)) for key, value in node.kwargs.items())
        except OperatorError as error:
            error.where = str(line or operator)
            raise
        results = self._results(node, name)
        if self._value_of.get(node) != _REFUSED:
            for argument in (*args, *(value for _, value in kwargs)):
                if isinstance(argument, TorchConstant) and argument.name not in TORCH_CONSTANTS[argument.kind]:
                    self._refused.setdefault(f"{operator} with the {argument.kind} {argument.name}", line)
        self.nodes.append(Node(name, operator, args, kwargs, results, module, line))

    def _relative(self, node: fx.Node, operator: str) -> Sequence[object]:
        """The arguments of `node`, without a storage offset: memory of a device may begin elsewhere. Refuses
        `as_strided` of other memory than a contiguous tensor's own, which a rank may hold in another way."""
        if not operator.startswith("aten.as_strided"):
            return node.args
        operands = node.args[: 2 if "scatter" in operator else 1]
        size, stride, *offset = node.args[len(operands) :]
        tensor = cast(fx.Node, operands[0]).meta["val"]
        last = sum((extent - 1) * step for extent, step in zip(cast(Any, size), cast(Any, stride), strict=True))
        is_moved = not {None, tensor.storage_offset()}.issuperset(offset)
        if is_moved or not tensor.is_contiguous() or last >= tensor.numel():
            self._refused.setdefault("as_strided of a tensor that is not contiguous", source_line(node))
        return *operands, size, stride

    def _results(self, node: fx.Node, name: str) -> tuple[str | None, ...]:
        value = node.meta["val"]
        is_one = isinstance(value, Tensor | torch.SymFloat)
        for tensor in (value,) if is_one else value:
            if isinstance(tensor, Tensor) and dtype_name(tensor) not in VALUE_BYTES:
                self._refused.setdefault(f"{node.target}, which gives {dtype_name(tensor)}", source_line(node))
                self._value_of[node] = _REFUSED
                return ()
        if is_one:
            result = self._value_of[node] = f"{name}__outputs__0"
            self.values[result] = tensor_type(value) if isinstance(value, Tensor) else NUMBER
            return (result,)
        read = sorted({_item(user)[1] for user in node.users if user.target is getitem})
        results = {index: f"{name}__outputs__{index}" for index in read}
        self._result_of |= {(node, index): result for index, result in results.items()}
        self.values |= {result: tensor_type(value[index]) for index, result in results.items()}
        return tuple(map(results.get, range(len(value))))

    def _argument(self, argument: object) -> Argument:
        match argument:
            case fx.Node():
                return Ref(self._value_of[argument])
            case None | bool() | int() | float() | str():
                return argument
            case complex():
                return ComplexNumber(argument.real, argument.imag)
            case torch.dtype() | torch.layout() | torch.memory_format():
                return TorchConstant(type(argument).__name__, str(argument).removeprefix("torch."))
            case torch.device():
                return TorchConstant("device", argument.type)
            case list() | tuple():
                return tuple(self._argument(item) for item in argument)
        raise OperatorError(f"an operator takes {argument!r}, which cannot be written in a PEF")

    def _refuse(self) -> None:
        remedy = "\n         ".join(dict.fromkeys(map(_instead_of, self._refused)))
        if len(self._refused) == 1:
            [(refused, line)] = self._refused.items()
            raise OperatorError(f"a PEF cannot hold {refused}", where=str(line) if line else None, remedy=remedy)
        lines = [f"{line or 'line unknown'}   ({refused})" for refused, line in self._refused.items()]
        what = "\n    ".join((f"the model uses {len(lines)} things that a PEF cannot hold:", *lines))
        raise OperatorError(what, remedy=remedy)

    def _drop_dead_code(self) -> None:
        """Drops nodes that nothing reads, except assertions, and random draws, which eager PyTorch makes too."""
        nodes, read = needed_for(self.outputs, self.nodes, {node.name for node in self.nodes if has_effect(node)})
        self.nodes = [
            replace(one, results=tuple(name if name in read else None for name in one.results)) for one in nodes
        ]
        live = {result for node in self.nodes for result in node.results}
        self.values = {name: type_ for name, type_ in self.values.items() if name in live}


_INSTEAD = {
    "as_strided": "x.contiguous().as_strided(…), without a storage_offset",
    "grouped_mm": "--set model.args.experts_implementation=batched_mm; "
    'for a config of transformers in your code, experts_implementation="batched_mm"',
    "sparse": "leave out sparse=True: a PEF holds dense gradients only",
}


def _instead_of(refused: str) -> str:
    otherwise = "write it with operators that have static shapes and no side effects"
    if not refused.startswith("aten."):
        otherwise = "write it with PyTorch's own operators: a PEF holds no code"
    return next((rewrite for mark, rewrite in _INSTEAD.items() if mark in refused), otherwise)


def _item(node: fx.Node) -> tuple[fx.Node, int]:
    operand, index = node.args
    return cast(fx.Node, operand), cast(int, index)
