"""A census of the operators of torch: which of `torch.ops.aten` a PEF may hold, and for what reason it holds no other.

`python -m tests.operators` prints it. Reasons follow from the schema, the tags and the kernels of an operator. Where
none of them tells, `BY_NAME` does.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import FunctionSchema

from sambasim.ir.operators import OPERATORS

HELD = "held"
COMPOSITE = "consists of others, which a graph holds in its place"
NO_KERNEL = "no kernel for dense tensors of the CPU"
TORCHSCRIPT = "of TorchScript, for numbers, lists and strings"
CHANGES = "changes an argument, or writes to out="
NO_TENSOR = "returns something that is no tensor"
DEPENDS_ON_VALUES = "sizes or results depend on values"
MISSING = "missing"

BY_NAME: Mapping[str, str] = {
    r".*sparse.*|hspmm|_spdiags|_coalesced?": "of sparse tensors",
    r"(ccol_|col_|crow_|row_|_)?indices(_copy)?|_?values(_copy)?|_convert_indices_.*": "of sparse tensors",
    r"(?!_?fake).*quantize.*|.*(int4pack|4bit).*": "of quantized tensors",
    r"_nested.*|.*jagged.*": "of nested tensors",
    r"to_mkldnn": "of oneDNN's own layout",
    r"_nnpack_.*": "only some CPUs have a kernel, which convolution calls",
    r".*overrideable.*|_philox_.*": "no kernel in torch for the CPU",
    r"set|resize(_as)?|_resize_output|slice_inverse|_reshape_alias(_copy)?|_lazy_clone|_pin_memory": "addresses memory",
    r"from_file": "reads a file",
    r"native_batch_norm|batch_norm_update_stats": "changes an argument, though its schema does not say so",
    r"_pack_padded_sequence": "sizes depend on values, though its tags do not say so",
    r"_fw_primal(_copy)?|_make_dual(_copy)?": "names a level of forward-mode differentiation, which only a trace has",
    r"_functional_(assert|sym)_.*|_make_dep_token": "orders the effects of a trace",
    r"_amp_update_scale": "scales a loss, which the runtime does",
    r"_scaled_mm(_v2)?|hash_tensor": "of a type of numbers that a PEF cannot hold",
    r"_test_.*|_foobar": "a test of torch's own",
}
"""What a name says."""


@cache
def schemas() -> Mapping[str, FunctionSchema]:
    """Of all operators in the namespace aten, by full name, such as `aten.add.Tensor`."""
    found = (one for one in torch._C._jit_get_all_schemas() if one.name.startswith("aten::"))
    return {f"aten.{one.name.removeprefix('aten::')}.{one.overload_name or 'default'}": one for one in found}


def sort(name: str) -> str:
    """HELD, MISSING, or the reason why no PEF holds the operator."""
    return HELD if name in OPERATORS else next(reasons(name), MISSING)


def reasons(name: str) -> Iterator[str]:
    """Why a PEF cannot hold the operator, or need not."""
    schema = schemas()[name]
    own = f"aten::{name.split('.')[1]}{f'.{schema.overload_name}' if schema.overload_name else ''}"
    if own not in _dispatched():
        yield TORCHSCRIPT
        return
    if schema.is_mutable:
        yield CHANGES
    results = [str(one.type) for one in schema.returns]
    if not results or any("Tensor" not in one for one in results):
        yield NO_TENSOR
    if torch._C._dispatch_has_kernel_for_dispatch_key(own, "CompositeImplicitAutograd"):
        yield COMPOSITE
    if len(results) > 1 and any("List" in one for one in results):
        yield "returns lists among its results, such as a step of an optimizer"
    if any("Storage" in str(one.type) or "classes" in str(one.type) for one in schema.arguments):
        yield "takes a storage or an object"
    _, packet, overload = name.split(".")
    tags = getattr(getattr(torch.ops.aten, packet), overload).tags
    if not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(tags):
        yield DEPENDS_ON_VALUES
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(own, "CPU"):
        yield NO_KERNEL
    yield from (reason for names, reason in BY_NAME.items() if re.fullmatch(names, packet))


@cache
def _dispatched() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())
