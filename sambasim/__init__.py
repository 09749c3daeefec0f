"""sambasim: the SambaFlow workflow without the hardware.

Importing this package imports neither torch nor MPI; the rooms below it do, when they are used.
"""

__version__ = "0.1.0"
