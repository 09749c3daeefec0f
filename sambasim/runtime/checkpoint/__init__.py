"""Checkpoints: what a run writes to disk so that it can be resumed. README.md describes the format."""
