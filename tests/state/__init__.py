"""Models that do more than compute with tensors: each is equal to eager PyTorch, told or refused."""
