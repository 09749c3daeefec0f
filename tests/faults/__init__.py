"""Bad input of every kind, by every way in: what is said of it, the exit code, and that nothing half is left."""
