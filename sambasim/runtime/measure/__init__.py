"""Measures this machine: `collectives` and `paths` the sync paths, for `bench`, which checks every result; `machine`
the parts of a step, for `plan --here`."""
