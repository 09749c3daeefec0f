"""Checkpoints: their format, what is read of them, and what is refused."""
