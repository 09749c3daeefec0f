"""Arithmetic in C, for what torch's operators do in several passes over memory; without a compiler, torch does it."""
