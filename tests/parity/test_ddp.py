"""Several replicas against torch's DistributedDataParallel on gloo: the same shards, threads and optimizer kernel.

At two replicas there is one order in which two numbers can be added, and halving is exact: DDP's parameters have the
same bits after 20 steps. At three and more, gloo adds in a ring and divides first, and the runtime adds in a tree and
divides last: both round, differently, and training carries that on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sambasim.options.run import RunOptions
from tests.parity.conftest import Variant
from tests.support.eager import EagerReplica
from tests.support.examples import EXAMPLES, OPTIMIZERS
from tests.support.mpi import RANKS, body_command, run_mpi
from tests.support.whole import is_whole, whole_case

STEPS = 20  # at two replicas
FEW_STEPS = 10  # at more: sooner or later a rounding changes which element max-pooling takes, and so a whole gradient
BOUND = 1e-5
"""How far a tensor may be from DDP's at three replicas and more, in norm and relative to DDP's."""

ZERO_GRADIENTS: Mapping[str, frozenset[str]] = {
    # BatchNorm subtracts the bias of the convolution before it.
    "digits": frozenset({"digitsclassifier__features__0__bias", "digitsclassifier__features__3__bias"}),
    # A key's bias adds the same number to all scores of a query, and softmax takes it out again.
    "char_gpt": frozenset(f"chargpt__blocks__{block}__attention__qkv__bias.key" for block in range(2)),
}
"""By example: what has a gradient of zero in exact arithmetic. What is left of it is rounding, which Adam scales up to
steps of full size, so that two runs which round differently have nothing in common there."""


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by name; a fused bias of attention in its three parts."""
    for name, tensor in tensors.items():
        if name.endswith("qkv__bias"):
            yield from zip((f"{name}.query", f"{name}.key", f"{name}.value"), tensor.chunk(3), strict=True)
        else:
            yield name, tensor


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_list_of_zero_gradients_is_right(example: str, pefs: Mapping[Variant, Path]) -> None:
    """In float64, where rounding is far below any gradient that is not zero in exact arithmetic."""
    path = pefs[example, "sgd", False]
    replica = EagerReplica(path, RunOptions(pef=str(path)))
    replica.module.double()
    batch = [tensor.double() if tensor.is_floating_point() else tensor for tensor in replica.next_batch()]
    torch.autograd.backward(replica.loss(replica.module, batch))
    gradients = {name.removesuffix("__grad"): gradient for name, gradient in replica.gradients().items()}
    norms = {name: float(gradient.norm()) for name, gradient in _parts(gradients)}
    zero = {name for name, norm in norms.items() if norm < 1e-12 * max(norms.values())}
    assert zero == ZERO_GRADIENTS.get(example, frozenset())


@pytest.mark.parametrize("np", [whole_case(np) if np == 4 else np for np in RANKS if np > 1])
def test_parameters_are_those_of_ddp(np: int, pefs: Mapping[Variant, Path], tmp_path: Path) -> None:
    kinds: tuple[str, ...] = ("sgd", "adamw") if np == 2 else ("adamw",)
    if is_whole():
        kinds = tuple(OPTIMIZERS) if np == 2 else ("sgd", "adamw")
    chosen = {pefs[example, kind, False].stem: example for example in EXAMPLES for kind in kinds}
    paths = [str(path) for path in pefs.values() if path.stem in chosen]
    steps = STEPS if np == 2 else FEW_STEPS
    run_mpi(np, [*body_command("ddp"), str(tmp_path), str(steps), *paths], timeout=280).check()
    for stem, example in chosen.items():
        ours, ddp = (load_file(tmp_path / f"{stem}.{who}.safetensors") for who in ("ours", "ddp"))
        before = load_file(tmp_path / f"{stem}.before.safetensors")
        assert ours.keys() == ddp.keys()
        assert [name for name in before if torch.equal(before[name], ours[name])] == [], "everything is trained"
        if np == 2:
            assert [name for name in ours if not torch.equal(ours[name], ddp[name])] == [], stem
        else:
            theirs = dict(_parts({name: ddp[name].double() for name in before}))
            pairs = {name: (one.double(), theirs[name]) for name, one in _parts({name: ours[name] for name in before})}
            apart = {name: float((one - other).norm() / other.norm()) for name, (one, other) in pairs.items()}
            zero = ZERO_GRADIENTS.get(example, frozenset())
            assert {name: far for name, far in apart.items() if far >= BOUND and name not in zero} == {}, stem
            assert max(apart.values()) > 0, "in another order, something must round otherwise"
