"""What a section would cost on a device: the compiler cuts by it, and the simulation adds it up."""
