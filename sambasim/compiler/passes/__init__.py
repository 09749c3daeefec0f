"""Passes over a program: `sequence` has their order, by compile options; `update` adds optimizers and data parallelism,
`recompute` repeats operators."""
