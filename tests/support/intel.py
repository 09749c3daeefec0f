"""Where the last bit is known to differ from eager PyTorch: on Intel CPUs."""

import pytest

from sambasim.runtime.machine.kernels import cpu_kind

ON_INTEL = pytest.mark.xfail(
    "GenuineIntel" in cpu_kind(),
    reason="a few elements differ in their last bit from eager PyTorch: MKL chooses kernels by alignment there, which "
    "MKL_CBWR=AVX512,STRICT ends for `orthogonal`, and not for `gan`, whose cause is not known",
    strict=False,
)
