"""Checkpoints: what a run writes to disk so that it can be resumed. docs/formats.md describes the format.

folder, content  the files: names and locks; the manifest, and pieces of tensors
saver            writes them
changes          what differs between a checkpoint and the run that resumes it
choose           which one is resumed, and what each rank takes of it

Which samples are left of an epoch: `Shard` in `runtime/run/replica.py`.
"""
