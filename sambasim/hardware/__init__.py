"""Devices and clusters to simulate, and how much memory there is, on them and here.

spec       devices, links and clusters, from TOML files with sources
budget     what one rank may use of a device, at calibrated rates; and what this machine has
placement  where ranks are on a cluster
"""
