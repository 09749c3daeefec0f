"""A tensor in a few letters and numbers: enough to tell whether two are alike, and whether they are near."""

import hashlib
import math

import torch
from torch import Tensor

from sambasim.pef.weights import bytes_of
from sambasim.records.digests import ValueDigest
from sambasim.runtime.record.seen import Seen

_DIGEST_BYTES = 8


def digested(seen: Seen, tensor: Tensor, micro_step: int | None = None) -> ValueDigest:
    """`tensor`, which is what `seen` says, as it is now."""
    norm = _norm(tensor)
    finite = math.isfinite(norm)
    not_finite = 0 if finite else int(tensor.numel() - torch.isfinite(tensor).sum())
    return ValueDigest(
        seen.what, seen.name, micro_step, seen.section, digest_of(tensor), norm if finite else None, not_finite
    )


def digest_of(tensor: Tensor) -> str:
    """Of the dtype, the shape, and the elements in the order of rows."""
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().to(torch.float64)))
