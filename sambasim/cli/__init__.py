"""The shell commands. Only here do commands print results and set exit codes. `main` has the table of commands, which
it imports at need.

shared    options of several commands
compile   compile, demo
run       run
apps      app, env, stand-in
inspect   inspect, verify, compare, report
predict   plan, simulate, tilestat, devices, estimate-memory, validate
machine   doctor, bench
"""
