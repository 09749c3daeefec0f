"""Checks for mistakes of apps that the hardware does not report.

Each finding has a stable code, a row in `samba/README.md`, and one file that checks for it:

    DP01, DP02, AP02   arguments.py    the command line, the compile, and the arguments of session.run
    AP04               arguments.py    arguments of library functions
    DP03, DP07, AP08   replicas.py     weights and hyperparameters of the replicas; the loss
    DP04..DP06, AP03   data.py         DistributedSamplers, and the batches
    DP08, DP09         job.py          files, and the number of steps; `sambasim app --check`
    AP01, AP09         ../inputs.py, ../loaded.py
    AP05               unsent.py       changes on the host that do not reach the device
    AP06, AP07         unfetched.py    weights that host and device do not exchange
"""
