"""`sambasim bench`: measures the sync paths on this machine, and checks every result."""
