"""Data sources, datasets and batches, for the compiler and the runtime."""
