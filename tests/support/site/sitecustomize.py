"""Python runs this as it starts, in every process of a job of the tests: each imports torch, and many the compiler. At
the default threshold, looking for garbage among a million new objects takes up to a third of that time."""

import gc

gc.set_threshold(50_000)
