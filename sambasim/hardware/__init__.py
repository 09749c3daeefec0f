"""THE MACHINE: what a device is, one TOML for each, with a source beside every number."""
