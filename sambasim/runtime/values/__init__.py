"""What device memory holds: means of gradients, optimizers, weights."""
