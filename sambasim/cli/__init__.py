"""The shell commands. Only here do commands print results and set exit codes. `main` has the table of commands, which
it imports at need.

shared                                            options of several commands
compile, run, app, slurm, doctor, bench           the commands of these names
inspect                                           results: inspect, compare, verify, tilestat
predict                                           devices: simulate, plan, report, estimate-memory, devices, validate
"""
