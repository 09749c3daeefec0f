"""Products of matrices and convolutions, most of a step's time, that eager PyTorch and a PEF compute alike: once.

What eager PyTorch computes is kept. A PEF that asks for the same product takes that result instead of computing it: the
same operator, arguments and settings, operands of the same types, shapes, strides and alignment, and the same bits in
each. The comparison finds as much as if both sides computed everything:

- Whatever a capture got wrong, an operator, an argument, an operand or the order of changes, asks for another product.
  That is computed, and its results differ as they always did.
- A kernel gives the same bits for the same operands, or no step could be compared. So to compute again would prove
  nothing of the graph. It would prove that the runtime calls that kernel: of each operator, with and without a place
  for its result, the first product is computed and compared. If it differs, none of that operator is taken.
- What is kept is copy-on-write, so that no later change in place by PyTorch reaches it, also not one by `.data`;
  memory that numpy can change too is not kept.
- PyTorch's kernels are called through its dispatcher on both sides, in no mode: autograd has other formulas in one.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.compiler.capture.snapshot import settings_of_kernels

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mkldnn_convolution", "convolution_backward")
"""Functional operators without random numbers, of which the kernels of the CPU are replaced."""
WITH_OUT = ("mm.out", "addmm.out", "bmm.out", "baddbmm.out")

_SMALL_BYTES, _MOST_BYTES = 1 << 14, 2 << 30
"""Products of less are computed in less time than they are found. So much is kept at most."""

_ALIGNED_BYTES = 64
_begin: Callable[[Tensor], int] = vars(torch._C)["_data_address"]  # of memory, where data_ptr() would make a copy
_is_shared: Callable[[Tensor], bool] = vars(torch._C)["_is_cow_tensor"]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key: TypeAlias = tuple[object, ...]


class _Product(NamedTuple):
    operands: Sequence[Tensor]
    results: Any  # a tensor, or a tuple of some and None


class Products:
    """Until it is closed, replaces kernels of this process, which compute as ever but within `kept` and `taken`."""

    def __init__(self) -> None:
        self._known = defaultdict[Key, list[_Product]](list)
        self._bytes, self._held = 0, set[int]()  # of all operands and results, each memory once, by its address
        self._keeps, self._takes = False, False
        self._is_same: dict[str, bool] = {}  # by operator, whether its first product had the same results
        self.found = 0
        """How many products have been taken."""
        self._library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's, untyped
        with warnings.catch_warnings(action="ignore"):  # that kernels are replaced
            for name in (*PRODUCTS, *WITH_OUT):
                kernel = get_kernel(f"aten::{name}", "CPU")
                called = partial(self._called, name, kernel)
                self._library.impl(  # type: ignore[no-untyped-call]  # torch's, untyped
                    name, called, "CPU", with_keyset=True, allow_override=True
                )

    def close(self) -> None:
        self._library._destroy()  # type: ignore[no-untyped-call]  # torch's, untyped
        self._known.clear()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Products that are computed within are kept, and those of before no longer."""
        self._known.clear()
        self._bytes, self._held, self._keeps = 0, set(), True
        try:
            yield
        finally:
            self._keeps = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Products that are kept are not computed again within."""
        self._takes = True
        try:
            yield
        finally:
            self._takes = False
            self._known.clear()

    def _called(self, name: str, kernel: Any, keys: Any, *args: Any, out: Tensor | None = None, **options: Any) -> Any:
        compute = partial(kernel.call_boxed, keys, *args, **options, **({} if out is None else {"out": out}))
        leaves = tree_leaves(args) if self._keeps or self._takes else ()
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if sum(operand.nbytes for operand in operands) < _SMALL_BYTES or any(map(_is_lazy, operands)):
            return compute()
        settings = (*options, *map(_form, options.values()), *settings_of_kernels().values())
        key = (name.removesuffix(".out"), *map(_form, leaves), *settings)
        if self._keeps:
            return compute() if out is not None else self._keep(key, operands, compute())
        known = self._known[key]
        found = next((at for at, one in enumerate(known) if all(map(same_bits, one.operands, operands))), None)
        if found is None or not self._is_same.get(name, True) or not _fits(known[found], operands, out):
            return compute()
        product = known.pop(found)  # so that its memory is free
        if name not in self._is_same:
            results = compute()
            pairs = zip(tree_leaves(results), tree_leaves(product.results), strict=True)
            self._is_same[name] = all(_alike(one, other) for one, other in pairs)
            return results
        self.found += 1
        return product.results if out is None else out.copy_(product.results)

    def _keep(self, key: Key, operands: Sequence[Tensor], results: Any) -> Any:
        made = [result for result in tree_leaves(results) if isinstance(result, Tensor)]
        sizes = {_begin(tensor): tensor.untyped_storage().nbytes() for tensor in (*operands, *made)}
        self._bytes += sum(sizes[begin] for begin in sizes.keys() - self._held)
        self._held |= sizes.keys()
        if self._bytes <= _MOST_BYTES:
            with suppress(RuntimeError):
                self._known[key].append(_Product([*map(sharing, operands)], tree_map(sharing, results)))
        return results


def _form(argument: object) -> object:
    """What tells an argument from others, for a tensor without its values."""
    if not isinstance(argument, Tensor):
        return type(argument), argument
    return argument.dtype, argument.shape, argument.stride(), _address(argument) % _ALIGNED_BYTES


def _is_lazy(operand: Tensor) -> bool:
    """Whether the kernel is to conjugate or negate what is in memory."""
    return operand.is_conj() or operand.is_neg()


def _fits(product: _Product, operands: Sequence[Tensor], out: Tensor | None) -> bool:
    """Whether the kernel would give the result the layout of `out`, as with another one it may round differently, and
    could write there: over an operand that it still reads, it would not compute the product."""
    if out is None:
        return True
    (begin, end), others = _span(out), map(_span, operands)
    return _form(out) == _form(product.results) and all(end <= first or last <= begin for first, last in others)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `tensor`, and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = _address(tensor)
    return begin, begin + (last + 1) * tensor.element_size()


def _address(tensor: Tensor) -> int:
    return _begin(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def sharing(value: Any) -> Any:
    """A tensor with the memory of `value`, until one of the two changes; what is no tensor, itself. Raises RuntimeError
    for memory that another library has given, or numpy has too, which no copy-on-write would tell of its changes."""
    if not isinstance(value, Tensor):
        return value
    if not value.untyped_storage().resizable():
        raise RuntimeError("numpy has this memory too")
    return torch._lazy_clone(value)


def _alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    return (one.shape, one.stride()) == (other.shape, other.stride()) and same_bits(one, other)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Of two tensors of one dtype and shape: also of NaN, and 0.0 is not -0.0."""
    are_shared = _is_shared(one) and _is_shared(other) and one.stride() == other.stride()
    if are_shared and _address(one) == _address(other):
        return True
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
