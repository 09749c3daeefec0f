"""What both the compiler and the runtime need to know of data: sources, samples, batches."""
