"""Which library multiplies matrices in compiled code, and in what form."""

# What torch.backends offers has no types.
# mypy: no-disallow-untyped-calls

from pathlib import Path

import pytest
import torch

from sambasim.ir.graph import Node, Ref
from sambasim.runtime.engine import rebuild as module
from sambasim.runtime.engine.linear import FEWEST_FLOPS, by_onednn, mkl_favours
from sambasim.runtime.engine.rebuild import fake_values, rebuild

SIDE = 256


@pytest.mark.parametrize(("vendor", "favoured"), [("GenuineIntel", True), ("AuthenticAMD", False)])
def test_mkl_favours_the_processors_of_its_maker(tmp_path: Path, vendor: str, favoured: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert mkl_favours(tmp_path / "cpuinfo") is (favoured and torch.backends.mkl.is_available())


def test_a_machine_that_does_not_describe_itself_is_not_favoured(tmp_path: Path) -> None:
    assert not mkl_favours(tmp_path / "cpuinfo")


def test_little_work_is_left_to_torch() -> None:
    assert 2 * SIDE**2 < FEWEST_FLOPS
    assert not by_onednn(torch.empty(1, SIDE), torch.empty(SIDE, SIDE))


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_a_bias_keeps_its_value(
    monkeypatch: pytest.MonkeyPatch, onednn: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "by_onednn", lambda x, weight: onednn)
    torch.manual_seed(0)
    symbols = {
        "bias": torch.randn(SIDE, dtype=dtype),
        "x": torch.randn(SIDE, SIDE, dtype=dtype),
        "weight": torch.randn(SIDE, SIDE, dtype=dtype),
    }
    node = Node("linear", "aten.addmm.default", tuple(Ref(name) for name in symbols), (), ("y",))
    built = rebuild([node], list(symbols), ["y"], fake_values([node], symbols))
    called = [str(call.target) for call in built.graph.nodes if call.op == "call_function"]
    if dtype is torch.bfloat16:
        assert called == ["aten.addmm.default"]  # which rounds once
    else:
        product = ["aten.t.default", "sambasim.linear.default"] if onednn else ["aten.mm.default"]
        assert called == [*product, "aten.add.Tensor"]
    expected = torch.addmm(*symbols.values())
    # Two libraries add 256 products of standard normal numbers in two orders.
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (0.0, 0.0)
    torch.testing.assert_close(built(*symbols.values())[0], expected, rtol=rtol, atol=atol)
