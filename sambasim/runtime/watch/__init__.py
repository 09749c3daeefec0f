"""What every rank is doing, where the others and a person can read it, and who ends a job that cannot go on."""
