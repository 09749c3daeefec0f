"""Memory that a step frees is kept for the next step.

Activations come and go with each pass. The C library gives large pieces back to the system as soon as they are freed,
and the system hands out pages anew, one fault and 4096 zeros each: thousands of them in every step.
"""

import ctypes

_M_TRIM_THRESHOLD = -1  # mallopt(3)
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no larger one
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, in this process; says whether it can be told. It is so with glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    told = [mallopt(_M_TRIM_THRESHOLD, _NEVER), mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)]
    return all(told)
