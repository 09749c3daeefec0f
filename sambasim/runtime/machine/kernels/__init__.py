"""C kernels, compiled at first use."""
