"""Plain PyTorch is what the runtime is held against."""
