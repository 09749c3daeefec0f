"""The simulated devices, and the host.

spec       devices, links and clusters, from TOML files with sources
budget     what one rank may use of a device, at calibrated rates
placement  where ranks are on a cluster
host       the memory of the machine that sambasim runs on
"""
