"""The clock: what a PEF would cost on a device. Predicted times, and nothing that was measured."""
