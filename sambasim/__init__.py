"""sambasim: the SambaFlow workflow without the hardware. Importing this package imports neither torch nor MPI."""

__version__ = "0.1.0"
