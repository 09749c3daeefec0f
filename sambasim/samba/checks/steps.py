"""In which steps what takes time is looked at."""

_FIRST = (1, 2)
_RARER = 8


def is_looked_at(step: int) -> bool:
    """Whether step number `step`, which counts from 1, is 1, 2, 8, 64, 512 …"""
    if step in _FIRST:
        return True
    while step and step % _RARER == 0:
        step //= _RARER
    return step == 1
