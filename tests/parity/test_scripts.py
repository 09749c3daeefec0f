"""The scripts of tests/parity/scripts, in every layout, beside plain PyTorch in one process."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.scripts import Trained
from tests.parity.scripts.layouts import LAYOUTS, SCRIPTS, goes, in_sambasim, saved_in, script
from tests.support.mpi import run_mpi
from tests.support.whole import whole, whole_case

_BY_DEFAULT = ("np 1", "np 2, emulated")
_CASES = [
    (name, title) if title in _BY_DEFAULT else whole_case(name, title)
    for name, (title, layout) in product(SCRIPTS, LAYOUTS.items())
    if layout.ranks == 1 and goes(name, layout)
]


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def apart(found: Trained, wanted: Trained) -> float:
    """The largest difference of losses and of weights, relative to the largest number of a tensor."""
    assert found.scores == pytest.approx(wanted.scores, rel=1e-6)
    assert found.tensors.keys() == wanted.tensors.keys()
    of_weights = [_apart(found.tensors[name], one) for name, one in wanted.tensors.items() if bool(one.any())]
    assert max(wanted.losses) > min(wanted.losses)
    return max(_apart(torch.tensor(found.losses), torch.tensor(wanted.losses)), *of_weights)


@pytest.mark.parametrize(("name", "title"), _CASES)
@pytest.mark.usefixtures("one_thread")
def test_it_trains_as_plain_pytorch_does(name: str, title: str, tmp_path: Path) -> None:
    layout, trained = LAYOUTS[title], script(name)
    far = apart(in_sambasim(name, layout, tmp_path), trained.in_pytorch(layout.replicas))
    is_alike = layout.replicas * trained.ACCUMULATED == 1 and "loss.mean_over" not in trained.HOW.get("set", {})
    assert far <= (0.0 if is_alike else SCRIPTS[name])


@whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.usefixtures("one_thread")
def test_every_layout_has_the_bits_of_one_process(ranks: int, tmp_path: Path) -> None:
    command = ["python", "-m", "tests.parity.scripts.layouts", str(ranks), str(tmp_path)]
    run_mpi(ranks, command, timeout=500).check()
    differing = {}
    for name in SCRIPTS:
        alone = {count: in_sambasim(name, LAYOUTS[_emulated(count)], tmp_path) for count in {1, 2, ranks}}
        for title, layout in LAYOUTS.items():
            if layout.ranks == ranks and goes(name, layout):
                found = Trained(*torch.load(saved_in(tmp_path, name, title)))
                wanted = alone[layout.replicas]
                far = apart(found, script(name).in_pytorch(layout.replicas))
                print(f"{name:6} {title:24} {far:.1e}")
                assert far <= SCRIPTS[name]
                if (found.losses, found.scores) != (wanted.losses, wanted.scores) or _others(
                    found.tensors, wanted.tensors
                ):
                    differing[name, title] = _others(found.tensors, wanted.tensors)
    assert not differing


def _emulated(count: int) -> str:
    return "np 1" if count == 1 else f"np {count}, emulated"


def _others(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [name for name in other if not torch.equal(one[name], other[name])]
