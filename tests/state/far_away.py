"""A module with state, as people have beside their models."""

MODULE_CALLS = 0


def count() -> int:
    global MODULE_CALLS
    MODULE_CALLS += 1
    return MODULE_CALLS - 1
