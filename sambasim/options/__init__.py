"""The options of `compile` and `run`: one schema for flags, TOML and the Python API. Imports no torch."""
