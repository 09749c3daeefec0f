"""The predicted cost of a section on a device: `compiler` cuts by it, `simulation` adds it up."""
