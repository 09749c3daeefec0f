"""Bounds on the rounding of numbers."""

__all__ = ["MAX_BF16_TRUNCATE_NORMAL_REL"]

MAX_BF16_TRUNCATE_NORMAL_REL = 2.0**-7
"""The largest relative error of a normal fp32 number that is cut off to bf16, which has 8 significant bits."""
