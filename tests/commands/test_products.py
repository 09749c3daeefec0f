"""Products that eager PyTorch and a PEF compute once: which are taken, and that every wrong graph is found still."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.commands.proof import prove as proving
from sambasim.commands.proof.eager import LiveModel
from sambasim.commands.proof.products import PRODUCTS, WITH_OUT, Products, same_bits, sharing
from sambasim.commands.proof.prove import prove
from sambasim.compiler.capture.step import Example
from sambasim.errors import CaptureError
from sambasim.ir.graph import Graph, Node
from sambasim.pef import map_weights, read, write
from tests.commands.proving import options, proved

WIDTH, SAMPLES = 64, 64


@pytest.fixture
def products() -> Iterator[Products]:
    with closing(Products()) as made:
        yield made


def square(seed: int = 0) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def taken(products: Products, product: Callable[[], object]) -> int:
    """How many of two calls of `product` have been taken."""
    before = products.found
    with products.taken():
        product(), product()
    return products.found - before


@pytest.fixture
def later(products: Products) -> Products:
    """When the first product of each operator has been the same."""
    products._is_same |= dict.fromkeys((*PRODUCTS, *WITH_OUT), True)
    return products


def test_operators_are_functions_of_their_operands_alone() -> None:
    for name in (*PRODUCTS, *WITH_OUT):
        operator = getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default")
        assert operator._schema.is_mutable is (name in WITH_OUT)
        assert torch.Tag.nondeterministic_seeded not in operator.tags
        assert not any(argument.name in ("generator", "dtype") for argument in operator._schema.arguments)


def test_the_same_product_is_taken_and_the_first_one_computed(products: Products) -> None:
    a, b = square(), square(1)
    with products.kept():
        expected = [a @ b for _ in range(3)]
    with products.taken():
        found = [a.clone() @ b, a @ b.clone()]
        assert products.found == 1
        assert all(torch.equal(one, expected[0]) for one in found)
    with products.kept():
        a @ b
    assert taken(products, lambda: a @ b) == 1, "there was one"
    assert taken(products, lambda: a @ b) == 0, "and it is gone"


@pytest.mark.parametrize("at", [0, WIDTH * WIDTH - 1])
def test_any_other_operand_argument_layout_or_setting_is_another_product(later: Products, at: int) -> None:
    a, b, bias = square(), square(1), square(2)
    a.view(-1)[at] = 0.0
    negative, bent, shifted = a.clone(), a.t().contiguous().t(), torch.empty(WIDTH * WIDTH + 1)[1:].view_as(a).copy_(a)
    negative.view(-1)[at] = -0.0
    others: list[Callable[[], object]] = [
        *(lambda one=one: torch.addmm(bias, one, b) for one in (negative, bent, shifted, a.bfloat16().float())),
        lambda: torch.addmm(bias, b, a),
        lambda: torch.addmm(bias, a, b, alpha=2),
        lambda: torch.addmm(bias[0], a, b),
        lambda: torch.addmm(bias, a, b, out=torch.empty(WIDTH, WIDTH).t()),
        lambda: torch.addmm(bias, (operand := a.clone()), b, out=operand),
    ]
    for other in others:
        with later.kept():
            torch.addmm(bias, a, b), torch.addmm(bias, a, b)
        assert taken(later, other) == 0
    with later.kept():
        torch.addmm(bias, a, b), torch.addmm(bias, a, b)
    torch.set_float32_matmul_precision("high")
    try:
        assert taken(later, lambda: torch.addmm(bias, a, b)) == 0
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "change", [Tensor.neg_, lambda one: one.data.mul_(2), lambda one: one.detach().numpy().fill(7.0)]
)
def test_later_changes_in_place_do_not_reach_what_is_kept(
    products: Products, change: Callable[[Tensor], object]
) -> None:
    for which in ("operand", "result"):
        a, b = square(), square(1)
        expected = a @ b
        with products.kept():
            operands = [a.clone() for _ in range(2)]
            for operand in operands:
                result = operand @ b
                change(operand if which == "operand" else result)
        with products.taken():
            assert all(torch.equal(a @ b, expected) for _ in range(2))
            assert not torch.equal(operands[0] @ b, expected) or which == "result"


def test_a_factor_is_taken_for_no_other(later: Products) -> None:
    a, b, bias = square(), square(1), square(2)
    with later.kept():
        [torch.addmm(bias, a, b, alpha=2) for _ in range(3)]
    assert taken(later, lambda: torch.addmm(bias, a, b, beta=2)) == 0


def test_a_product_of_a_conjugate_is_another_one(later: Products) -> None:
    a, b = torch.complex(square(), square(1)), torch.complex(square(2), square(3))
    with later.kept():
        a @ b, a @ b, a.conj() @ b
    assert taken(later, lambda: a.conj() @ b) == 0


def test_memory_that_numpy_has_is_not_kept(later: Products) -> None:
    a, b = square(), square(1)
    of_numpy = a.numpy()
    with later.kept():
        a @ b, a @ b
        of_numpy *= 2
    assert torch.equal(a, 2 * square()), "a still has the memory of numpy"
    assert taken(later, lambda: a @ b) == 0


def test_a_kernel_that_differs_is_not_taken(products: Products) -> None:
    a, b = square(), square(1)
    with products.kept():
        a @ b, a @ b
    for known in products._known.values():
        known[0].results.add_(1)
    assert taken(products, lambda: a @ b) == 0


def test_two_parts_of_the_same_memory_are_not_the_same() -> None:
    shared = sharing(torch.arange(8.0))
    assert same_bits(shared[2:4], sharing(shared)[2:4])
    assert not same_bits(shared[2:4], sharing(shared)[3:5])


def test_not_a_number_has_the_same_bits_and_other_dtypes_are_compared_too() -> None:
    nan = torch.full((3,), torch.nan)
    assert same_bits(nan, nan.clone())
    for dtype in (torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.complex128):
        assert same_bits(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype))
        assert not same_bits(torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype))


class Squares(nn.Module):
    """Its layers have one shape, so that each could be taken for another. It changes a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.data.mul_(2.0)
        return self.third(self.second(h.relu_()).relu())


def given() -> dict[str, Tensor]:
    return {"x": square(3), "target": torch.arange(SAMPLES) % WIDTH}


@pytest.fixture(scope="module")
def pef(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squares")
    return proved(folder, Squares(), given=given(), training={"batch_size": SAMPLES}).path


def _wrong(pef: Path, wrong: Path, change: Callable[[Node], Node]) -> None:
    document = read(pef)
    training: Graph = document.program.step
    changed = replace(training, nodes=tuple(map(change, training.nodes)))
    write(wrong, document.only(program=replace(document.program, training=changed)), map_weights(pef))


def _products(pef: Path) -> list[Node]:
    return [node for node in read(pef).program.step.nodes if node.operator in ("aten.addmm.default", "aten.mm.default")]


def _swapped(node: Node, at: int, operand: Any) -> Node:
    return replace(node, args=(*node.args[:at], operand, *node.args[at + 1 :]))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_wrong_operand_of_the_same_shape_is_found(pef: Path, tmp_path: Path, at: int) -> None:
    second, third = _products(pef)[1:3]
    _wrong(pef, tmp_path / "wrong.pef", lambda node: _swapped(node, at, second.args[at]) if node == third else node)
    with pytest.raises(CaptureError, match=r"in step 1 .* differs from eager PyTorch"):
        prove(tmp_path / "wrong.pef", LiveModel(Squares(), Example(given())), options(tmp_path))


def test_a_change_in_place_that_is_lost_is_found(pef: Path, tmp_path: Path) -> None:
    lost = next(
        node for node in read(pef).program.step.nodes if node.operator == "aten.mul.Tensor" and 2.0 in node.args
    )
    _wrong(pef, tmp_path / "wrong.pef", lambda node: replace(node, args=(node.args[0], 1.0)) if node == lost else node)
    with pytest.raises(CaptureError, match=r"in step 1 .* differs from eager PyTorch"):
        prove(tmp_path / "wrong.pef", LiveModel(Squares(), Example(given())), options(tmp_path))


class OfNumpy(nn.Module):
    """It changes a buffer where no capture sees it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(SAMPLES, WIDTH))
        self.of_numpy = self.get_buffer("kept").numpy()

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("kept").copy_(self.layer(x).detach())
        self.of_numpy *= 2
        return self.layer(self.get_buffer("kept").clone())


def test_a_change_by_numpy_that_is_lost_is_found(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"in step 1 .* differs from eager PyTorch"):
        proved(tmp_path, OfNumpy(), given=given(), training={"batch_size": SAMPLES})


def test_a_step_takes_all_products_but_the_first_of_each_kind(pef: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = [], Products

    def counted() -> Products:
        found.append(made())
        return found[-1]

    monkeypatch.setattr(proving, "Products", counted)
    prove(pef, LiveModel(Squares(), Example(given())), options(pef.parent), steps=2)
    count, in_evaluation = len(_products(pef)), 3
    firsts = len({node.operator for node in _products(pef)}) + 1  # and with a place for the result
    assert found[0].found == 2 * count + in_evaluation - firsts
