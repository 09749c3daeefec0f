"""The simulated devices, and the memory of this machine.

spec       devices, links and clusters, from TOML files with sources
budget     what one rank may use of a device, at calibrated rates; and what this machine has
placement  where ranks are on a cluster
"""
