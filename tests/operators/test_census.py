"""Every operator of torch is in the table, or the census says why not."""

import pytest

from tests.operators import CHANGES, COMPOSITE, DEPENDS_ON_VALUES, HELD, MISSING, NO_KERNEL, NO_TENSOR, schemas, sort


def test_no_operator_is_missing() -> None:
    sorts = {name: sort(name) for name in schemas()}
    assert [name for name, what in sorts.items() if what == MISSING] == []
    assert len(sorts) > 3000, "all of them are looked at"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.add.Tensor", HELD),
        ("aten.multiply.Tensor", COMPOSITE),
        ("aten.add_.Tensor", CHANGES),
        ("aten.add.out", CHANGES),
        ("aten.native_batch_norm.default", "changes an argument, though its schema does not say so"),
        ("aten.nonzero.default", DEPENDS_ON_VALUES),
        ("aten._local_scalar_dense.default", NO_TENSOR),
        ("aten.item.default", NO_TENSOR),
        ("aten.from_file.default", "reads a file"),
        ("aten.set.source_Storage", "takes a storage or an object"),
        ("aten._reshape_alias.default", "addresses memory"),
        ("aten.cudnn_convolution.default", NO_KERNEL),
        ("aten._to_sparse.default", "of sparse tensors"),
        ("aten.quantize_per_tensor.default", "of quantized tensors"),
    ],
)
def test_reasons(name: str, expected: str) -> None:
    assert sort(name) == expected
