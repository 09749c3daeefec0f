"""Checks for mistakes of apps that the hardware does not report.

Each finding has a stable code, a row in `findings.py`, and one file that looks for it:

    code               file            looks at
    DP01, DP02, AP02   arguments.py    the command line, the compile, and the arguments of session.run
    DP03, DP07         replicas.py     weights and hyperparameters of the replicas
    DP04..DP06, AP03   data.py         DistributedSamplers, and the batches
    DP08, DP09         job.py          files, and the number of steps
    AP01               ../inputs.py    the shapes of a batch
    AP04               keywords.py     arguments of library functions
    AP05               unsent.py       changes on the host that do not reach the device
    AP06, AP07         unfetched.py    weights that host and device do not exchange
    AP08               replicas.py     the loss
    AP09               ../start.py     what the backward starts from

`replicas.py` holds all checks of a loaded PEF; `on_demand.py` is `sambasim app --check`.
"""
