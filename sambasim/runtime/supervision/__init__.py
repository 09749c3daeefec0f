"""Supervision of a job of several ranks: what each rank is doing, and how a job ends that cannot continue."""
