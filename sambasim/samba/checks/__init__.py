"""Checks for mistakes of apps that the hardware does not report. Each finding has a code, and a row in `../README.md`.

DP01..DP03, DP07   replicas.py     the command line, the compile and session.run; what replicas train
AP02, AP08         replicas.py     the same, of one replica
DP04..DP06, AP03   data.py         DistributedSamplers, and the batches
DP08, DP09         job.py          files, and the number of steps; `sambasim app --check`
AP05, AP06, AP07   host.py         what host and device do not exchange, with options.py; DP02 of backwards
AP01, AP04, AP09   ../inputs.py, ../notices.py, ../functional.py, ../device.py, ../loaded.py
"""
