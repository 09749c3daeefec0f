"""Checkpoints: what a run writes to disk so that it can be resumed. docs/formats.md describes the format."""
