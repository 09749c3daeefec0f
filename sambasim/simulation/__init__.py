"""Predicted times of a PEF on a device. Nothing here is measured."""
