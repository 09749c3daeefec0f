"""The commands, below the command line and the Python API."""
