"""Checkpoints: what a run writes to disk so that it can be resumed. docs/formats.md describes the format.

folder, content  the files: names and locks; the manifest, and pieces of tensors
saver            writes them, and what each rank takes of one
choose           which one is resumed, and what differs from the run

Which samples are left of an epoch: `Shard` in `runtime/run/replica.py`.
"""
