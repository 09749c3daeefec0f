"""The simulated hardware: devices and clusters as TOML files, with a source beside every figure."""
