"""Traces of a run: what each rank did in some of its steps, with times that were measured."""
