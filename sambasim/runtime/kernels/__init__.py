"""Arithmetic in C, for what takes torch's operators more than one pass over memory.

The machine's C compiler builds a kernel when it is first needed, in some tenths of a second, and it is kept in the
user's cache folder. Where there is no compiler, torch's operators do the same with the same bits, and take longer.
"""
