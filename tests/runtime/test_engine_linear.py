"""Which library multiplies matrices in compiled code, and in what form."""

# What torch.backends offers has no types.
# mypy: no-disallow-untyped-calls

from pathlib import Path

import pytest
import torch

from sambasim.ir.graph import Node, Ref
from sambasim.runtime.engine import inductor as module
from sambasim.runtime.engine import products
from sambasim.runtime.engine.inductor import fake_values, rebuild

SIDE = 256


@pytest.mark.parametrize(("vendor", "favoured"), [("GenuineIntel", True), ("AuthenticAMD", False)])
def test_mkl_favours_the_processors_of_its_maker(tmp_path: Path, vendor: str, favoured: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert products.mkl_favours(tmp_path / "cpuinfo") is (favoured and torch.backends.mkl.is_available())


def test_a_machine_that_does_not_describe_itself_is_not_favoured(tmp_path: Path) -> None:
    assert not products.mkl_favours(tmp_path / "cpuinfo")


@pytest.mark.parametrize(
    ("rows", "dtype", "favoured", "chosen"),
    [
        (SIDE, torch.float32, False, True),
        (SIDE, torch.float32, True, False),
        (1, torch.float32, False, False),
        (SIDE, torch.bfloat16, False, False),
    ],
    ids=["large", "on a processor that MKL favours", "little work", "narrow"],
)
def test_large_products_are_onednns_where_mkl_is_not_at_home(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, favoured: bool, chosen: bool
) -> None:
    monkeypatch.setattr(products, "mkl_favours", lambda processors: favoured)
    assert 2 * SIDE**2 < products.FEWEST_FLOPS <= 2 * SIDE**3
    x, weight = torch.empty(rows, SIDE, dtype=dtype), torch.empty(SIDE, SIDE, dtype=dtype)
    assert products.by_onednn(x, weight) is (chosen and torch.backends.mkldnn.is_available())


@pytest.mark.parametrize("onednn", [True, False])
def test_a_product_with_a_bias_keeps_its_value(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    monkeypatch.setattr(module, "by_onednn", lambda x, weight: onednn)
    torch.manual_seed(0)
    symbols = {"bias": torch.randn(SIDE), "x": torch.randn(SIDE, SIDE), "weight": torch.randn(SIDE, SIDE)}
    node = Node("linear", "aten.addmm.default", tuple(Ref(name) for name in symbols), (), ("y",))
    built = rebuild([node], list(symbols), ["y"], fake_values([node], symbols))
    called = [str(call.target) for call in built.graph.nodes if call.op == "call_function"]
    apart = ["aten.t.default", "sambasim.linear.default", "aten.add.Tensor"]
    assert called == (apart if onednn else ["aten.addmm.default"])
    # Two libraries add 256 products of standard normal numbers in two orders.
    torch.testing.assert_close(built(*symbols.values())[0], torch.addmm(*symbols.values()), rtol=1e-5, atol=1e-4)
