"""A captured graph: what a trace gives, before it is translated."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from operator import ne

import torch
from torch import Tensor, fx

from sambasim.compiler.tensors import memory_order


@dataclass(frozen=True, slots=True)
class Role:
    """What an input or output of a captured graph is; `name` is the path of the tensor in the model, or the index of
    the input or output."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A functional FX graph: the roles of its placeholders by name, its outputs in order with theirs, and the constants
    that the trace itself made. `kept_buffers`: which the model changes in evaluation, and the graph does not."""

    graph: fx.Graph
    inputs: dict[str, Role]
    outputs: tuple[tuple[fx.Node, Role], ...]
    constants: dict[str, Tensor]
    kept_buffers: tuple[str, ...] = ()

    @property
    def is_checkpointed(self) -> bool:
        """Whether a part of it was under torch.utils.checkpoint."""
        return any("recompute" in node.meta for node in self.graph.nodes)

    @property
    def cast_twice(self) -> tuple[str, ...]:
        """The parameters that several lines under torch.autocast read: PyTorch casts them once."""
        casts: Counter[str] = Counter()
        for node in self.graph.nodes:
            forward = node.meta.get("partitioner_tag") == "is_forward"
            if forward and node.target is torch.ops.aten._to_copy.default and node.args[0].name in self.inputs:
                role = self.inputs[node.args[0].name]
                casts[role.name] += role.kind == "parameter"
        return tuple(name.removeprefix("model.") for name, count in casts.items() if count > 1)

    @property
    def losses(self) -> tuple[int, ...]:
        """The indices of the outputs from which the backward starts; the first output's if there is no backward."""
        return tuple(sorted(int(role.name) for role in self.inputs.values() if role.kind == "tangent")) or (0,)


def restore_strides(captured: CapturedGraph) -> CapturedGraph:
    """Permute the axes of constants that are dense and not contiguous, as `torch.linalg.cholesky` makes them: a PEF has
    them in the order of their memory. The graph is changed."""
    graph, given_out = captured.graph, {node for node, _ in captured.outputs}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        role = captured.inputs.get(node.name)
        key = str(node.target) if node.op == "get_attr" else role.name if role is not None else ""
        value = captured.constants.get(key)
        if value is None or value.layout is not torch.strided or value.is_contiguous() or node in given_out:
            continue
        order = memory_order(value)
        if not value.permute(order).is_contiguous():
            continue  # it is refused
        back = [order.index(axis) for axis in range(value.ndim)]
        with graph.inserting_after(node) if node.op == "get_attr" else graph.inserting_before(first):
            restored = graph.call_function(torch.ops.aten.permute.default, (node, back))
        restored.meta = dict(node.meta)
        node.replace_all_uses_with(restored, delete_user_cb=partial(ne, restored))
        if isinstance(shape := node.meta.get("val"), Tensor):
            node.meta["val"] = shape.permute(order)
    return captured


def complex_constants(captured: CapturedGraph) -> CapturedGraph:
    """Complex constants are made of two real ones, which a PEF can hold. The graph is changed."""
    graph, inputs, constants = captured.graph, dict(captured.inputs), dict(captured.constants)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        key = str(node.target) if node.op == "get_attr" else inputs[node.name].name if node.name in inputs else ""
        value = captured.constants.get(key)
        if value is None or not value.is_complex():
            continue
        parts = {f"{key}_real": value.real.contiguous(), f"{key}_imaginary": value.imag.contiguous()}
        constants |= parts
        with graph.inserting_before(node if node.op == "get_attr" else first):
            read = [graph.create_node("get_attr", part) for part in parts]
            whole = graph.call_function(torch.ops.aten.complex.default, tuple(read))
        for made, tensor in zip((*read, whole), (*parts.values(), node.meta["val"]), strict=True):
            made.meta = {**node.meta, "val": tensor}
        node.replace_all_uses_with(whole)
        inputs.pop(node.name, None)
        graph.erase_node(node)
    return replace(captured, inputs=inputs, constants=constants)
