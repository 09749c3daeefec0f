"""What a command does, for the shell and for Python alike: no click here, and nothing is printed.

A command is about a `question` on a subject; `plan` checks and `variants` prices strategies; `memory`, `devices` and
`results` are their commands. `compile` makes a PEF in a `child` process, and has its `proof`. `run` trains.
"""
