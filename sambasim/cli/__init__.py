"""The commands: the only prints and the only exit codes."""
