"""The line `weights SHA`, which every stand-in prints at its end so that runs can be compared."""
# mypy: ignore-errors

import hashlib

from sambaflow import samba


def print_weights(model, rank=0):
    """Print a digest of the host's weights and buffers, on rank 0 (and on the rank -1 of a single process)."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + samba.to_torch(value).detach().float().contiguous().numpy().tobytes())
    if rank <= 0:
        print(f"weights {digest.hexdigest()[:16]}")
