"""What a command does, for the shell and for Python alike: no click here, and nothing is printed.

A command is about a `subject`; `question` predicts for it, `plan` and `planner` choose a strategy; `memory`, `devices`,
`report` and `compare` are their commands. `compile` makes a PEF in a `child` process, and has its `proof`. `run` comes
after `run_checks`.
"""
